"""Memory of compiled programs, and the compiler's refusals."""

import pytest

from xla_plan.cost import memory
from xla_plan.cost.memory import Buffer
from xla_plan.machines.hardware import GIB
from xla_spmd.hlo.hlo_cost import Cost
from xla_spmd.hlo.hlo_module import Array

_REFUSAL = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory \
space hbm. Used 16.50G of 15.48G hbm. Exceeded hbm capacity by 1.02G.

Total hbm usage >= 17.02G:
    reserved        530.00M

  Largest program allocations in hbm:

  1. Size: 2.25G
     Operator: op_name="jit(flat)/call_tf/encoder/layers_1/feed_forward/experts/einsum/Einsum"
     Shape: f32[9,1,1024,8192]{3,2,1,0:T(8,128)}
     Unpadded size: 2.25G
     XLA label: fusion.1 = fusion(...)
     Allocation type: HLO temp
     ==========================

  2. Size: 512.00M
     Shape: bf16[8,256,32000]{2,1,0:T(8,128)(2,1)}
     Unpadded size: 500.00M
"""


def test_a_refusal_gives_the_memory_wanted_and_the_largest_buffers():
    refusal = memory.parse_refusal(_REFUSAL)
    assert refusal.gib == 16.5 and not refusal.temporaries_alone
    assert refusal.buffers == (
        Buffer(2.25, "f32[9,1,1024,8192]", "encoder/layers_1/feed_forward/experts/einsum"),
        Buffer(0.5, "bf16[8,256,32000]", "unnamed"),
    )


def test_a_refusal_may_count_temporaries_alone():
    refusal = memory.parse_refusal(
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (149.15G) exceeds available HBM (15.48G)."
    )
    assert refusal.gib == pytest.approx(149.15)
    assert refusal.temporaries_alone and refusal.buffers == ()


def test_an_unknown_refusal_is_an_error():
    with pytest.raises(ValueError, match="is not understood: INTERNAL: something else"):
        memory.parse_refusal("INTERNAL: something else")


def test_the_largest_results_one_for_each_shape_and_layer():
    def cost(op_name, *arrays):
        return Cost("i", "fusion", op_name, 0, 0, arrays, 1)

    costs = [
        cost(
            "call_tf/softmax/add", Array("f32", ()), Array("bf16", (1024, 1024)), Array("s32", (4,))
        ),
        cost("call_tf/optimizer/mul", Array("f32", (1024, 1024))),
        cost("call_tf/optimizer/add", Array("f32", (1024, 1024))),
    ]
    assert memory.largest_results(costs)[:2] == (
        Buffer(2**22 / GIB, "f32[1024,1024]", "optimizer"),
        Buffer(2**21 / GIB, "bf16[1024,1024]", "softmax"),
    )
