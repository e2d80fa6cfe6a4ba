"""Each row of OneFlow's tables computes the right values with the stated communication."""

import numpy as np
import pytest

from lingvo_gshard.plans import topology_executable
from lingvo_gshard.spmd.executable import compile_program
from repro.tables import sbp
from tests.spmd import functions
from xla_plan.machines import topology

_WHOLE = 4 * sbp.SIZES["A"] * sbp.SIZES["K"]


def _sum_of_terms(array, states):
    return np.asarray(array).sum(0) if "P" in states else np.asarray(array)


def _ran(case):
    """Compiles and runs a case; returns its values and its collectives."""
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


def test_along_two_axes_each_has_a_separate_signature():
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

    # In the end, each device has its part.
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
    # The CPU's compiler lacks reduce-scatter: each device takes its part of the sum.
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
def test_tpus_and_gpus_communicate_oneflows_bytes(name):
    def compile(program):
        return topology_executable.compile_program(program, name)

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
