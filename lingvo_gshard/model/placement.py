"""How an experiment's model lies on its devices."""

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.layers import moe, pipeline
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.sharding.mesh import Mesh

_STACKS = {"encoder": "source_len", "decoder": "target_len"}


def partitioning(params: Params, num_partitions: int) -> Partitioning:
    """Returns the experiment's table over a mesh of `num_partitions` devices.

    With fewer experts than devices, the experts are replicated along a second axis, `r`, which
    every other letter of the experts' axis is split over, too.
    """
    p = params.task.encoder.moe
    if p is None or num_partitions <= p.num_experts:
        return Partitioning.from_dict(Mesh.flat(num_partitions), params.sharding)
    mesh = Mesh(("r", "d"), (num_partitions // p.num_experts, p.num_experts))
    table = {
        letter: axis if letter == "E" else ("r", axis) for letter, axis in params.sharding.items()
    }
    return Partitioning.from_dict(mesh, table)


def num_weights(params: Params) -> int:
    """Returns the number of scalars in the model's weights; vocabulary sizes must be set."""
    return params.task.Instantiate(Partitioning(Mesh.flat(1), ())).num_weights


def num_groups(params: Params) -> dict[str, int]:
    """Returns how many groups of tokens a (micro)batch has in each stack with experts.

    Raises ValueError if a stack's group size does not divide its tokens.
    """
    groups = {}
    for stack, length in _STACKS.items():
        if (p := params.task.Get(stack).moe) is not None:
            rows = params.input.batch_size // params.task.Get(stack).microbatches
            sizes = rows, params.input.Get(length)
            groups[stack] = moe.num_groups(p, f"task.{stack}.moe.group_size", *sizes)
    return groups


def bubble(params: Params) -> float:
    """Returns the share of the time that a pipeline's stages have no microbatch, at worst."""
    return max(pipeline.bubble(params.task.Get(stack)) for stack in _STACKS)


def check_divisible(params: Params, num_partitions: int) -> None:
    """Raises ValueError unless the partitions divide every dimension that is split.

    The error names the setting to change.
    """
    if num_partitions < 1:
        raise ValueError(f"--num_partitions must be 1 or more, got {num_partitions}.")
    p = params.task.encoder.moe
    sizes = {
        "input.batch_size": params.input.batch_size,
        "decode.batch_size": params.decode.batch_size,
    }
    if p is not None:
        # Fewer experts than partitions are replicated, and need only divide them.
        if p.num_experts < 1 or num_partitions % p.num_experts:
            sizes["task.encoder.moe.num_experts"] = p.num_experts
        for stack, count in num_groups(params).items():
            sizes[f"the {stack}'s groups (tokens / task.{stack}.moe.group_size)"] = count
    for name, size in sizes.items():
        if size < 1 or size % num_partitions:
            raise ValueError(
                f"--num_partitions={num_partitions} does not divide {name} = {size}; choose a "
                "divisor, or change it with --set."
            )
