"""Collectives: their kinds, bytes, groups and number of runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
from jax import lax
from jax.sharding import PartitionSpec

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding import annotate
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.spmd import lowering
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import compile_program
from tests.spmd import functions
from tests.xla_spmd.hlo import programs
from tests.xla_spmd.hlo.programs import computation, instruction
from xla_spmd.hlo import collectives
from xla_spmd.hlo.collectives import Collective
from xla_spmd.hlo.hlo_module import Array, Module
from xla_spmd.mesh import Mesh


def test_a_compiled_loop_over_two_axes():
    parts = Partitioning.from_dict(Mesh(("x", "y"), (2, 4)), {"B": "x", "M": "y"})

    def fn(state: NestedMap) -> NestedMap:
        def body(i, x_BM):
            product = tf.einsum("bm,mn->bn", x_BM, state.w_MM)
            return i + 1, Annotator(parts).annotate(tf.tanh(product), "BM")

        _, x_BM = tf.while_loop(lambda i, _: i < 5, body, [tf.constant(0), state.x_BM])
        return NestedMap(whole=annotate.replicate(x_BM))

    args = NestedMap(x_BM=functions.f32((6, 12), "BM"), w_MM=functions.f32((12, 12), "M_"))
    annotated = AnnotatedFn("loop", fn, ("state",), (args,))
    report = compile_program(lowering.export(annotated, parts)).report()
    rows, columns = ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 4), (1, 5), (2, 6), (3, 7))
    assert list(report.loops.values()) == [5]
    # Each product's 3 rows are summed over y in the loop, and gathered over y and then x after it.
    assert set(report.collective_ops) == {
        Collective("all-reduce", 4 * 3 * 12, rows, 5),
        Collective("all-gather", 4 * 3 * 12, rows, 1),
        Collective("all-gather", 4 * 6 * 12, columns, 1),
    }
    lines = [line.split() for line in report.table().splitlines()]
    assert ["all-reduce", "1", "144", "5", "2", "4"] in lines
    assert lines[-1] == [*report.loops, "5"]


def _iota(groups, size, shape, order=()):
    return {
        "num_replica_groups": groups,
        "num_devices_per_group": size,
        "iota_reshape_dims": shape,
        "iota_transpose_perm": order,
    }


def _listed(*groups):
    return [{"replica_ids": group} for group in groups]


def _mesh(sizes, *axes, ids=(), transposed=None):
    """Groups along axes of a mesh. Each has an index, and optionally a factor (pre_size, size)."""
    mesh = {"axes": [{"size": size} for size in sizes], "device_ids": ids}
    if transposed:
        mesh["transposed"] = dict(zip(("reshape_dims", "transpose_perm"), transposed, strict=True))
    return {
        "mesh_axes_replica_group_list": {
            "mesh": mesh,
            "axes": [
                {"mesh_axis_index": index}
                | (
                    {"sub_axis_info": dict(zip(("pre_size", "size"), part, strict=True))}
                    if part
                    else {}
                )
                for index, *part in axes
            ],
        }
    }


_ALL = ((0, 1, 2, 3, 4, 5),)


@pytest.mark.parametrize(
    ("fields", "groups"),
    [
        ({}, _ALL),
        ({"replica_groups": _listed()}, _ALL),
        ({"collective_device_list": {"replica_groups": _listed((0, 3), (4, 1), (2, 5))}},
         ((0, 3), (4, 1), (2, 5))),
        ({"replica_groups": _listed((0, 3), (4, 1), (2, 5))}, ((0, 3), (4, 1), (2, 5))),
        ({"source_target_pairs": [{"target": 1}, {"source": 1}]}, ((0, 1), (1, 0))),
        ({"iota_collective_device_list": _iota(2, 3, [6])}, ((0, 1, 2), (3, 4, 5))),
        ({"collective_device_list": {"iota_replica_group_list": _iota(2, 3, [3, 2], [1, 0])}},
         ((0, 2, 4), (1, 3, 5))),
        # Along axes of a mesh, in the order of the axes.
        (_mesh([2, 3], [1]), ((0, 1, 2), (3, 4, 5))),
        (_mesh([2, 3], [0]), ((0, 3), (1, 4), (2, 5))),
        (_mesh([2, 3], [0], [1]), _ALL),
        (_mesh([2, 3], [1], [0]), ((0, 3, 1, 4, 2, 5),)),
        (_mesh([6]), tuple((i,) for i in range(6))),
        (_mesh([6, 1], [1]), tuple((i,) for i in range(6))),
        # The devices are a transposed grid: `device_ids=([2,3]T(1,0))`.
        (_mesh([3, 2], [0], transposed=([2, 3], [1, 0])), ((0, 1, 2), (3, 4, 5))),
        # Factors of an axis: the outer two of six, the inner three, the middle two of eight.
        (_mesh([6], [0, 1, 2]), ((0, 3), (1, 4), (2, 5))),
        (_mesh([6], [0, 2, 3]), ((0, 1, 2), (3, 4, 5))),
        (_mesh([8], [0, 2, 2]), ((0, 2), (1, 3), (4, 6), (5, 7))),
        (_mesh([2, 3], [1], ids=[5, 0, 3, 1, 4, 2]), ((5, 0, 3), (1, 4, 2))),
    ],
)  # fmt: skip
def test_every_form_of_groups(fields, groups):
    op = instruction("all-to-all", **fields)
    entry = computation("main", op)
    (found,) = collectives.find(Module((entry,), entry, 6))
    assert found == Collective("all-to-all", 16, groups, 1)
    assert found.group_size == len(groups[0])


@pytest.mark.parametrize(
    ("axes", "groups"),
    [
        ([[1]], ((0, 1, 2, 3), (4, 5, 6, 7))),
        ([[0]], ((0, 4), (1, 5), (2, 6), (3, 7))),
        ([[1], [0]], ((0, 4, 1, 5, 2, 6, 3, 7),)),
        ([[1, 1, 2]], ((0, 2), (1, 3), (4, 6), (5, 7))),
        ([[1, 2, 2]], ((0, 1), (2, 3), (4, 5), (6, 7))),
        # Both factors of an axis are the axis.
        ([[1, 1, 2], [1, 2, 2]], ((0, 1, 2, 3), (4, 5, 6, 7))),
    ],
)
def test_groups_along_axes_of_a_2_by_4_mesh(axes, groups):
    op = instruction("all-reduce", **_mesh([2, 4], *axes))
    entry = computation("main", op)
    (found,) = collectives.find(Module((entry,), entry, 8))
    assert found.groups == groups


def _f32(*sizes):
    return tuple(Array("f32", (size,)) for size in sizes)


def test_a_chain_of_the_tpus_compiler_is_one_collective():
    part, whole = _f32(4), _f32(8)
    chain = {"arrays": whole, "frontend_attributes": {"map": {"chain_id": "0"}}}
    p = instruction("parameter", arrays=part)
    gather = instruction("all-gather", p, **chain)
    start = instruction(
        "custom-call", p, gather, arrays=part + whole, custom_call_target="AsyncCollectiveStart"
    )
    starts = computation("starts", p, gather, start)
    goes_on = computation("goes_on", p, instruction("all-gather", p, **chain))
    entry = computation(
        "main",
        p,
        instruction("fusion", p, called=(starts,)),
        instruction("fusion", p, called=(goes_on,)),
    )
    module = Module((starts, goes_on, entry), entry, 2)
    assert collectives.find(module) == (Collective("all-gather", 4 * 8, ((0, 1),), 1),)


def test_a_sum_that_is_then_split_is_a_reduce_scatter():
    p = instruction("parameter", arrays=_f32(8))
    total = instruction("all-reduce", p, arrays=_f32(8))
    part = instruction("dynamic-slice", total, arrays=_f32(4))
    fused = computation("all-reduce-scatter.3", p, total, part)
    entry = computation("main", p, instruction("fusion", p, called=(fused,)))
    module = Module((fused, entry), entry, 2)
    assert collectives.find(module) == (Collective("reduce-scatter", 4 * 4, ((0, 1),), 1),)


def _shape(*sizes):
    return {"element_type": "F32", "dimensions": sizes}


def test_the_results_of_a_start_are_not_its_operands():
    """Most starts have the shape (operands, results, ...), but an all-reduce's has only results."""
    p = instruction("parameter", arrays=_f32(3))
    results = {"tuple_shapes": [_shape(3), _shape(6)]}
    starts = [
        instruction("all-gather-start", p, arrays=_f32(3, 6), shape=results),
        instruction("all-reduce-start", p, p, arrays=_f32(3, 6), shape=results),
        instruction("collective-broadcast", p, arrays=_f32(3)),
    ]
    entry = computation("main", p, *starts)
    both = ((0, 1),)
    assert collectives.find(Module((entry,), entry, 2)) == (
        Collective("all-gather", 4 * 6, both, 1),
        Collective("all-reduce", 4 * 9, both, 1),
        Collective("collective-broadcast", 4 * 3, both, 1),
    )


@pytest.mark.parametrize(("name", "widths"), [("tpu_step", [2, 2, 4, 4]), ("gpu_step", [4] * 4)])
def test_the_all_to_alls_of_a_training_step(name, widths):
    """Dispatch and combine, forward and backward, in the MoE layer of each of three blocks.

    A GPU's are asynchronous. The TPU's compiler sends values that only products read as bfloat16.
    """
    found = [op for op in collectives.find(programs.kept(name)) if op.kind == "all-to-all"]
    assert {op.groups for op in found} == {(tuple(range(8)),)}
    assert {op.times for op in found} == {3}
    for stack, capacity in programs.CAPACITY.items():
        sizes = [op.result_bytes for op in found if f"{stack}/" in op.op_name]
        elements = 8 * 2 * capacity * programs.MODEL_DIM  # All experts' slots for a core's groups.
        assert sorted(sizes) == [width * elements for width in widths]


@pytest.mark.parametrize("name", ["tpu_step", "gpu_step"])
def test_the_sums_of_a_training_step(name):
    """The gradients of a block, summed once per block in the encoder's and decoder's loops."""
    found = [op for op in collectives.find(programs.kept(name)) if op.kind == "all-reduce"]
    large = {(op.result_bytes, op.times) for op in found if op.result_bytes > 2**17}
    assert large == {(4 * size, 3) for size in programs.BLOCK_WEIGHTS.values()}


# --- All-gathers written as all-reduces ---

_WHOLE = (4, 64)


@jax.jit  # A fusion.
def _written(base, part, index):
    return lax.dynamic_update_slice(base, part, (jnp.uint32(0), index))


def _empty():
    return jnp.zeros(_WHOLE)


def _own_index():
    return 8 * lax.axis_index("d").astype(jnp.uint32)


def _gathered(fn):
    """The bytes gathered in each all-reduce of fn(part, whole), run on 8 partitions."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("d",))
    specs = PartitionSpec(None, "d"), PartitionSpec()
    mapped = jax.shard_map(
        lambda part, whole: lax.psum(fn(part, whole), "d"),
        mesh=mesh,
        in_specs=specs,
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    module = programs.lowered(mapped, jnp.ones(_WHOLE), jnp.ones(_WHOLE))
    assert programs.every(module, "all-reduce")
    return sorted(collectives.gathered_bytes(module).values())


def test_a_part_at_the_partitions_own_index_in_zeros_is_gathered():
    assert _gathered(lambda part, _: _written(_empty(), part, _own_index())) == [4 * 4 * 64]


def test_a_change_of_dtype_or_shape_is_followed():
    def fn(part, _):
        return _written(_empty(), part, _own_index()).astype(jnp.bfloat16).T

    assert _gathered(fn) == [2 * 4 * 64]


def test_sums_of_whole_arrays_do_not_gather():
    assert _gathered(lambda _, whole: whole) == []
    assert _gathered(lambda part, whole: _written(whole, part, _own_index())) == []
    assert _gathered(lambda part, _: _written(_empty(), part, jnp.uint32(7))) == []


def test_the_split_weights_of_a_kept_program():
    """The rows of all partitions are gathered; one sum holds both weights."""
    m, h = programs.SPLIT_DIMS
    found = collectives.gathered_bytes(programs.kept("tpu_split"))
    assert sorted(found.values()) == [4 * 16 * 64 * m, 2 * 4 * m * h]
