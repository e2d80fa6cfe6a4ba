"""The most and the fewest runs in a call, where its data decide."""

import jax.numpy as jnp
import pytest
from jax import lax

from tests.xla_spmd.hlo import hlo_text, programs
from xla_spmd.hlo import collectives, data_dependence, hlo_cost

_N = 8
_PRODUCT = 2 * _N**3


def _flops(module):
    """The most and the fewest flops of a call."""
    costs = hlo_cost.costs(module)
    most = sum(cost.times * cost.flops for cost in costs)
    return most, sum(cost.least_times * cost.flops for cost in costs)


def _powers(x, number):
    """x to one of three powers: with 0, 2 or 1 products."""
    branches = [lambda y: y, lambda y: y @ y @ y, lambda y: y @ y]
    return lax.switch(number, branches, x)


def test_the_costliest_and_the_cheapest_branch_of_a_switch_count():
    module = programs.lowered(_powers, jnp.ones((_N, _N)), jnp.int32(0))
    assert _flops(module) == (2 * _PRODUCT, 0)
    (switch,) = programs.every(module, "conditional")
    assert data_dependence.runs(module).most.by_data == {switch.name}


def test_a_branch_that_the_program_decides_does_not_depend_on_data():
    module = programs.lowered(lambda x: _powers(x, 2), jnp.ones((_N, _N)))
    assert _flops(module) == (_PRODUCT, _PRODUCT)
    assert not data_dependence.runs(module).most.by_data


def test_branches_within_a_loop_count_in_each_trip():
    def fn(x, flags):
        def body(y, flag):
            return lax.cond(flag, lambda z: z @ z, lambda z: z, y), None

        return lax.scan(body, x, flags)[0]

    module = programs.lowered(fn, jnp.ones((_N, _N)), jnp.ones(5, bool))
    assert _flops(module) == (5 * _PRODUCT, 0)


def test_a_search_that_may_end_early_runs_the_steps_before_its_end():
    def fn(x, scores):
        def body(state):
            i, y = state
            return i + 1, y @ y

        # Three trips are certain.
        def goes_on(state):
            i, _ = state
            return (i < 3) | ((i < 10) & (scores[i] > 0))

        return lax.while_loop(goes_on, body, (jnp.int32(0), x))[1]

    module = programs.lowered(fn, jnp.ones((_N, _N)), jnp.ones(10))
    assert _flops(module) == (10 * _PRODUCT, 3 * _PRODUCT)


def test_a_nested_conditional_has_the_costliest_of_the_costliest():
    def fn(x, a, b):
        def outer(y):
            return lax.cond(b, lambda z: z @ z @ z @ z, lambda z: z @ z, y)

        return lax.cond(a, outer, lambda y: y @ y @ y, x)

    module = programs.lowered(fn, jnp.ones((_N, _N)), True, True)
    # One outer branch has one to three products, and the other has two.
    assert _flops(module) == (3 * _PRODUCT, 1 * _PRODUCT)


# libtpu's forms of jax.lax.ragged_dot with 1024 rows and 8 groups: the product is fused, and the
# fusion may be fused again with the mask of the rows.
_RAGGED = """
fused {
  x = bf16[8,1024,256]{2,1,0} parameter(0)
  w = bf16[8,256,512]{2,1,0} parameter(1)
  ROOT dot = bf16[8,1024,512]{2,1,0} dot(x, w), lhs_batch_dims={0}, rhs_batch_dims={0},
    lhs_contracting_dims={2}, rhs_contracting_dims={1}
}

fused_again {
  x = bf16[8,1024,256]{2,1,0} parameter(0)
  w = bf16[8,256,512]{2,1,0} parameter(1)
  ROOT fusion.1 = bf16[8,1024,512]{2,1,0} fusion(x, w), kind=kOutput, calls=fused, NOTE
}

ENTRY main {
  x = bf16[8,1024,256]{2,1,0} parameter(0)
  w = bf16[8,256,512]{2,1,0} parameter(1)
  ROOT fusion.2 = bf16[8,1024,512]{2,1,0} fusion(x, w), kind=kOutput, calls=CALLED, NOTE
}
"""
_RAGGED_NOTE = (
    'backend_config={"convolution_algorithm_config":{"is_ragged_dot":true,'
    '"num_groups_in_ragged_dot":"8"}}'
)


@pytest.mark.parametrize("called", ["fused", "fused_again"])
def test_a_ragged_products_rows_meet_one_group_each(called):
    module = hlo_text.module(_RAGGED.replace("CALLED", called).replace("NOTE", _RAGGED_NOTE))
    assert _flops(module) == (2 * 1024 * 256 * 512, 0)


def test_a_kernel_with_a_grid_that_the_data_decide_may_do_nothing():
    # libtpu's form of megablox' gmm: the number of steps is the first operand.
    kernel = """
ENTRY main {
  groups = s32[] parameter(0)
  steps = s32[] START
  x = bf16[4096,512]{1,0} parameter(1)
  w = bf16[8,512,1024]{2,1,0} parameter(2)
  ROOT gmm.1 = bf16[4096,1024]{1,0} custom-call(steps, x, w),
    custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/gmm/pallas_call"},
    backend_config={"custom_call_config":{"body":"TUzv","cost_estimate":{"flops":"100"}}}
}
"""
    assert _flops(hlo_text.module(kernel.replace("START", "add(groups, groups)"))) == (100, 0)
    assert _flops(hlo_text.module(kernel.replace("START", "constant(39)"))) == (100, 100)


_ALL_REDUCE = """
sum {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}

sends {
  x = f32[1024]{0} parameter(0)
  ROOT y = f32[1024]{0} all-reduce(x), replica_groups={{0,1}}, to_apply=sum, channel_id=1
}
"""
_ALL_TO_ALL = """
sends {
  x = f32[1024]{0} parameter(0)
  start = ((f32[1024]{0}), f32[1024]{0}) all-to-all-start(x), replica_groups={{0,1}},
    dimensions={0}
  ROOT y = f32[1024]{0} all-to-all-done(start)
}
"""


@pytest.mark.parametrize(
    ("sends", "num_passes"), [(_ALL_REDUCE, 1), (_ALL_TO_ALL, 3)], ids=["all-reduce", "starts"]
)
def test_an_exchange_within_a_branch_costs_more_than_the_same_bytes_of_memory(sends, num_passes):
    """The other branch makes passes over the bytes, and sends nothing."""
    passes = [f"  y{i + 1} = f32[1024]{{0}} negate(y{i})\n" for i in range(num_passes - 1)]
    module = hlo_text.module(
        f"""
{sends}
keeps {{
  y0 = f32[1024]{{0}} parameter(0)
{"".join(passes)}  ROOT z = f32[1024]{{0}} negate(y{num_passes - 1})
}}

ENTRY main {{
  flag = pred[] parameter(0)
  x = f32[1024]{{0}} parameter(1)
  ROOT z = f32[1024]{{0}} conditional(flag, x, x), true_computation=sends, false_computation=keeps
}}
""",
        num_partitions=2,
    )
    (collective,) = collectives.find(module)
    assert (collective.times, collective.least_times) == (1, 0)
