"""How an experiment's model lies on its devices."""

from collections.abc import Collection

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.layers import moe
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.sharding.mesh import Mesh, names_of

# The stacks of layers, and the settings of their rows' lengths.
STACKS = {"encoder": "source_len", "decoder": "target_len"}
_ROWS = ("input", "eval_input", "decode")


def partitioning(params: Params, num_partitions: int) -> Partitioning:
    """Returns the experiment's table over its mesh of `num_partitions` devices.

    On a mesh of one axis and with fewer experts (the encoder's) than devices, the experts are
    replicated along a second axis, `r`, which every other letter is split over, too. Raises
    ValueError if mesh or table make no sense or do not fit the devices.
    """
    mesh = Mesh.parse(params.mesh, num_partitions, params.device_assignment)
    parts, p = Partitioning.parse(mesh, params.sharding), params.task.encoder.moe
    copies = parts.factor("E")[0] // p.num_experts if p and p.num_experts > 0 else 0
    if len(mesh.axis_names) > 1 or copies < 2 or copies * p.num_experts != num_partitions:
        return parts
    (axis,) = mesh.axis_names
    axes = ("r" if axis != "r" else "copies", axis)
    split = Mesh(axes, (copies, p.num_experts), mesh.device_assignment)
    table = {letter: row if letter in "Ee" or not row else axes for letter, row in parts.table}
    return Partitioning.from_dict(split, table)


def num_weights(params: Params) -> int:
    """Returns the number of scalars in the model's weights; vocabulary sizes must be set."""
    return params.task.Instantiate(Partitioning(Mesh.flat(1), ())).num_weights


def num_groups(params: Params, name: str = "input") -> dict[str, int]:
    """Returns a batch's number of groups in each MoE stack, in training of a microbatch.

    ValueError as moe.num_groups.
    """
    groups, batch = {}, params.Get(name)
    for stack, length in STACKS.items():
        if (p := params.task.Get(stack).moe) is not None:
            parts = params.task.Get(stack).microbatches if name == "input" else 1
            sizes = batch.batch_size // max(parts, 1), batch.Get(length)
            groups[stack] = moe.num_groups(p, f"{name}: task.{stack}.moe.group_size", *sizes)
    return groups


def bubble(params: Params) -> float:
    """Returns the share of the time that a pipeline's stages have no microbatch, at worst."""
    stacks = [params.task.Get(stack) for stack in STACKS]
    return max((p.stages - 1) / (p.microbatches + p.stages - 1) for p in stacks)


def check_divisible(params: Params, parts: Partitioning, rows: Collection[str] = _ROWS) -> None:
    """Raises ValueError unless the mesh divides experts, groups, and the batches in `rows`.

    Also raises it if the group size does not divide the tokens of an evaluation batch, which may
    have any number of groups.
    """
    sizes = {f"{name}.batch_size": ("B", params.Get(name).batch_size) for name in rows}
    if "eval_input" in rows:
        num_groups(params, "eval_input")
    for stack, count in num_groups(params).items():
        experts = params.task.Get(stack).moe.num_experts
        sizes[f"task.{stack}.moe.num_experts"] = ("E", experts)
        sizes[f"the {stack}'s groups (tokens / task.{stack}.moe.group_size)"] = ("G", count)
    for name, (letter, size) in sizes.items():
        (ways,) = parts.factor(letter)
        if size < 1 or size % ways:
            axes = " and ".join(names_of(parts.axes(letter))) or "none"
            raise ValueError(
                f"The {ways} partitions along mesh axis {axes}, which splits {letter}, do not "
                f"divide {name} = {size}; choose a divisor, or change it with --set."
            )
