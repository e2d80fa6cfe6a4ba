"""Times by category of a trace made by hand."""

import types

import pytest

from lingvo_gshard.plans import measured_step
from lingvo_gshard.spmd.traces import InstructionRun, Interval, Trace
from lingvo_gshard.train.profiling import ProfiledCall
from xla_plan.cost import compiled_step
from xla_plan.cost.compiled_step import CompiledStep
from xla_plan.machines.hardware import GENERATIONS
from xla_plan.machines.networks import Hosts
from xla_spmd.hlo.collectives import Collective
from xla_spmd.hlo.hlo_cost import Cost

_EXPERTS = "call_tf/encoder/layers_1/feed_forward/experts/einsum/Einsum"
_MS = 1e6  # A millisecond in nanoseconds.
_NETWORK = Hosts(GENERATIONS["h100"], (0, 0))
_EXCHANGE = Collective("all-to-all", 45_000_000, ((0, 1),), times=2, op_name=_EXPERTS)


def _instruction(name, opcode):
    return types.SimpleNamespace(name=name, opcode=opcode, called=())


@pytest.fixture
def executable(monkeypatch):
    """Stands for a program of two products, a loop, and an asynchronous exchange."""
    costs = (
        Cost("fusion.1", "fusion", _EXPERTS, 10**12, 0, (), times=2),
        Cost("fusion.2", "fusion", "call_tf/optimizer/mul", 0, 10**9, (), times=1),
        Cost("exchange", "all-to-all-start", _EXPERTS, 0, 10**9, (), times=2),
    )
    report = types.SimpleNamespace(collective_ops=[_EXCHANGE], optimal_secs=0.0, num_instructions=4)
    monkeypatch.setattr(compiled_step, "read", lambda _: CompiledStep(report, costs, {}))

    instructions = (
        _instruction("fusion.1", "fusion"),
        _instruction("fusion.2", "fusion"),
        _instruction("exchange", "all-to-all-start"),
        _instruction("exchange.done", "all-to-all-done"),
        _instruction("while", "while"),
    )
    return _Executable(types.SimpleNamespace(instructions=lambda: instructions))


class _Executable:
    def __init__(self, module):
        self.module = module


def _run(device, name, start_ms, end_ms):
    return InstructionRun(device, name, start_ms * _MS, end_ms * _MS)


def _trace():
    """Two calls of 100 ms; times are in ms."""
    return Trace(
        calls={4: Interval(1000 * _MS, 1100 * _MS), 6: Interval(2000 * _MS, 2100 * _MS)},
        runs=(
            # A loop around the others, on a separate thread; for 10 ms, only the loop runs.
            _run(0, "while", 1010, 1090),
            _run(0, "fusion.1", 1010, 1040),
            # 20 of 30 ms of the exchange are hidden behind the second run of the product.
            _run(0, "exchange", 1035, 1045),
            _run(0, "exchange.done", 1045, 1065),
            _run(0, "fusion.1", 1050, 1070),
            _run(0, "fusion.2", 1080, 1095),
            # The other device waits in the exchange, and a kernel without a name ends.
            _run(1, "exchange.done", 1000, 1060),
            _run(1, "", 1060, 1080),
            # In the second call, one instruction runs inside another; the inner one counts.
            _run(0, "fusion.1", 2000, 2080),
            _run(0, "fusion.2", 2020, 2040),
            # A different program ran between the calls.
            _run(1, "fusion.1", 1500, 1600),
        ),
    )


def _calls(executable):
    return [
        ProfiledCall(range(3, 5), executable, input_wait_secs=0.0),
        ProfiledCall(range(5, 7), executable, input_wait_secs=0.008),
    ]


def test_every_moment_counts_once(executable):
    measured = measured_step.measure(_calls(executable), _trace(), None)
    assert measured.steps == range(3, 7) and measured.num_devices == 2

    # Sums over both devices and calls, divided by two devices and four steps.
    expected_ms = {
        "experts": (30 + 20 + 60) / 8,
        "optimizer": (15 + 20) / 8,
        "other": (10 + 20) / 8,
        "all-to-all": (10 + 60) / 8,
        "wait for input": 8 / 4,
        "idle": (10 + 5 + 20 + 20 + 100) / 8,
    }
    found_ms = {name: 1e3 * part.secs for name, part in measured.parts.items()}
    assert found_ms == pytest.approx(expected_ms)
    assert list(found_ms) == list(expected_ms)
    assert 1e3 * measured.secs == pytest.approx((100 + 100 + 8) / 4)
    assert sum(found_ms.values()) == pytest.approx(1e3 * measured.secs)


def test_flops_and_rooflines_stand_beside(executable):
    parts = measured_step.measure(_calls(executable), _trace(), _NETWORK).parts
    # Two calls of two steps.
    assert parts["experts"].flops == 2 * 10**12 / 2
    assert parts["experts"].roofline_secs == pytest.approx(2 * 10**12 / 989e12 / 2)
    assert parts["optimizer"].roofline_secs == pytest.approx(1e9 / 3.35232e12 / 2)
    # Half of 45 MB cross NVLink, at 450 GB/s, twice in a call.
    assert parts["all-to-all"].roofline_secs == pytest.approx(2 * 0.5 * 1e-4 / 2)
    assert parts["other"].roofline_secs == 0.0 and parts["idle"].roofline_secs is None


def test_a_trace_that_lacks_something_is_refused(executable):
    calls = _calls(executable)
    with pytest.raises(ValueError, match="no instruction of any device"):
        measured_step.measure(calls, Trace(_trace().calls, ()), None)
    with pytest.raises(ValueError, match="lacks the call that ends with step 6"):
        measured_step.measure(calls, Trace({4: _trace().calls[4]}, _trace().runs), None)
