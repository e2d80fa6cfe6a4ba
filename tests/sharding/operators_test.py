"""Partitioned equals unpartitioned, values and gradients, for operators (section 3.3).

These are the paper's operators, XLA's own slices, and einsums; tools/fuzz_programs draws others.
"""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.tf_private import xla
from repro.tables.table4 import TABLE_4, Operator
from tests import exhaustive
from tests.sharding import cases
from tests.sharding.cases import Case, Input

_NUM_PARTITIONS = [
    pytest.param(1, marks=pytest.mark.slow),
    pytest.param(2, marks=pytest.mark.slow),
    4,
    pytest.param(8, marks=pytest.mark.slow),
]
# All numbers of partitions divide the first size, and none divides the second, of which the last of
# 8 partitions is empty.
_SIZES = (16, 13)


def _slices(n: int) -> dict[str, Case]:
    """XLA's own slices, whose beginnings are known only at run time."""
    rows = Input((n, 6), 0)
    start = Input((1,), None, n - 4)

    def updated(a: tf.Tensor, i: tf.Tensor, update: tf.Tensor) -> tf.Tensor:
        return xla.dynamic_update_slice(a, update, tf.stack([i[0], 1]))

    def updated_by_parts(a: tf.Tensor, i: tf.Tensor, update: tf.Tensor) -> tf.Tensor:
        first, after = int(i[0]), int(i[0]) + update.shape[0]
        middle = tf.concat([a[first:after, :1], update, a[first:after, 4:]], 1)
        return tf.concat([a[:first], middle, a[after:]], 0)

    def taken(a: tf.Tensor, i: tf.Tensor) -> tf.Tensor:
        return xla.dynamic_slice(a, tf.stack([i[0], 0]), tf.constant([4, 6]))

    return {
        "dynamic slice": Case(
            taken,
            (rows, start),
            unpartitioned=lambda a, i: a[int(i[0]) : int(i[0]) + 4],
            has_gradient=False,
        ),
        "dynamic update": Case(
            updated,
            (rows, start, Input((3, 3))),
            unpartitioned=updated_by_parts,
            has_gradient=False,
        ),
        "dynamic update of split by split": Case(
            updated,
            (rows, start, Input((3, 3), 0)),
            unpartitioned=updated_by_parts,
            has_gradient=False,
        ),
    }


def _table_4(n: int) -> dict[str, Case]:
    """The paper's operators, with underlined dims of size n."""

    def split(operator: Operator, dims: str) -> int | None:
        """Splits like the table: along the first underlined dim."""
        return next((i for i, letter in enumerate(dims) if letter in operator.split), None)

    def case(operator: Operator) -> Case:
        sizes = {"A": 5, "B": 6, "C": 7, "G": 5, "S": 6, "E": 5, "M": 3, "X": 9, "Y": 6, "I": 2}
        sizes |= {"O": 4, "_": 3} | dict.fromkeys(operator.split, n)
        inputs = tuple(
            Input(tuple(sizes[letter] for letter in dims), split(operator, dims))
            for dims in operator.operands
        )
        return Case(operator.fn, inputs, split(operator, operator.result))

    return {operator.name: case(operator) for operator in TABLE_4}


@pytest.mark.parametrize("num_partitions", _NUM_PARTITIONS)
@pytest.mark.parametrize(
    "group", [_slices, pytest.param(_table_4, marks=pytest.mark.slow)], ids=["slices", "table_4"]
)
def test_partitioned_equals_unpartitioned(group, num_partitions):
    both_sizes = {f"{name}, {n}": case for n in _SIZES for name, case in group(n).items()}
    cases.check(both_sizes, num_partitions)


_EINSUM = "bmk,bkn->bmn"  # It has one batch, one contracting and two free dims.
_EINSUM_SIZES = {"even": dict(b=8, m=16, k=24, n=32), "uneven": dict(b=5, m=13, k=11, n=9)}


def _einsums(splits: list[str], sizes: str) -> dict[str, Case]:
    """A case for each of `splits`: the split letter of both operands and the result, or _."""

    def case(letters: str) -> Case:
        places = [
            dims.index(letter) if letter in dims else None
            for dims, letter in zip(("bmk", "bkn", "bmn"), letters, strict=True)
        ]
        shapes = [tuple(_EINSUM_SIZES[sizes][dim] for dim in dims) for dims in ("bmk", "bkn")]
        inputs = tuple(Input(shape, place) for shape, place in zip(shapes, places[:2], strict=True))
        return Case(lambda a, b: tf.einsum(_EINSUM, a, b), inputs, places[2])

    return {f"einsum {letters}, {sizes}": case(letters) for letters in splits}


# The split dims: batch; contracting; each free dim; both free dims; mixed.
_TELLING = ["bbb", "kk_", "kkm", "m_m", "_nn", "mnm", "mkn", "kbm", "bnm", "___"]


@pytest.mark.slow
@pytest.mark.parametrize("num_partitions", _NUM_PARTITIONS)
def test_einsums(num_partitions):
    cases.check({**_einsums(_TELLING, "even"), **_einsums(_TELLING, "uneven")}, num_partitions)


@pytest.mark.slow
@pytest.mark.parametrize("num_partitions", [*exhaustive.only(2, 4), 8])
@pytest.mark.parametrize("sizes", _EINSUM_SIZES)
def test_einsums_split_in_all_ways(num_partitions, sizes):
    ways = ["".join(split) for split in itertools.product("_bmk", "_bkn", "_bmn")]
    assert len(ways) == 64
    cases.check(_einsums(ways, sizes), num_partitions)


def test_the_check_sees_a_wrong_result():
    calls = []

    def fickle(a: tf.Tensor) -> tf.Tensor:
        calls.append(a)
        return a * float(len(calls))

    with pytest.raises(AssertionError, match="fickle: d.*2 partitions"):
        cases.check({"fickle": Case(fickle, (Input((4, 6), 0),))}, 2)
    assert np.shape(calls[0]) == (4, 6)
