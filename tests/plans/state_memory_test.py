"""The memory of a state by its specs."""

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.plans import state_memory
from tests.spmd import functions
from xla_plan.cost.memory import Buffer
from xla_plan.machines.hardware import GIB


def _state():
    f32 = functions.f32
    theta = NestedMap(
        wi=f32((8, 1024, 1024), "EMH"),
        stacked=f32((3, 8, 1024, 1024), "REMH"),
        gate=f32((1024, 8), "M_"),
        dense=f32((1024, 2048), "MH"),
    )
    slots = NestedMap(row=f32((8, 1024), "EM"), column=f32((8, 1024), "EH"))
    return NestedMap(step=functions.TensorSpec((), "int32", ""), theta=theta, slots=slots)


def test_state_is_split_as_in_figure_7():
    roles = state_memory.by_role(_state(), functions.partitioning(8))
    sizes = {name: role.gib for name, role in roles.items()}
    assert sizes == {
        "replicated weights": 4 * (1024 * 8 + 1024 * 2048) / GIB,
        "expert weights": 4 * 4 * 2**20 / GIB,
        "optimizer slots": 2 * 4 * 1024 / GIB,
    }
    assert all(role.arguments == 2 and role.donated_gib == role.gib for role in roles.values())


def test_the_largest_weights_and_slots():
    assert state_memory.largest_of_state(_state(), functions.partitioning(8))[:2] == (
        Buffer(3 * 2**22 / GIB, "float32[3,1,1024,1024]", "theta.stacked"),
        Buffer(2**23 / GIB, "float32[1024,2048]", "theta.dense"),
    )
