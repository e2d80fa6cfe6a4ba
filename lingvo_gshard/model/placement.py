"""The placement of an experiment's model on its devices."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.layers import moe_sizes
from lingvo_gshard.model import accumulation
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning
from xla_spmd.mesh import Mesh, names_of

_BATCHES = ("input", "eval_input", "decode")


def partitioning(params: Params, num_partitions: int | None) -> Partitioning:
    """Returns the experiment's table over its mesh of `num_partitions` devices.

    None stands for the fewest devices that the mesh can have, in order.
    On a mesh of one axis and with fewer experts (in the first stack) than devices, the experts are
    replicated along a second axis, `r`; all other letters are split over it, too. Raises ValueError
    if the mesh or the table is malformed or does not fit the devices, and if the table names a dim
    or a stack that the model lacks.
    """
    assignment = None if num_partitions is None else params.device_assignment
    mesh = Mesh.parse(params.mesh, num_partitions, assignment)
    table = Partitioning.parse(mesh, params.sharding)
    table.check_letters(f"sharding={params.sharding}", params.task.cls.DIMS)
    stacks = params.task.cls.STACKS
    unknown = sorted(table.stacks - stacks.keys())
    if unknown:
        raise ValueError(
            f"sharding={params.sharding}: no stack {unknown[0]!r}; rows may be for "
            f"{', '.join(stacks) or 'no stack'} or weights alone."
        )

    # With several axes, the table itself names the axis that splits the experts.
    first_stack = next(iter(stacks), None)
    if first_stack is None or len(mesh.axis_names) > 1:
        return table
    first_moe = params.task.Get(first_stack).moe
    if first_moe is None:
        return table

    # If whole copies of the experts do not fit, all devices split them, unevenly.
    num_experts = first_moe.num_experts
    (expert_partitions,) = table.in_stack(first_stack).factor("E")
    copies = expert_partitions // num_experts if num_experts > 0 else 0
    if copies < 2 or copies * num_experts != mesh.num_partitions:
        return table
    return _with_copies(table, copies, num_experts)


def _with_copies(table: Partitioning, copies: int, num_experts: int) -> Partitioning:
    """Returns the table with its only axis split in two: copies of all experts, and experts."""
    (axis,) = table.mesh.axis_names
    copies_axis = "r" if axis != "r" else "copies"
    both = (copies_axis, axis)
    mesh = Mesh(both, (copies, num_experts), table.mesh.device_assignment)

    rows = {}
    for key, row in table.table:
        is_whole = not row  # A letter whose row is `-` stays whole.
        rows[key] = row if key[-1] in "Ee" or is_whole else both
    return Partitioning.from_dict(mesh, rows)


def num_weights(params: Params) -> int:
    """Returns the number of scalars in the model's weights; vocabulary sizes must be set."""
    unpartitioned = Partitioning(Mesh.flat(1), ())
    return params.task.Instantiate(Annotator(unpartitioned)).num_weights


def num_groups(params: Params, name: str = "input") -> dict[str, int]:
    """Returns the number of groups in each MoE stack of the batch called `name`.

    In training (`input`), it is the number in a microbatch. Raises ValueError if the group size
    does not divide the tokens of the batch.
    """
    batch = params.Get(name)
    groups = {}
    for stack, length in params.task.cls.STACKS.items():
        p = params.task.Get(stack)
        if p.moe is None:
            continue
        rows = batch.batch_size
        if name == "input":
            rows //= params.train.gradient_accumulation_steps * max(p.microbatches, 1)
        setting = f"{name}: task.{stack}.moe.group_size"
        groups[stack] = moe_sizes.num_groups(p.moe, setting, rows, batch.Get(length))
    return groups


def dispatch(params: Params) -> str | None:
    """Returns how tokens reach their experts, such as `EINSUM`; None without experts.

    If the stacks differ, each is named: `EINSUM (encoder), GATHER (decoder)`.
    """
    names = {}
    for stack in params.task.cls.STACKS:
        moe = params.task.Get(stack).moe
        if moe is not None:
            names[stack] = moe.dispatch.name
    return _described(names)


def remat(params: Params) -> str | None:
    """Returns what the backward pass recomputes, such as `BLOCK`; None without stacks.

    If the stacks differ, each is named: `NONE (encoder), BLOCK (decoder)`.
    """
    stacks = params.task.cls.STACKS
    return _described({stack: params.task.Get(stack).remat.name for stack in stacks})


def _described(names: Mapping[str, str]) -> str | None:
    """Returns the names of all stacks' choices, in one text."""
    stacks: dict[str, list[str]] = {}
    for stack, name in names.items():
        stacks.setdefault(name, []).append(stack)
    if len(stacks) > 1:
        return ", ".join(f"{name} ({' and '.join(where)})" for name, where in stacks.items())
    return next(iter(stacks), None)


def bubble(params: Params) -> float:
    """Returns the largest share of the time in which a pipeline's stages are idle.

    It is 0 without a pipeline, and without stacks.
    """
    shares = []
    for name in params.task.cls.STACKS:
        stack = params.task.Get(name)
        ticks = stack.microbatches + stack.stages - 1
        shares.append((stack.stages - 1) / ticks)
    return max(shares, default=0.0)


def check_sizes(params: Params, table: Partitioning, batches: Collection[str] = _BATCHES) -> None:
    """Raises ValueError if a size that the mesh may split is 0.

    Also raises it if the group size does not divide the tokens of a batch of training or of
    evaluation, or train.gradient_accumulation_steps the rows of a partition.
    """
    if "input" in batches:
        (partitions,) = table.factor("B")
        steps = params.train.gradient_accumulation_steps
        accumulation.check(steps, params.input.batch_size, partitions)
    if "eval_input" in batches:
        num_groups(params, "eval_input")

    for name, (_, _, size) in _sizes(params, table, batches).items():
        if size < 1:  # A larger size need not be divisible: XLA pads it.
            raise ValueError(f"{name} = {size}: expected 1 or more.")


def check(params: Params, batches: Collection[str], num_partitions: int | None) -> None:
    """Raises ValueError for sizes of layers, or of the named batches, that no devices can have.

    Raises it also for a mesh or a table that does not fit `num_partitions` devices, or, if it is
    None, any number of devices. Vocabulary sizes must be set. Takes a fraction of a second, and
    imports neither TensorFlow nor JAX.
    """
    table = partitioning(params, num_partitions)
    if batches:
        check_sizes(params, table, batches)
    params.task.Instantiate(Annotator(table))


def check_divisible(
    params: Params, table: Partitioning, batches: Collection[str] = _BATCHES
) -> None:
    """Raises ValueError unless the mesh divides experts, groups, and the named batches.

    Sizes that it does not divide also work, but then some devices have less work than others.
    Raises ValueError also in the cases that check_sizes lists.
    """
    check_sizes(params, table, batches)
    for name, (rows, letter, size) in _sizes(params, table, batches).items():
        (partitions,) = rows.factor(letter)
        if size % partitions:
            raise ValueError(_not_divided(name, letter, size, rows))


def _sizes(
    params: Params, table: Partitioning, batches: Collection[str]
) -> dict[str, tuple[Partitioning, str, int]]:
    """Returns the sizes that a mesh may split: name -> (the table that splits it, letter, size)."""
    sizes = {}
    for stack in ("", *sorted(table.stacks)):
        where = f"in the {stack}, " if stack else ""
        for name in batches:
            rows = params.Get(name).batch_size
            sizes[f"{where}{name}.batch_size"] = (table.in_stack(stack), "B", rows)

    for stack, count in num_groups(params).items():
        own = table.in_stack(stack)
        experts = params.task.Get(stack).moe.num_experts
        sizes[f"task.{stack}.moe.num_experts"] = (own, "E", experts)
        sizes[f"the {stack}'s groups (tokens / task.{stack}.moe.group_size)"] = (own, "G", count)
    return sizes


def _not_divided(name: str, letter: str, size: int, table: Partitioning) -> str:
    (partitions,) = table.factor(letter)
    axes = " and ".join(names_of(table.axes(letter))) or "none"
    return (
        f"The {partitions} partitions along mesh axis {axes}, which splits {letter}, do not divide "
        f"{name} = {size}; choose a divisor, or change it with --set."
    )
