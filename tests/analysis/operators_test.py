"""Table 4: what the paper says of each operator holds of the compiled programs."""

import dataclasses

import pytest

from lingvo_gshard.analysis import operators


@pytest.fixture(scope="module")
def rows():
    return {row.operator.name: row for row in operators.rows([8, 2, 4])}


def _kinds(row):
    return [each.collectives for each in row.measured]


def test_every_row_is_as_the_paper_says(rows):
    assert len(rows) == 9
    assert [row.difference for row in rows.values()] == [""] * 9
    assert all([each.num_partitions for each in row.measured] == [2, 4, 8] for row in rows.values())


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
        # An expert's 64 / d places in each of d groups.
        ("Einsum(GSEC,GSM->EGCM) G,E", (("all-to-all", 1),), lambda d: 4 * 64 * 32),
        # A column of the image from each side.
        (
            "Convolution(BIXY,xyIO->BOXY) X",
            (("collective-permute", 2),),
            lambda d: 2 * 4 * 32 * 32 * 32,
        ),
    ],
)
def test_collectives_and_bytes(rows, name, collectives, communicated_bytes):
    row = rows[name]
    assert _kinds(row) == [collectives] * 3
    assert [each.communicated_bytes for each in row.measured] == [
        communicated_bytes(d) for d in (2, 4, 8)
    ]


def test_flops(rows):
    for name, flops in (
        ("Matmul(AB,BC->AC) A", lambda d: 2 * 16 * 32 * 32),
        ("Matmul(AB,BC->AC) A,B", lambda d: 2 * 16 * (16 * d) * 32),
        ("Einsum(GSEC,GSM->EGCM) G,E", lambda d: 2 * 32 * 64 * 32),
    ):
        assert [each.flops for each in rows[name].measured] == [flops(d) for d in (2, 4, 8)]


def test_a_difference_says_what_differs(rows):
    row = rows["Matmul(AB,BC->AC) A,C"]
    local = dataclasses.replace(row.operator, collectives=(), bytes_power=0, compute_power=2)
    assert dataclasses.replace(row, operator=local).difference == (
        "communicates by AG, not nothing; flops grow as D^1.00, not D^2; "
        "bytes grow as D^1.00, not D^0"
    )
    silent = dataclasses.replace(rows["Add(A,A->A) A"].operator, collectives=("all-to-all",))
    assert dataclasses.replace(rows["Add(A,A->A) A"], operator=silent).difference == (
        "communicates by nothing, not AA"
    )


def test_the_table_shows_the_papers_columns_and_what_was_found(rows):
    text = operators.table(rows.values())
    assert "Matmul(AB,BC->AC) A,B: total O(D^2), per partition O(D), communication O(D) AG" in text
    assert text.count(": equal") == 9 and text.count("D=8") == 9
    assert "1 AA               131072 flop       8192 bytes" in text


@pytest.mark.parametrize("partitions", [[2], [4, 4], [1, 2], []])
def test_a_growth_needs_two_numbers_of_partitions(partitions):
    with pytest.raises(ValueError, match="two or more different numbers of partitions from 2"):
        operators.rows(partitions)
