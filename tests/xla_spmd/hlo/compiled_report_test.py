"""The report on a compiled program."""

import types

import pytest

from lingvo_gshard.spmd import lowering
from lingvo_gshard.spmd.executable import compile_program
from tests.spmd import functions
from tests.xla_spmd.hlo.programs import computation, instruction
from xla_spmd.hlo import compiled_report
from xla_spmd.hlo.hlo_module import Module


def test_a_compiled_step():
    executable = compile_program(lowering.export(functions.sgd_step(), functions.partitioning(4)))
    report = executable.report()
    # Two weights and the loss are summed over the devices; XLA may join the sums.
    assert 1 <= report.count("all-reduce") <= 3
    weights_bytes = 4 * (5 * 6 + 6 * 3)
    assert report.argument_bytes == weights_bytes + 4 * (16 * 5 + 16 * 3) // 4
    assert report.output_bytes >= weights_bytes + 4 + 4 * 16 * 6 // 4
    # Each device computes five products of 4 rows, at two operations per multiply-add.
    assert report.flops >= 2 * 4 * (2 * 5 * 6 + 3 * 6 * 3)
    assert report.num_instructions > 10
    for word in ("sgd", "all-reduce", "instructions", "temp MiB"):
        assert word in report.table()
    assert "all-to-all" not in report.table()  # The step does not use it.


def test_an_unknown_kind_is_refused():
    executable = compile_program(lowering.export(functions.sgd_step(), functions.partitioning(1)))
    with pytest.raises(ValueError, match="No collective 'gather'"):
        executable.report().count("gather")


@pytest.mark.parametrize(("given", "shown"), [(0.25, 0.25), (-37.6, 0.0), (None, 0.0)])
def test_a_negative_time_of_xla_is_ignored(given, shown):
    """libtpu returns one for some large programs, and the compiler for GPUs returns nothing."""
    costs = {"flops": 8.0} if given is None else {"flops": 8.0, "optimal_seconds": given}
    report = _report(costs, peak=16)
    assert (report.optimal_secs, report.flops) == (shown, 8.0)


@pytest.mark.parametrize(
    ("sizes", "peak_bytes"),
    [
        # The parts are 4 bytes each: arguments, results outside of them, and temporaries.
        ({"peak": 7}, 7),
        ({"peak": 20, "host_temp": 12}, 8),
        ({"peak": 7, "host_argument": 2}, 7),
        ({"peak": 20, "host_output": 12}, 8),
    ],
)
def test_the_peak_of_a_device_leaves_out_the_hosts_memory(sizes, peak_bytes):
    assert _report({}, **sizes).peak_bytes == peak_bytes


def _report(costs, *, peak, **sizes):
    """Returns the report of a program with these costs, and these sizes in bytes."""
    names = ("argument", "output", "alias", "temp")
    sizes = dict.fromkeys(names, 4) | dict.fromkeys((f"host_{name}" for name in names), 0) | sizes
    memory = types.SimpleNamespace(
        **{f"{name}_size_in_bytes": size for name, size in sizes.items()},
        peak_memory_in_bytes=peak,
    )
    compiled = types.SimpleNamespace(memory_analysis=lambda: memory, cost_analysis=lambda: costs)
    entry = computation("main", instruction("parameter"))
    return compiled_report.read("one", compiled, Module((entry,), entry, 1))
