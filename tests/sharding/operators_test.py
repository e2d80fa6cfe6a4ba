"""Partitioned equals unpartitioned, values and gradients, for XLA's operators (section 3.3)."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.tf_private import xla
from lingvo_gshard.planning.tables.table4 import TABLE_4, Operator
from tests import exhaustive
from tests.sharding import cases
from tests.sharding.cases import Case, Input

_NUM_PARTITIONS = [
    pytest.param(1, marks=pytest.mark.slow),
    pytest.param(2, marks=pytest.mark.slow),
    4,
    pytest.param(8, marks=pytest.mark.slow),
]
# Divisible by all numbers of partitions; by none, the last of 8 partitions being empty.
_SIZES = (16, 13)


def _elementwise(n: int) -> dict[str, Case]:
    rows, columns, whole = Input((n, 24), 0), Input((n, 24), 1), Input((n, 24))
    return {
        "elementwise": Case(lambda a, b: tf.tanh(a) * b + tf.exp(b), (rows, rows)),
        "elementwise, one whole": Case(lambda a, b: tf.maximum(a, b), (rows, whole)),
        "elementwise, unmatched": Case(lambda a, b: a * tf.sigmoid(b), (rows, columns), 1),
        "broadcast": Case(lambda a, b: a[:, None] * b, (Input((n,), 0), Input((7,), 0)), 1),
        "where": Case(lambda a, b: tf.where(a > b, a, b * 2.0), (rows, columns)),
        "cast": Case(lambda a: tf.cast(a * 8.0, tf.int32), (rows,)),
        "transpose": Case(lambda a: tf.transpose(a), (rows,), 0),
    }


def _reductions(n: int) -> dict[str, Case]:
    rows = Input((n, 10), 0)
    return {
        "sum, split": Case(lambda a: tf.reduce_sum(a, 0), (rows,)),
        "sum, free": Case(lambda a: tf.reduce_sum(a, 1), (rows,)),
        "mean, all": Case(lambda a: tf.reduce_mean(a * a), (rows,), None),
        "max, split": Case(lambda a: tf.reduce_max(a, 0), (rows,)),
        "min, split, whole result": Case(lambda a: tf.reduce_min(a, 0), (rows,), None),
        "product, split": Case(lambda a: tf.reduce_prod(a, 0), (rows,)),
        "logsumexp, split": Case(lambda a: tf.reduce_logsumexp(a, 0), (rows,)),
        "softmax, split": Case(lambda a: tf.nn.softmax(a, 0), (rows,)),
        "argmax, split": Case(lambda a: tf.argmax(a, 0, output_type=tf.int32), (rows,)),
        "any, split": Case(lambda a: tf.reduce_any(a > 1.0, 0), (rows,)),
    }


def _formatting(n: int) -> dict[str, Case]:
    rows, long = Input((n, 6), 0), Input((6 * n,), 0)
    return {
        "reshape, joined": Case(lambda a: tf.reshape(a, [-1]), (rows,)),
        "reshape, divided": Case(lambda a: tf.reshape(a, [n, 6]), (long,)),
        "reshape, turned": Case(lambda a: tf.reshape(a, [6, n]), (rows,), 1),
        "slice": Case(lambda a: a[2 : n - 1], (rows,)),
        "slice, other split": Case(lambda a: a[1:-1], (rows,), 1),
        "slice, strided": Case(lambda a: a[1::2], (rows,)),
        "pad": Case(lambda a: tf.pad(a, [[1, 2], [0, 3]]), (rows,)),
        "pad, reflected": Case(lambda a: tf.pad(a, [[2, 1], [0, 0]], "REFLECT"), (rows,)),
        "concat, split": Case(lambda a, b: tf.concat([a, b], 0), (rows, Input((5, 6), 0))),
        "concat, free": Case(lambda a, b: tf.concat([a, b], 1), (rows, rows)),
        "stack": Case(lambda a, b: tf.stack([a, b]), (rows, rows), 1),
        "reverse": Case(lambda a: tf.reverse(a, [0]), (rows,)),
        "roll": Case(lambda a: tf.roll(a, 3, 0), (rows,)),
        "tile": Case(lambda a: tf.tile(a, [2, 1]), (rows,)),
    }


def _indexing(n: int) -> dict[str, Case]:
    rows = Input((n, 6), 0)
    few, many = Input((9,), None, n), Input((n,), 0, 6)
    pairs = Input((n, 2), 0, 5)
    return {
        "gather of split": Case(lambda a, i: tf.gather(a, i), (rows, few)),
        "gather by split": Case(lambda a, i: tf.gather(a, i), (Input((6, 5)), many)),
        "gather, batched": Case(
            lambda a, i: tf.gather(a, i, batch_dims=1), (rows, Input((n, 3), 0, 6))
        ),
        "gather_nd": Case(lambda a, i: tf.gather_nd(a, i), (Input((5, 5)), pairs)),
        "scatter into split": Case(
            lambda a, i, u: tf.tensor_scatter_nd_add(a, i[:, None], u), (rows, few, Input((9, 6)))
        ),
        "scatter of split": Case(
            lambda a, i, u: tf.tensor_scatter_nd_add(a, i[:, None], u),
            (Input((6, 4)), many, Input((n, 4), 0)),
            None,
        ),
        "segment sum": Case(lambda a, i: tf.math.unsorted_segment_sum(a, i, 6), (rows, many), None),
        "one-hot": Case(lambda i: tf.one_hot(i, 6), (many,)),
        "one-hot, depth split": Case(lambda i: tf.one_hot(i, 6), (many,), 1),
    }


def _orders(n: int) -> dict[str, Case]:
    rows, columns = Input((n, 6), 0), Input((6, n), 1)
    return {
        "sort, split": Case(lambda a: tf.sort(a, 1), (columns,), 1),
        "sort, free": Case(lambda a: tf.sort(a, 1, "DESCENDING"), (rows,)),
        "argsort, split": Case(lambda a: tf.argsort(a, 1), (columns,), 1),
        "top-k, split": Case(lambda a: tf.math.top_k(a, 3).values, (columns,)),
        "top-k, free": Case(lambda a: tf.math.top_k(a, 2).values, (rows,)),
        "top-k, places": Case(lambda a: tf.math.top_k(a, 3).indices, (columns,), None),
        "cumsum, split": Case(lambda a: tf.cumsum(a, 0), (rows,)),
        "cumsum, exclusive": Case(lambda a: tf.cumsum(a, 0, exclusive=True, reverse=True), (rows,)),
        "cumsum, free": Case(lambda a: tf.cumsum(a, 1), (rows,)),
    }


def _loop(a: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    def body(i: tf.Tensor, h: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return i + 1, tf.tanh(h @ w) + tf.roll(h, 1, 0)

    return tf.while_loop(lambda i, h: i < 3, body, (0, a), maximum_iterations=3)[1]


def _loops(n: int) -> dict[str, Case]:
    weights = Input((6, 6))
    return {
        "loop": Case(_loop, (Input((n, 6), 0), weights)),
        "loop, contracting": Case(_loop, (Input((n, 6), 1), Input((6, 6), 0)), 1),
    }


def _slices(n: int) -> dict[str, Case]:
    """Slices whose beginnings are known only when they run."""
    rows, columns = Input((n, 6), 0), Input((6, n), 1)
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
        "dynamic slice": Case(lambda a, i: tf.slice(a, [i[0], 0], [4, 6]), (rows, start)),
        "dynamic slice, other split": Case(
            lambda a, i: tf.slice(a, [0, i[0]], [6, 4]), (columns, start), 0
        ),
        "dynamic slice, XLA's": Case(
            taken,
            (rows, start),
            unpartitioned=lambda a, i: a[int(i[0]) : int(i[0]) + 4],
            has_gradient=False,
        ),
        "row": Case(lambda a, i: a[i[0]], (rows, start), None),
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


def _branches(n: int) -> dict[str, Case]:
    rows = Input((n, 6), 0)
    index = Input((1,), None, 3)
    branches = [lambda a: tf.cumsum(a, 0), lambda a: tf.roll(a, 2, 0), lambda a: tf.tanh(a)]
    return {
        "cond": Case(
            lambda a: tf.cond(tf.reduce_sum(a) > 0, lambda: a * 2.0, lambda: tf.reverse(a, [0])),
            (rows,),
        ),
        "cond, other way": Case(
            lambda a: tf.cond(tf.reduce_sum(a) <= 0, lambda: a * 2.0, lambda: tf.reverse(a, [0])),
            (rows,),
        ),
        "switch": Case(
            lambda a, i: tf.switch_case(i[0], [lambda b=b: b(a) for b in branches]), (rows, index)
        ),
    }


def _linear_algebra(n: int) -> dict[str, Case]:
    rows, square = Input((n, 6), 0), Input((n, n), 0)

    def positive(a: tf.Tensor) -> tf.Tensor:
        return tf.matmul(a, a, transpose_b=True) / n + tf.eye(n)

    def spectrum(a: tf.Tensor) -> tf.Tensor:
        transformed = tf.signal.fft(tf.cast(a, tf.complex64))
        return tf.math.real(transformed) + 2 * tf.math.imag(transformed)

    def noise() -> tf.Tensor:
        return tf.random.stateless_uniform((n, 6), (1, 2), alg="philox")

    return {
        "fft": Case(spectrum, (rows,)),  # XLA has none for CPUs along a split dim, and says so.
        "cholesky": Case(lambda a: tf.linalg.cholesky(positive(a)), (square,)),
        "triangular solve": Case(
            lambda a, b: tf.linalg.triangular_solve(tf.linalg.cholesky(positive(a)), b),
            (square, rows),
        ),
        "bitcast": Case(lambda a: tf.bitcast(a, tf.int32), (rows,)),
        "random": Case(
            lambda a: a * noise(),
            (rows,),
            # XLA's numbers on one device: TensorFlow's own kernel draws others.
            unpartitioned=lambda a: a * tf.function(noise, jit_compile=True)(),
        ),
    }


def _table_4(n: int) -> dict[str, Case]:
    """The paper's operators, their underlined dims of size n."""

    def split(operator: Operator, dims: str) -> int | None:
        """As the table splits it: along the first of its underlined dims."""
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


_GROUPS = [
    _elementwise,
    _reductions,
    _formatting,
    _indexing,
    _orders,
    _loops,
    _slices,
    _branches,
    _linear_algebra,
    _table_4,
]


def _both_sizes(group) -> dict[str, Case]:
    return {f"{name}, {n}": case for n in _SIZES for name, case in group(n).items()}


@pytest.mark.parametrize("num_partitions", _NUM_PARTITIONS)
@pytest.mark.parametrize("group", _GROUPS, ids=lambda group: group.__name__.strip("_"))
def test_partitioned_equals_unpartitioned(group, num_partitions):
    cases.check(_both_sizes(group), num_partitions)


_EINSUM = "bmk,bkn->bmn"  # One batch, one contracting, two free dims.
_EINSUM_SIZES = {"even": dict(b=8, m=16, k=24, n=32), "uneven": dict(b=5, m=13, k=11, n=9)}


def _einsums(splits: list[str], sizes: str) -> dict[str, Case]:
    """A case for each of `splits`: the split letter of each operand and the result, _ for none."""

    def case(letters: str) -> Case:
        places = [
            dims.index(letter) if letter in dims else None
            for dims, letter in zip(("bmk", "bkn", "bmn"), letters, strict=True)
        ]
        shapes = [tuple(_EINSUM_SIZES[sizes][dim] for dim in dims) for dims in ("bmk", "bkn")]
        inputs = tuple(Input(shape, place) for shape, place in zip(shapes, places[:2], strict=True))
        return Case(lambda a, b: tf.einsum(_EINSUM, a, b), inputs, places[2])

    return {f"einsum {letters}, {sizes}": case(letters) for letters in splits}


# Batch; contracting; each free dim; both free dims; mixed.
_TELLING = ["bbb", "kk_", "kkm", "m_m", "_nn", "mnm", "mkn", "kbm", "bnm", "___"]


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
