"""OneFlow's tables: each row's program computes what it should, and communicates what is said."""

import numpy as np
import pytest

from lingvo_gshard.planning.tables import late_sums, report, sbp
from lingvo_gshard.spmd import topology
from lingvo_gshard.spmd.executable import compile_program
from tests.spmd import functions

_WHOLE = 4 * sbp.SIZES["A"] * sbp.SIZES["K"]


def _sum_of_terms(array, states):
    return np.asarray(array).sum(0) if "P" in states else np.asarray(array)


def _ran(case):
    """Compiles a case; returns its values and its collectives."""
    program = sbp.export(case)
    compiled = compile_program(program)
    (args,) = program.args
    batch = functions.randoms(args, 1)
    return batch.Flatten(), compiled(batch).y, _collectives(compiled)


def _collectives(compiled):
    return [(op.kind, op.result_bytes) for op in compiled.report().collective_ops]


def _check_product(case):
    (x, w), y, collectives = _ran(case)
    want = _sum_of_terms(x, case.left) @ _sum_of_terms(w, case.right)
    np.testing.assert_allclose(_sum_of_terms(y, case.result), want, rtol=1e-3, atol=2e-3)
    assert collectives == []


@pytest.mark.parametrize("case", sbp.products(1), ids=str)
def test_every_signature_of_a_product_holds_without_communication(case):
    _check_product(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", sbp.products(2), ids=str)
def test_every_signature_of_a_product_along_two_axes_holds_without_communication(case):
    _check_product(case)


def test_along_two_axes_each_has_a_signature_of_its_own():
    cases = {(case.left, case.right): case.result for case in sbp.products(2)}
    assert len(cases) == 6 * 6 - 3 * 3  # P along both axes is left out.
    assert cases[("S(0)", "B"), ("B", "S(1)")] == ("S(0)", "S(1)")
    assert cases[("S(0)", "S(1)"), ("B", "S(0)")] == ("S(0)", "P")


@pytest.mark.parametrize("case", sbp.sums(), ids=str)
def test_a_sum_keeps_any_state_without_communication(case):
    (x, y), total, collectives = _ran(case)
    want = _sum_of_terms(x, case.result) + _sum_of_terms(y, case.result)
    np.testing.assert_allclose(_sum_of_terms(total, case.result), want, rtol=1e-4, atol=1e-4)
    assert collectives == []


def _check_conversion(case):
    (x,), y, collectives = _ran(case)
    want = _sum_of_terms(x, case.start)
    np.testing.assert_allclose(_sum_of_terms(y, case.end), want, rtol=1e-4, atol=1e-4)

    # Each device has its part, in the end.
    shard = [512, 256]
    for state, num_parts in zip(case.end, [8] if len(case.end) == 1 else [2, 4], strict=True):
        if state.startswith("S"):
            shard[int(state[2])] //= num_parts
    assert y.addressable_shards[0].data.shape[-2:] == tuple(shard)
    return collectives


_COLLECTIVES = {
    ("S(0)", "S(1)"): [("all-to-all", _WHOLE // 8)],
    ("S(0)", "B"): [("all-gather", _WHOLE)],
    ("B", "S(0)"): [],
    ("B", "P"): [],
    ("P", "B"): [("all-reduce", _WHOLE)],
    # The CPU's compiler has no reduce-scatter: each device takes its part of the sum.
    ("P", "S(0)"): [("all-reduce", _WHOLE)],
    ("P", "S(1)"): [("all-reduce", _WHOLE)],
}


@pytest.mark.parametrize("case", sbp.CONVERSIONS, ids=str)
def test_conversions(case):
    assert _check_conversion(case) == _COLLECTIVES[case.start + case.end]


@pytest.mark.slow
@pytest.mark.parametrize("case", sbp.CONVERSIONS_ALONG_TWO_AXES, ids=str)
def test_conversions_along_two_axes(case):
    kinds = {kind for kind, _ in _check_conversion(case)}
    assert kinds == {case.expected.replace("reduce-scatter", "all-reduce")}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v3:2x2", "h100:1x8"])
def test_tpus_and_gpus_communicate_what_oneflow_has(name):
    def compile(program):
        return topology.compile_program(program, name)

    if not topology.is_installed(name):
        with pytest.raises(ValueError, match="compiler is not installed"):
            list(sbp.measure(sbp.sums(), compile))
        return

    for case in [*sbp.products(1), *sbp.products(2), *sbp.sums()]:
        assert compile(sbp.export(case)).report().collective_ops == (), case

    for case in [*sbp.CONVERSIONS, *sbp.CONVERSIONS_ALONG_TWO_AXES]:
        kinds = {op.kind for op in compile(sbp.export(case)).report().collective_ops}
        expected = {case.expected} if case.expected else set()
        # The TPU scatters a sum along one of two axes, but not along the only one.
        if topology.is_gpu(name) or len(case.end) == 2 or case.expected != "reduce-scatter":
            assert kinds == expected, case
        else:
            assert kinds == {"all-reduce"}, case


_LATE = {row.name: row for row in late_sums.LATE_SUMS}
_X_V = 4 * 64 * 128


def _numpy_late_sum(name, batch):
    """The same by NumPy."""
    b = batch.Transform(np.asarray)
    if name.startswith("x V"):
        return b.x @ b.v + b.y @ b.w
    if name.startswith("U V W"):
        return b.u @ b.v @ b.w
    if name.startswith("mean"):
        return (b.x @ b.v).mean(1)
    return sum(x.T @ (x @ b.w - y) for x, y in zip(b.x, b.y, strict=True))


@pytest.mark.parametrize(
    ("name", "at_once", "later"),
    [
        ("x V + y W", 2 * _X_V, _X_V),
        ("U V W, W narrow", _X_V, 4 * 64 * 16),
        ("mean of x V over a length of 32, with gradients", 32 * _X_V, _X_V),
        ("gradient of W over 4 microbatches, in a loop", 4 * 4 * 128 * 256, 4 * 128 * 256),
    ],
)
def test_sums_that_are_taken_later_are_the_same_and_smaller(name, at_once, later):
    results = []
    for is_late, num_bytes in ((False, at_once), (True, later)):
        program = late_sums.export(name, is_late)
        compiled = compile_program(program)
        ops = compiled.report().collective_ops
        assert sum(op.result_bytes * op.times for op in ops) == num_bytes
        assert {op.kind for op in ops} == {"all-reduce"}
        batch = functions.randoms(program.args[0], 2)
        results.append(compiled(batch))
        np.testing.assert_allclose(
            results[-1].y, _numpy_late_sum(name, batch), rtol=1e-3, atol=1e-2
        )

    for a, b in zip(*(result.Flatten() for result in results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "saved"), [("v3:2x2", [1, 4, 32, 1]), ("h100:1x8", [1, 8, 32, 1])]
)
def test_compilers_for_tpus_and_gpus_take_some_sums_later_by_themselves(name, saved):
    def compile(program):
        return topology.compile_program(program, name)

    if not topology.is_installed(name):
        with pytest.raises(ValueError, match="compiler is not installed"):
            list(late_sums.measure(compile))
        return
    table = report.late_sums_table(late_sums.measure(compile))
    assert [line.split()[-1] for line in table.splitlines()[1:]] == [f"x{each}" for each in saved]


@pytest.mark.slow
def test_the_text_of_the_tables():
    rows = list(sbp.measure([sbp.products(1)[1], sbp.sums()[3]], compile_program))
    rows += sbp.measure(
        [sbp.Product(("S(0)", "B"), ("B", "S(1)"), ("S(0)", "S(1)"))], compile_program
    )
    assert report.signatures_table(rows).splitlines() == [
        "  operands                     result  collectives  bytes",
        "  S(1) x S(0)                       P         none      0",
        "  P + P                             P         none      0",
        "  [S(0), B] x [B, S(1)]  [S(0), S(1)]         none      0",
    ]
    conversions = [sbp.CONVERSIONS[i] for i in (0, 3)]
    assert report.conversions_table(sbp.measure(conversions, compile_program)).splitlines() == [
        "  from    to  OneFlow  collectives  bytes",
        "  S(0)  S(1)       AA         1 AA  65536",
        "  B        P     none         none      0",
    ]
