"""OneFlow's tables: which state each operator gives from those of its operands, and at what cost.

A tensor's state is "S0" or "S1", split along that dim, "B", whole everywhere (broadcast), or "P", a
sum over the devices not yet computed (partial). As an argument or a result, P is its terms.
"""

import dataclasses
import importlib.util
import operator
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.spmd import lowering, topology
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import compile_program
from tests.sharding import partial
from tests.sharding.partial import Partial
from tests.spmd import functions

# K is contracted; S stands for whichever dim is split.
_PARTS = Partitioning.from_dict(Mesh.flat(4), {"K": "d", "S": "d"})
_DIMS = {"S0": "S_", "S1": "_S", "B": "__", "P": "S__"}
# Of smaller sizes, TPUs scatter no sum.
_SIZES = {"A": 128, "K": 256, "B": 20}


def _spec(dims, state, parts=_PARTS):
    shape = tuple(_SIZES[letter] for letter in dims)
    terms = (parts.mesh.size("d"), *shape)
    return functions.f32(terms if state == "P" else shape, _DIMS[state])


def _operand(tensor, dims, state, parts=_PARTS):
    return Partial(tensor, dims, "d", parts) if state == "P" else tensor


def _matmul(x, w):
    if isinstance(x, Partial):
        return x.einsum("AK,KB->AB", w)
    if isinstance(w, Partial):
        return w.einsum("KB,AK->AB", x)
    return tf.matmul(x, w)


def _contracting(x, w):
    return partial.einsum(_PARTS, "AK,KB->AB", x, w, letter="K")


def _scaled(x):
    """Multiplies row i by i."""
    if isinstance(x, Partial):
        return x.einsum("AK,A->AK", tf.range(128.0))
    return x * tf.range(128.0)[:, None]


@dataclasses.dataclass(frozen=True)
class Signature:
    """An operator, its operands' dims and states, and the state of its result.

    `want` computes the result from the operands' values.
    """

    fn: Callable
    operands: tuple[str, ...]
    states: tuple[str, ...]
    result: str
    want: Callable

    def named_states(self):
        return zip(self.operands, self.states, strict=True)


def _product(fn, *states):
    return Signature(fn, ("AK", "KB"), states[:2], states[2], np.matmul)


def _sum(state):
    return Signature(operator.add, ("AK", "AK"), (state, state), state, np.add)


def _scaling(state):
    return Signature(_scaled, ("AK",), (state,), state, lambda x: x * np.arange(128.0)[:, None])


_SIGNATURES = {
    # The article's table of all signatures of a matrix product, in its order.
    "product, rows": _product(_matmul, "S0", "B", "S0"),
    "product, columns": _product(_matmul, "B", "S1", "S1"),
    "product, contracting": _product(_contracting, "S1", "S0", "P"),
    "product, whole": _product(_matmul, "B", "B", "B"),
    "product, partial first": _product(_matmul, "P", "B", "P"),
    "product, partial second": _product(_matmul, "B", "P", "P"),
    **{f"sum, {state}": _sum(state) for state in _DIMS},
    **{f"scaling, {state}": _scaling(state) for state in _DIMS},
}


def _value(array, state):
    return np.asarray(array).sum(0) if state == "P" else np.asarray(array)


def test_every_signature_holds_without_communication():
    args = NestedMap(
        {
            name: NestedMap({f"x{i}": _spec(*each) for i, each in enumerate(row.named_states())})
            for name, row in _SIGNATURES.items()
        }
    )

    def fn(batch):
        results = NestedMap()
        for name, row in _SIGNATURES.items():
            tensors = zip(batch[name].Flatten(), row.named_states(), strict=True)
            y = row.fn(*(_operand(tensor, *each) for tensor, each in tensors))
            assert isinstance(y, Partial) == (row.result == "P")
            results[name] = y.terms if isinstance(y, Partial) else y
        return results

    results = {name: _DIMS[row.result] for name, row in _SIGNATURES.items()}
    compiled = compile_program(
        lowering.export(AnnotatedFn("table", fn, ("batch",), (args,), results), _PARTS)
    )
    assert compiled.report().collective_ops == ()
    batch = functions.randoms(args, 1)
    got = compiled(batch)
    for name, row in _SIGNATURES.items():
        want = row.want(*map(_value, batch[name].Flatten(), row.states))
        y = _value(got[name], row.result)
        np.testing.assert_allclose(y, want, rtol=1e-3, atol=1e-3, err_msg=name)


def _conversion(start, end, parts=_PARTS):
    """A program that turns an [A, K] tensor in one state into the same in another."""

    def fn(batch):
        x = _operand(batch.x, "AK", start, parts)
        if isinstance(x, Partial):
            return NestedMap(y=x.reduce(split={"S0": "A", "S1": "K"}.get(end)))
        return NestedMap(y=Annotator(parts).annotate(x, _DIMS[end]))

    args = NestedMap(x=_spec("AK", start, parts))
    made = AnnotatedFn("conversion", fn, ("batch",), (args,), {"y": _DIMS[end]})
    return lowering.export(made, parts)


_WHOLE = 4 * _SIZES["A"] * _SIZES["K"]
_PART = _WHOLE // 4


@pytest.mark.parametrize(
    ("start", "end", "collectives"),
    [
        ("S0", "S1", [("all-to-all", _PART)]),
        ("S0", "B", [("all-gather", _WHOLE)]),
        ("B", "S0", []),
        ("P", "B", [("all-reduce", _WHOLE)]),
        # The CPU's compiler has no reduce-scatter: each device takes its part of the sum.
        ("P", "S0", [("all-reduce", _WHOLE)]),
        ("P", "S1", [("all-reduce", _WHOLE)]),
    ],
)
def test_conversions(start, end, collectives):
    program = _conversion(start, end)
    compiled = compile_program(program)
    batch = functions.randoms(program.args[0], 2)
    y = compiled(batch).y
    np.testing.assert_allclose(y, _value(batch.x, start), rtol=1e-4, atol=1e-4)
    shard = {"S0": (32, 256), "S1": (128, 64), "B": (128, 256)}[end]
    assert y.addressable_shards[0].data.shape == shard
    assert _sent(compiled) == collectives


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "collectives"),
    [
        (Mesh(("c", "d"), (2, 4)), [("reduce-scatter", _PART)]),
        (Mesh.flat(8), [("all-reduce", _WHOLE)]),
    ],
)
def test_a_tpu_scatters_a_partial_sum_along_one_of_two_axes(mesh, collectives):
    program = _conversion("P", "S0", Partitioning(mesh, _PARTS.table))
    if importlib.util.find_spec("libtpu") is None:
        with pytest.raises(ValueError, match="the TPU compiler is not installed"):
            topology.compile_program(program, "v3:2x2")
        return
    assert _sent(topology.compile_program(program, "v3:2x2")) == collectives


def _sent(compiled):
    return [(each.kind, each.result_bytes) for each in compiled.report().collective_ops]


def test_states_along_two_axes():
    """[S0, B] x [B, S1] gives [S0, S1], and [S0, S1] x [B, S0] gives [S0, P], both locally."""
    table = {"A": "x", "B": "y", "K": "y"}
    parts = Partitioning.from_dict(Mesh(("x", "y"), (2, 2)), table)
    args = NestedMap(
        x_AM=functions.f32((8, 12), "A_"),
        w_MB=functions.f32((12, 20), "_B"),
        x_AK=functions.f32((8, 12), "AK"),
        w_KM=functions.f32((12, 20), "K_"),
    )

    def fn(batch):
        product = partial.einsum(parts, "AK,KM->AM", batch.x_AK, batch.w_KM, letter="K")
        assert product.axis == "y"
        return NestedMap(y_AB=batch.x_AM @ batch.w_MB, terms_KAM=product.terms)

    made = AnnotatedFn("2d", fn, ("batch",), (args,), {"y_AB": "AB", "terms_KAM": "KA_"})
    compiled = compile_program(lowering.export(made, parts))
    assert compiled.report().collective_ops == ()
    batch = functions.randoms(args, 3)
    got = compiled(batch)
    np.testing.assert_allclose(got.y_AB, batch.x_AM @ batch.w_MB, rtol=1e-4, atol=1e-4)
    want = batch.x_AK @ batch.w_KM
    np.testing.assert_allclose(_value(got.terms_KAM, "P"), want, rtol=1e-4, atol=1e-4)
    assert got.terms_KAM.addressable_shards[0].data.shape == (1, 4, 20)
