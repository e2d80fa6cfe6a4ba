"""The memory of a training state on one core, which follows from its specs and the table."""

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.model.step_memory import state_bytes
from lingvo_gshard.sharding.layout import Partitioning
from xla_plan.cost import memory
from xla_plan.cost.memory import Buffer, RoleMemory
from xla_plan.machines.hardware import GIB

# The roles of Figure 7, with a separate role for the optimizer's slots.
REPLICATED = "replicated weights"  # All weights but the experts'.
EXPERTS = "expert weights"
SLOTS = "optimizer slots"  # The slots and the moving averages of the weights, if any.


def by_role(
    state: NestedMap, partitioning: Partitioning, is_donated: bool = True
) -> dict[str, RoleMemory]:
    """Returns the memory on one core of `state`, the TensorSpecs of `theta` and `slots`, by role.

    It may also have `ema`. The results of a program may take the memory if it `is_donated`.
    """
    # The gate's [M, E] is replicated, and its dims do not name E.
    weights = state.theta.Flatten()
    members = {
        REPLICATED: [spec for spec in weights if "E" not in spec.dims],
        EXPERTS: [spec for spec in weights if "E" in spec.dims],
        SLOTS: [*state.slots.Flatten(), *_averages(state).Flatten()],
    }

    roles = {}
    for role, specs in members.items():
        gib = state_bytes(specs, partitioning) / GIB
        roles[role] = RoleMemory(len(specs), gib, donated_gib=gib if is_donated else 0.0)
    return roles


def largest_of_state(state: NestedMap, partitioning: Partitioning) -> tuple[Buffer, ...]:
    """Returns the largest weights, slots and moving averages."""
    tensors = NestedMap(theta=state.theta, slots=state.slots, ema=_averages(state))
    buffers = []
    for path, spec in tensors.FlattenItems():
        shape = ",".join(map(str, partitioning.shard_shape(spec)))
        gib = state_bytes([spec], partitioning) / GIB
        buffers.append(Buffer(gib, f"{spec.dtype}[{shape}]", path))
    return memory.largest(buffers)


def _averages(state: NestedMap) -> NestedMap:
    return state.get("ema", NestedMap())
