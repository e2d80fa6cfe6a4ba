"""Costs of instructions, against arithmetic and against XLA's own counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
from jax import lax

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.spmd import lowering
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import compile_program
from tests.spmd import functions
from tests.xla_spmd.hlo import hlo_text, programs
from tests.xla_spmd.hlo.programs import computation, instruction
from xla_spmd.hlo import hlo_cost
from xla_spmd.hlo.hlo_module import Module

_ROWS, _WIDTH, _TRIPS = 16, 24, 5


def _only(fn, *args):
    """Returns the single cost of a function that is one instruction."""
    (cost,) = hlo_cost.costs(programs.lowered(fn, *args))
    return cost


def _power() -> AnnotatedFn:
    """x @ w five times over, in a loop."""

    def fn(args: NestedMap) -> NestedMap:
        def body(i, x):
            return i + 1, tf.tanh(x @ args.w)

        _, x = tf.while_loop(lambda i, _: i < _TRIPS, body, [0, args.x], maximum_iterations=_TRIPS)
        return NestedMap(x=x)

    args = NestedMap(
        x=functions.f32((8 * _ROWS, _WIDTH), "B_"), w=functions.f32((_WIDTH, _WIDTH), "__")
    )
    return AnnotatedFn("power", fn, ("args",), (args,), {"x": "B_"})


@pytest.fixture(scope="module")
def power():
    return compile_program(lowering.export(_power(), functions.partitioning(8)))


def test_a_loops_body_counts_as_often_as_it_runs(power):
    costs = hlo_cost.costs(power.module)
    products = [cost for cost in costs if cost.flops]
    assert [(cost.flops, cost.times) for cost in products] == [
        (2 * _ROWS * _WIDTH * _WIDTH, _TRIPS)
    ]
    assert products[0].op_name.endswith("/while/matmul")


def test_products_by_cublas_count_without_their_workspace():
    (m, k), (_, n), (batches, size, _) = programs.PRODUCTS
    costs = hlo_cost.costs(programs.kept("gpu_products"))
    found = [(cost.flops, cost.accessed_bytes) for cost in costs if cost.flops]
    assert sorted(found) == [
        (2 * batches * size**3, 4 * 3 * batches * size**2),
        (2 * m * k * n, 4 * (m * k + k * n + m * n)),
    ]


def test_a_single_pass_through_each_loop_gives_xlas_own_counts(power):
    costs = hlo_cost.costs(power.module)
    accessed = sum(cost.accessed_bytes for cost in costs)
    assert accessed == pytest.approx(power.report().accessed_bytes, rel=0.15)
    tanhs, counters = _ROWS * _WIDTH, 10
    assert sum(cost.flops for cost in costs) == pytest.approx(
        power.report().flops, abs=tanhs + counters
    )


def test_a_batch_of_products():
    cost = _only(lambda x, y: jnp.einsum("bik,bkj->bij", x, y), _f32(7, 2, 5), _f32(7, 5, 3))
    assert cost.opcode == "dot"
    assert cost.flops == 2 * 7 * 2 * 5 * 3
    assert cost.accessed_bytes == 4 * 7 * (2 * 5 + 5 * 3 + 2 * 3)


def _f32(*sizes):
    return jnp.ones(sizes, jnp.float32)


@pytest.mark.parametrize(
    ("lhs", "rhs", "window"),
    [
        ((5, 10, 7), (3, 7, 11), {}),
        ((5, 10, 7), (3, 7, 11), {"padding": [(1, 1)]}),
        ((5, 10, 7), (3, 7, 11), {"padding": [(1, 1)], "window_strides": (2,)}),
        ((5, 10, 7), (3, 7, 11), {"rhs_dilation": (2,)}),
        ((5, 10, 7), (1, 7, 11), {"window_strides": (2,)}),
        ((5, 4, 7), (3, 7, 11), {"padding": [(2, 2)], "lhs_dilation": (2,)}),
        ((6, 10, 7), (3, 7, 4), {"batch_group_count": 2}),
        # The TPU's compiler writes products in these forms: heads as a window over padding, and a
        # batch of products over dilated dims, so that a window meets one element of each.
        ((32, 1, 24), (4, 24, 8), {"padding": [(3, 3)]}),
        (
            (32, 2, 4, 8),
            (2, 4, 8, 6),
            {"window_strides": (1, 3), "lhs_dilation": (2, 4), "padding": [(0, 0), (0, 0)]},
        ),
    ],
)
def test_padding_and_dilation_are_not_multiplied(lhs, rhs, window):
    dims = "HW"[: len(lhs) - 2]
    layout = f"N{dims}C", f"{dims}IO", f"N{dims}C"
    window = {"window_strides": (1,) * len(dims), "padding": [(0, 0)] * len(dims)} | window

    def convolution(x, y):
        return lax.conv_general_dilated(x, y, dimension_numbers=layout, **window)

    # With ones, each product of two elements adds one to the sum of the results.
    multiplications = np.sum(convolution(_f32(*lhs), _f32(*rhs)))
    cost = _only(convolution, _f32(*lhs), _f32(*rhs))
    assert cost.opcode == "convolution"
    assert cost.flops == 2 * multiplications


@pytest.mark.parametrize("name", ["tpu_step", "gpu_step"])
def test_the_experts_products_of_a_training_step(name):
    """Each expert layer has two products forward and four backward, with every compiler."""
    costs = [cost for cost in hlo_cost.costs(programs.kept(name)) if "/experts" in cost.op_name]
    for stack, capacity in programs.CAPACITY.items():
        flops = sum(cost.times * cost.flops for cost in costs if f"{stack}/" in cost.op_name)
        slots = 16 * capacity  # The slots of the core's own expert, in all groups.
        assert flops == 3 * 6 * 2 * slots * programs.MODEL_DIM * 512


@jax.jit
def _accumulated(stack, i, total):
    zero = jnp.uint32(0)
    row = lax.dynamic_slice(stack, (i, zero), (1, 64))
    return lax.dynamic_update_slice(total, row + row, (i, zero))


@pytest.mark.parametrize("fn", [_accumulated, jax.jit(lambda *args: _accumulated(*args))])
def test_a_fusion_reads_the_slice_of_an_operand_and_updates_another_in_place(fn):
    cost = _only(lambda *args: fn(*args), _f32(9, 64), jnp.uint32(3), _f32(9, 64))
    assert cost.opcode == "fusion"
    assert cost.accessed_bytes == 4 * 64 + 4 + 4 * 64
    assert cost.flops == 0


# The form of `table.at[rows].set(new)` on TPUs and GPUs.
_SCATTERED = """
replace {
  old = f32[] parameter(0)
  ROOT new = f32[] parameter(1)
}

scattered {
  table = f32[NUM_ROWS,64]{1,0} parameter(0)
  rows = s32[5]{0} parameter(1)
  new = f32[5,64]{1,0} parameter(2)
  ROOT after = f32[NUM_ROWS,64]{1,0} SCATTER
}

ENTRY main {
  table = f32[NUM_ROWS,64]{1,0} parameter(0)
  rows = s32[5]{0} parameter(1)
  new = f32[5,64]{1,0} parameter(2)
  ROOT after = f32[NUM_ROWS,64]{1,0} ENTRY_ROOT
}
"""
_SCATTER = (
    "scatter(table, rows, new), update_window_dims={1}, inserted_window_dims={0}, "
    "scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=replace"
)


@pytest.mark.parametrize(
    "root", [_SCATTER, "fusion(table, rows, new), kind=kCustom, calls=scattered"]
)
@pytest.mark.parametrize(("num_rows", "updated_rows"), [(1000, 5), (3, 3)])
def test_a_scatter_reads_and_writes_the_rows_that_it_updates(root, num_rows, updated_rows):
    text = _SCATTERED.replace("NUM_ROWS", str(num_rows))
    text = text.replace("ENTRY_ROOT", root).replace("SCATTER", _SCATTER)
    (cost,) = hlo_cost.costs(hlo_text.module(text))
    assert cost.accessed_bytes == 4 * (5 + 5 * 64 + 2 * updated_rows * 64)


def test_a_gather_reads_its_indices():
    module = hlo_text.module("""
ENTRY main {
  table = bf16[1000]{0} parameter(0)
  indices = s32[500]{0} parameter(1)
  ROOT found = bf16[500]{0} gather(table, indices), offset_dims={}, collapsed_slice_dims={0},
    start_index_map={0}, index_vector_dim=1, slice_sizes={1}
}
""")
    (cost,) = hlo_cost.costs(module)
    assert cost.accessed_bytes == 500 * (2 + 2 + 4)


def test_a_fusions_name_is_its_largest_products():
    @jax.jit
    def fused(x, y, z):
        with jax.named_scope("largest"):
            largest = x @ y
        with jax.named_scope("other"):
            return -(largest @ z)

    cost = _only(lambda *args: fused(*args), _f32(8, 4), _f32(4, 6), _f32(6, 2))
    assert cost.op_name.endswith("largest/dot_general")
    assert cost.flops == 2 * 8 * (4 * 6 + 6 * 2)
    assert cost.accessed_bytes == 4 * (8 * 4 + 4 * 6 + 6 * 2 + 8 * 2)


def test_unnamed_instructions_inherit_an_operands_name_or_a_users():
    argument = instruction("parameter", op_name="args[0]")
    before = instruction("copy", argument)
    named = instruction("negate", before, op_name="layer/negate")
    after = instruction("copy", named)
    last = instruction("add", after, argument, op_name="other/add")
    entry = computation("main", argument, before, named, after, last)
    names = [cost.op_name for cost in hlo_cost.costs(Module((entry,), entry, 1))]
    assert names == ["layer/negate"] * 3 + ["other/add"]


def test_an_asynchronous_collective_costs_at_its_start():
    p = instruction("parameter")
    wrapped = computation("wrapped", p, instruction("all-to-all", p))
    start = instruction("async-start", p, called=(wrapped,))
    entry = computation("main", p, start, instruction("async-done", start))
    (cost,) = hlo_cost.costs(Module((wrapped, entry), entry, 2))
    assert (cost.opcode, cost.accessed_bytes) == ("all-to-all-start", 4 * (4 + 4))


def test_an_asynchronous_call_costs_what_its_computation_does():
    # The form of jax.experimental.compute_on for another stream of a GPU.
    module = hlo_text.module("""
called {
  a = f32[8,8]{1,0} parameter(0)
  b = f32[8,8]{1,0} dot(a, a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT c = f32[8,8]{1,0} dot(b, a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY main {
  x = f32[8,8]{1,0} parameter(0)
  start = ((f32[8,8]{1,0}), f32[8,8]{1,0}) call-start(x), async_execution_thread="parallel",
    to_apply=called
  ROOT done = f32[8,8]{1,0} call-done(start)
}
""")
    costs = hlo_cost.costs(module)
    assert [(cost.name, cost.flops) for cost in costs] == [("b", 2 * 8**3), ("c", 2 * 8**3)]


def test_a_call_without_operands_reads_what_its_computation_does():
    # libtpu's form of a call to a SparseCore.
    p = instruction("parameter")
    wrapped = computation("wrapped", p, instruction("negate", p))
    start = instruction("async-start", called=(wrapped,))
    entry = computation("main", start, instruction("async-done", start))
    (cost,) = hlo_cost.costs(Module((wrapped, entry), entry, 1))
    assert cost.accessed_bytes == 4 * (4 + 4)


def test_a_loop_of_unknown_length_counts_as_one_trip():
    def fn(bound):
        return lax.while_loop(lambda i: i < bound, lambda i: i + i, 1)

    costs = hlo_cost.costs(programs.lowered(fn, 9))
    assert {cost.opcode: cost.times for cost in costs}["add"] == 1


def test_a_product_in_a_fusion_reads_what_an_inner_fusion_passes_on():
    """The product's factors are parameters that inner fusions only pass on."""
    found = {cost.name: cost for cost in hlo_cost.costs(programs.kept("tpu_split"))}
    product = found["fusion.20"]
    fusion = next(
        each for each in programs.kept("tpu_split").entry.instructions if each.name == "fusion.20"
    )
    factors = sum(operand.num_bytes for operand in fusion.operands)
    assert product.flops and product.accessed_bytes >= factors


def test_memory_that_is_only_reserved_is_not_accessed():
    costs = [c for c in hlo_cost.costs(programs.kept("tpu_step")) if c.opcode == "custom-call"]
    assert costs and all(cost.accessed_bytes == 0 and cost.arrays for cost in costs)
