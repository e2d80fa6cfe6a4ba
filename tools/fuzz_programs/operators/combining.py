"""Operators that combine elements: products, reductions, cumulative sums, sorts, norms."""

import math
import string

from tools.fuzz_programs.draft import Draft
from tools.fuzz_programs.registry import Call, NoOperands, family

_MAX_PRODUCTS = 400_000


@family({"einsum": "tf.einsum('{equation}', {0}, {1}) * 0.3"}, weight=2.5)
def einsum(draft: Draft) -> Call:
    a = draft.pick(max_rank=4)
    a_letters = list(string.ascii_lowercase[: a.rank])

    # The second operand has some dims of the first operand, and some new ones.
    shared = [letter for letter in a_letters if draft.chance(0.5)]
    own = list(string.ascii_lowercase[a.rank : a.rank + draft.rng.randint(0, 2)])
    b_letters = shared + own
    if not b_letters:
        raise NoOperands
    draft.rng.shuffle(b_letters)
    sizes = dict(zip(a_letters, a.shape, strict=True))
    for letter in own:
        sizes[letter] = draft.draw_size()
    b = draft.like([sizes[letter] for letter in b_letters], a.dtype)
    if math.prod(sizes.values()) > _MAX_PRODUCTS:
        raise NoOperands

    result = []
    for letter in sizes:
        if draft.chance(0.4 if letter in shared else 0.8):
            result.append(letter)
    draft.rng.shuffle(result)
    equation = f"{''.join(a_letters)},{''.join(b_letters)}->{''.join(result)}"
    return Call([a, b], {"equation": equation})


@family(
    {
        "matmul": "tf.matmul({0}, {1}) * 0.3",
        "matmul_transposed": "tf.matmul({0}, tf.transpose({1}), transpose_b=True) * 0.3",
    }
)
def matmul(draft: Draft) -> Call:
    a = draft.pick(min_rank=2)
    return Call([a, draft.like([a.shape[-1], draft.draw_size()], a.dtype)])


@family(
    {
        "reduce_sum": "tf.reduce_sum({0}, {axes}, keepdims={keepdims})",
        "reduce_mean": "tf.reduce_mean({0}, {axes}, keepdims={keepdims})",
        "reduce_max": "tf.reduce_max({0}, {axes}, keepdims={keepdims})",
        "reduce_min": "tf.reduce_min({0}, {axes}, keepdims={keepdims})",
        "reduce_prod": "tf.reduce_prod(tf.tanh({0}) * 0.3 + 1.0, {axes}, keepdims={keepdims})",
        "logsumexp": "tf.reduce_logsumexp({0}, {axes}, keepdims={keepdims})",
        "variance": "tf.math.reduce_variance({0}, {axes}, keepdims={keepdims})",
        "norm": "tf.sqrt(tf.reduce_sum({0} * {0}, {axes}, keepdims={keepdims}) + 0.1)",
        "sum_of_exp": "tf.reduce_sum(tf.exp(-tf.abs({0})), {axes}, keepdims={keepdims})",
    },
    weight=2.0,
)
def reduction(draft: Draft) -> Call:
    x = draft.pick()
    return Call([x], {"axes": draft.axes(x), "keepdims": draft.chance(0.4)})


@family(
    {
        "integer_sum": "tf.reduce_sum({0}, {axes})",
        "integer_max": "tf.reduce_max({0}, {axes})",
        "integer_cumsum": "tf.cumsum({0}, {axis})",
        "integer_sort": "tf.sort({0}, {axis})",
    },
    weight=0.5,
)
def integer_reduction(draft: Draft) -> Call:
    x = draft.pick_full(dtypes=("int32",))
    return Call([x], {"axes": draft.axes(x), "axis": draft.axis(x)})


@family(
    {
        "reduce_any": "tf.reduce_any({0}, {axes})",
        "reduce_all": "tf.reduce_all({0}, {axes}, keepdims=True)",
        "count": "tf.math.count_nonzero({0}, {axes}, dtype=tf.int32)",
    },
    weight=0.5,
)
def bool_reduction(draft: Draft) -> Call:
    x = draft.pick(dtypes=("bool",))
    return Call([x], {"axes": draft.axes(x)})


@family(
    {
        "cumsum": "tf.cumsum({0}, {axis}, exclusive={exclusive}, reverse={reverse})",
        "cumprod": (
            "tf.math.cumprod(tf.tanh({0}) * 0.2 + 1.0, {axis}, exclusive={exclusive}, "
            "reverse={reverse})"
        ),
        "cumulative_logsumexp": "tf.math.cumulative_logsumexp({0}, {axis}, reverse={reverse})",
    },
    weight=1.2,
)
def cumulative(draft: Draft) -> Call:
    x = draft.pick(dtypes=("float32",))
    exclusive = draft.chance(0.4)
    reverse = draft.chance(0.4)
    return Call([x], {"axis": draft.axis(x), "exclusive": exclusive, "reverse": reverse})


@family(
    {
        "sort": "tf.sort({0}, {axis})",
        "sort_descending": "tf.sort({0}, {axis}, 'DESCENDING')",
        "argsort": "tf.argsort({0}, {axis}, stable=True)",
        "argmax": "tf.argmax({0}, {axis}, output_type=tf.int32)",
        "argmin": "tf.argmin({0}, {axis}, output_type=tf.int32)",
    },
    weight=1.2,
)
def sort(draft: Draft) -> Call:
    x = draft.pick_full(dtypes=("float32",))
    return Call([x], {"axis": draft.axis(x)})


@family(
    {"top_k": "tf.math.top_k({0}, {k})[0]", "top_k_ids": "tf.math.top_k({0}, {k})[1]"}, weight=0.8
)
def top_k(draft: Draft) -> Call:
    x = draft.pick_full(dtypes=("float32",))
    return Call([x], {"k": draft.rng.randint(1, x.shape[-1])}, below=x.shape[-1])


@family(
    {
        "softmax": "tf.nn.softmax({0}, {axis})",
        "log_softmax": "tf.nn.log_softmax({0}, {axis})",
        "l2_normalize": "tf.math.l2_normalize({0}, {axis}, epsilon=0.1)",
        "layer_norm": (
            "({0} - tf.reduce_mean({0}, {axis}, keepdims=True)) * tf.math.rsqrt("
            "tf.math.reduce_variance({0}, {axis}, keepdims=True) + 0.1)"
        ),
        "rms_norm": ("{0} * tf.math.rsqrt(tf.reduce_mean({0} * {0}, {axis}, keepdims=True) + 0.1)"),
    },
    weight=1.5,
)
def normalization(draft: Draft) -> Call:
    x = draft.pick_full()
    return Call([x], {"axis": draft.axis(x)})


@family({"cross_entropy": "tf.nn.sparse_softmax_cross_entropy_with_logits({1}, {0})"}, weight=0.5)
def cross_entropy(draft: Draft) -> Call:
    x = draft.pick_full(dtypes=("float32",), min_rank=2)
    return Call([x, draft.ids(x.shape[:-1], x.shape[-1])])


@family(
    {
        "fft": "tf.math.real(tf.signal.fft(tf.complex({0}, {0} * 0.5))) * 0.2",
        "rfft": "tf.math.imag(tf.signal.rfft({0})) * 0.2",
        "fft2d": "tf.math.real(tf.signal.ifft2d(tf.complex({0}, 0.3 * {0})))",
    },
    weight=0.5,
)
def fourier(draft: Draft) -> Call:
    return Call([draft.pick_full(dtypes=("float32",), min_rank=2, max_rank=4)])


_POSITIVE = "tf.matmul({0}, {0}, transpose_b=True) * 0.1 + tf.eye({n})"


@family(
    {
        "cholesky": f"tf.linalg.cholesky({_POSITIVE})",
        "triangular_solve": (
            f"tf.linalg.triangular_solve(tf.linalg.cholesky({_POSITIVE}), {{0}}, lower=True)"
        ),
    },
    weight=0.4,
)
def linear_algebra(draft: Draft) -> Call:
    x = draft.pick(
        dtypes=("float32",),
        min_rank=2,
        max_rank=4,
        where=lambda tensor: tensor.size > 0 and max(tensor.shape[-2:]) <= 13,
    )
    return Call([x], {"n": x.shape[-2]})


@family(
    {
        "searchsorted": "tf.searchsorted(tf.sort({0}), {0} * 0.7, side='{side}')",
    },
    weight=0.3,
)
def searchsorted(draft: Draft) -> Call:
    x = draft.pick_full(dtypes=("float32",), max_rank=2)
    return Call([x], {"side": draft.rng.choice(("left", "right"))})
