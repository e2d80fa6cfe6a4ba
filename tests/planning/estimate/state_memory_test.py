"""The memory of a state by its specs."""

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.planning.estimate import state_memory
from lingvo_gshard.planning.plan import GIB, Buffer
from tests.spmd import functions


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
    held = state_memory.state_gib(_state(), functions.partitioning(8))
    assert held.expert_weights == 4 * 4 * 2**20 / GIB
    assert held.replicated_weights == 4 * (1024 * 8 + 1024 * 2048) / GIB
    assert held.optimizer_slots == 2 * 4 * 1024 / GIB
    assert held.total == held.expert_weights + held.replicated_weights + held.optimizer_slots


def test_the_largest_weights_and_slots():
    assert state_memory.largest_of_state(_state(), functions.partitioning(8))[:2] == (
        Buffer(3 * 2**22 / GIB, "float32[3,1,1024,1024]", "theta.stacked"),
        Buffer(2**23 / GIB, "float32[1024,2048]", "theta.dense"),
    )
