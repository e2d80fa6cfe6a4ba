"""Table 4: the compiled programs match the paper's statement about each operator."""

import importlib.metadata
import importlib.util

import pytest

from lingvo_gshard.spmd.executable import compile_program
from repro.tables import report as text
from repro.tables import table4

# For each release of the compiler: a small and a large gathered operand, and both loops.
_TEMPORARY_MIB = {"0.0.42": (128, 512, 384, 448), "0.0.52": (144, 576, 320, 384)}


def _libtpu() -> str:
    """Returns the release of the TPU compiler, without its last number."""
    return ".".join(importlib.metadata.version("libtpu").split(".")[:3])


@pytest.fixture(scope="module")
def rows():
    return {row.operator.name: row for row in table4.measure(compile_program, (2, 4, 8))}


@pytest.mark.slow
def test_every_row_agrees_with_the_paper(rows):
    assert len(rows) == 9
    assert [row.differences for row in rows.values()] == [[]] * 9
    for row in rows.values():
        assert list(row.measured) == [2, 4, 8]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "collectives", "communicated_bytes"),
    [
        ("Add(A,A->A) A", (), lambda d: 0),
        ("Matmul(AB,BC->AC) B", (("all-reduce", 1),), lambda d: 4 * 32 * 32),
        ("Matmul(AB,BC->AC) A", (), lambda d: 0),
        ("Matmul(AB,BC->AC) A,B", (("all-gather", 1),), lambda d: 4 * 16 * d * 32),
        ("Matmul(AB,BC->AC) A,C", (("all-gather", 1),), lambda d: 4 * 32 * 16 * d),
        ("Reduce(AB->A) A", (), lambda d: 0),
        ("Reduce(AB->B) A", (("all-reduce", 1),), lambda d: 4 * 32),
        # An expert has 2048 / d slots in each of d groups.
        ("Einsum(GSEC,GSM->EGCM) G,E", (("all-to-all", 1),), lambda d: 4 * 2048 * 32),
        # Each side sends a column of the image.
        (
            "Convolution(BIXY,xyIO->BOXY) X",
            (("collective-permute", 2),),
            lambda d: 2 * 4 * 32 * 32 * 32,
        ),
    ],
)
def test_collectives_and_bytes(rows, name, collectives, communicated_bytes):
    row = rows[name]
    for report in row.measured.values():
        assert tuple((kind, count) for kind, count in report.collectives if count) == collectives
    for d, report in row.measured.items():
        assert table4.communicated_bytes(report) == communicated_bytes(d)


def _differences(row):
    return "; ".join(map(text.difference_text, row.differences))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_tpu_gathers_small_operands_and_loops_over_large_ones():
    """Figure 4c: from 16384 x 16384 on, CollectivePermutes of an eighth each, in bfloat16."""
    if importlib.util.find_spec("libtpu") is None:
        with pytest.raises(ValueError, match="topology v3:2x2: the TPU compiler is not installed"):
            list(table4.figure_4c())
        return
    table = text.figure_4c_table(table4.figure_4c())
    header, *rows = (line.split() for line in table.splitlines())
    assert header == ["operator", "n", "form", "collectives", "sent", "MiB", "temporary", "MiB"]
    small, gathered, loop_of_b, loop_of_c = _TEMPORARY_MIB[_libtpu()]
    assert [" ".join(row) for row in rows] == [
        f"Matmul(AB,BC->AC) A,B 8192 gathered 1 AG 128 {small}",
        f"Matmul(AB,BC->AC) A,B 16384 gathered 1 AG 512 {gathered}",
        f"Matmul(AB,BC->AC) A,B 16384 loop 9 CP 576 {loop_of_b}",
        f"Matmul(AB,BC->AC) A,C 8192 gathered 1 AG 128 {small}",
        f"Matmul(AB,BC->AC) A,C 16384 gathered 1 AG 512 {gathered}",
        f"Matmul(AB,BC->AC) A,C 16384 loop 9 CP 576 {loop_of_c}",
    ]


@pytest.mark.slow
def test_a_tpu_agrees_with_the_paper_except_for_gathers_of_many_parts():
    if importlib.util.find_spec("libtpu") is None:
        with pytest.raises(ValueError, match="topology v3:2x2: the TPU compiler is not installed"):
            table4.measure(table4.compile_for_v3, (8, 64, 2048))
        return
    rows = table4.measure(table4.compile_for_v3, (8, 64, 2048))
    summed = "gathers by an AllReduce of parts padded with zeros, from D=64"
    assert {row.operator.name: _differences(row) for row in rows if row.differences} == {
        "Matmul(AB,BC->AC) A,B": summed,
        "Matmul(AB,BC->AC) A,C": summed,
    }
