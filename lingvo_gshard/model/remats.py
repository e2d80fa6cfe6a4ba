"""Automatic rematerialization: the least recomputation whose training step fits (section 5.1).

Stacks with remat=AUTO share one Remat. It is found before a layer is made, so that no layer knows
AUTO. An estimate from the products of the loss decides which program is compiled first, and the
compiler decides which one fits.
"""

from collections.abc import Callable, Sequence

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.layers.numerics import Remat
from lingvo_gshard.model.step_memory import StepMemory
from lingvo_gshard.model.step_products import StepProduct
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.sharding.layout import Partitioning
from xla_spmd.mesh import Mesh


def automatic(params: Params) -> list[str]:
    """Returns the stacks whose remat is AUTO."""
    return [stack for stack, remat in _by_stack(params).items() if remat is Remat.AUTO]


def settings(params: Params, remat: Remat) -> list[str]:
    """Returns the settings, `path=value`, of a Remat in place of AUTO."""
    return [f"{path(stack)}={remat.name}" for stack in automatic(params)]


def path(stack: str) -> str:
    """Returns the path of a stack's remat."""
    return f"task.{stack}.remat"


def replaced(params: Params, remat: Remat) -> Params:
    """Returns a copy of the settings with a Remat in place of AUTO."""
    changed = params.Copy()
    for stack in automatic(params):
        changed.task.Get(stack).remat = remat
    return changed


def least(
    params: Params,
    products: Callable[[Params], Sequence[StepProduct]],
    partitioning: Partitioning,
    capacity_bytes: float,
    fits: Callable[[Remat], bool],
) -> Remat | None:
    """Returns the first Remat, in their order, whose training step fits; None if none does.

    A pipeline has no other Remat than BLOCK.

    Args:
      params: The experiment, with AUTO in one stack or more.
      products: Returns the products of its loss on a batch.
      partitioning: Its table over the mesh.
      capacity_bytes: The memory of a device.
      fits: Compiles a step with this Remat in place of AUTO, and returns whether it fits. Of two
        neighbours in the order, the second is taken to fit if the first does.
    """
    if any(params.task.Get(stack).stages > 1 for stack in params.task.cls.STACKS):
        return Remat.BLOCK if fits(Remat.BLOCK) else None

    # The estimate comes near, so that two programs are compiled more often than four.
    order = Remat.order()
    start = _first_by_estimate(params, products(params), partitioning, capacity_bytes)
    if not fits(order[start]):
        return next((remat for remat in order[start + 1 :] if fits(remat)), None)
    while start > 0 and fits(order[start - 1]):
        start -= 1
    return order[start]


def _first_by_estimate(
    params: Params,
    products: Sequence[StepProduct],
    partitioning: Partitioning,
    capacity_bytes: float,
) -> int:
    """Returns the place of the first Remat that fits by the estimate, or BLOCK's, in the order."""
    # Shapes and products do not depend on the Remat.
    model = TaskModel(replaced(params, Remat.BLOCK), Partitioning(Mesh.flat(1), ()))
    memory = StepMemory(params, model, products)
    order = Remat.order()
    for place, remat in enumerate(order):
        remats = _by_stack(replaced(params, remat))
        scatters = params.train.scatter_gradients
        num_bytes = memory.num_bytes(partitioning, remats, scatter_gradients=scatters)
        if num_bytes <= capacity_bytes:
            return place
    return len(order) - 1


def _by_stack(params: Params) -> dict[str, Remat]:
    return {stack: params.task.Get(stack).remat for stack in params.task.cls.STACKS}
