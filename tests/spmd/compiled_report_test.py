"""Reading compiled text."""

import pytest

from lingvo_gshard.spmd import compiled_report, program
from tests.spmd import functions

_TEXT = """
HloModule toy
%region (a: f32[]) -> f32[] {
  ROOT %a = f32[] parameter(0)
}
ENTRY %main {
  %p = f32[4]{0} parameter(0), metadata={op_name="all-reduce(x)"}
  %all-gather-start.1 = (f32[4], f32[8]) all-gather-start(%p), dimensions={0}
  %all-gather-done.1 = f32[8] all-gather-done(%all-gather-start.1)
  %all-to-all.2 = (f32[4], f32[4]) all-to-all(%p, %p), replica_groups={{0,1}}
  %r = f32[4] all-reduce(%p), to_apply=%region
  ROOT %t = f32[4] reduce-scatter(%r), to_apply=%region
}
"""


def test_a_start_and_its_done_count_once():
    assert dict(compiled_report.count_collectives(_TEXT)) == {
        "all-to-all": 1,
        "all-reduce": 1,
        "all-gather": 1,
        "collective-permute": 0,
        "reduce-scatter": 1,
        "ragged-all-to-all": 0,
        "collective-broadcast": 0,
    }


def test_a_compiled_step():
    executable = program.export(functions.sgd_step(), functions.partitioning(4)).compile()
    report = executable.report()
    # Two weights and the loss are summed over the devices; XLA may join the sums.
    assert 1 <= report.count("all-reduce") <= 3
    weights_bytes = 4 * (5 * 6 + 6 * 3)
    assert report.argument_bytes == weights_bytes + 4 * (16 * 5 + 16 * 3) // 4
    assert report.output_bytes >= weights_bytes + 4 + 4 * 16 * 6 // 4
    # Five products of 4 rows on each device, two operations a multiply-add.
    assert report.flops >= 2 * 4 * (2 * 5 * 6 + 3 * 6 * 3)
    assert report.num_instructions > 10
    for word in ("sgd", "all-reduce", "instructions", "temp MiB"):
        assert word in report.table()
    assert "all-to-all" not in report.table()  # It has none.


def test_an_unknown_kind_is_refused():
    executable = program.export(functions.sgd_step(), functions.partitioning(1)).compile()
    with pytest.raises(ValueError, match="No collective 'gather'"):
        executable.report().count("gather")
