import pytest

from xla_spmd.files import table


def test_columns_are_as_wide_as_their_widest_cell():
    rows = [("model", "cores", "s"), ("MoE(128E, 12L)", 128, "0.5"), ("T", 2048, "12.25")]
    assert table.text(rows, indent="  ") == (
        "  model           cores      s\n"
        "  MoE(128E, 12L)    128    0.5\n"
        "  T                2048  12.25"
    )


def test_rows_of_different_lengths_are_refused():
    with pytest.raises(ValueError):
        table.text([("a", "b"), ("c",)])


def test_markdown():
    assert table.markdown([("a", "b"), (1, 2)]) == "| a | b |\n| --- | ---: |\n| 1 | 2 |\n"


def test_html():
    assert table.as_html([("a", "n"), ("<b>", 1)]) == (
        "<table>\n<tr><th>a<th>n\n<tr><td>&lt;b&gt;<td>1\n</table>"
    )


@pytest.mark.parametrize(
    "number, expected", [(3_780_000, "3.78 M"), (99_999_999, "100.00 M"), (10**8, "0.10 B")]
)
def test_counts(number, expected):
    assert table.count(number) == expected
