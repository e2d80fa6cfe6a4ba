"""Operators on each element: arithmetic, comparisons, logic, casts, random numbers."""

from tools.fuzz_programs.draft import Draft
from tools.fuzz_programs.program import FLOATS
from tools.fuzz_programs.registry import Call, family

_ANY = (*FLOATS, "int32", "bool")


# Several operators turn the zeros that pad uneven parts into other numbers.
@family(
    {
        "tanh": "tf.tanh({0})",
        "sin": "tf.sin({0})",
        "gelu": "tf.nn.gelu({0})",
        "sigmoid": "tf.sigmoid({0})",
        "softplus": "tf.nn.softplus({0})",
        "exp": "tf.exp({0} * 0.3)",
        "bell": "tf.exp(-{0} * {0})",
        "cos": "tf.cos({0})",
        "bias": "{0} + 1.5",
        "negative": "0.5 - {0}",
        "abs": "tf.abs({0})",
        "clip": "tf.clip_by_value({0}, -0.5, 0.7)",
        "relu": "tf.nn.relu({0})",
        "leaky_relu": "tf.nn.leaky_relu({0})",
        "elu": "tf.nn.elu({0})",
        "square": "tf.square({0})",
        "sqrt": "tf.sqrt(tf.abs({0}) + 0.3)",
        "rsqrt": "tf.math.rsqrt(tf.square({0}) + 0.5)",
        "log1p": "tf.math.log1p(tf.abs({0}))",
        "erf": "tf.math.erf({0})",
        "reciprocal": "1.0 / (1.0 + {0} * {0})",
        "sign": "tf.sign({0}) + {0}",
        "floor": "tf.floor({0} * 3.0) * 0.3",
        "round": "tf.round({0} * 2.0) + {0}",
        "stop_gradient": "tf.stop_gradient({0}) * {0}",
        "to_bfloat16": "tf.cast({0}, tf.bfloat16)",
        "to_float32": "tf.cast({0}, tf.float32)",
        "recompute": "tf.recompute_grad(lambda x: tf.tanh(x) * tf.exp(-x * x))({0})",
    },
    weight=2.5,
)
def unary(draft: Draft) -> Call:
    return Call([draft.pick(min_rank=0)])


@family(
    {
        "add": "{0} + {1}",
        "multiply": "{0} * {1}",
        "subtract": "{0} - {1}",
        "maximum": "tf.maximum({0}, {1})",
        "minimum": "tf.minimum({0}, {1})",
        "where_greater": "tf.where({0} > {1}, {0}, {1} * 2.0)",
        "squared_difference": "tf.math.squared_difference({0}, {1})",
        "divide": "{0} / (1.0 + {1} * {1})",
        "atan2": "tf.atan2({0}, {1} * {1} + 0.5)",
        "add_n": "tf.add_n([{0}, {1}, {0}])",
        "power": "tf.pow(tf.abs({0}) + 0.5, tf.tanh({1}))",
    },
    weight=2.0,
)
def binary(draft: Draft) -> Call:
    x = draft.pick(min_rank=0)
    return Call([x, draft.like(x.shape, x.dtype)])


@family(
    {
        "broadcast_add": "{0} + {1}",
        "broadcast_multiply": "{0} * {1}",
        "broadcast_exp": "tf.exp(-tf.square({0} - {1}))",
    }
)
def broadcast(draft: Draft) -> Call:
    x = draft.pick()
    shape = list(x.shape[draft.rng.randrange(x.rank) :])
    for i in range(len(shape)):
        if draft.chance(0.4):
            shape[i] = 1
    return Call([x, draft.like(shape, x.dtype)])


@family(
    {
        "greater": "{0} > {1}",
        "less_equal": "{0} <= {1}",
        "both_positive": "tf.logical_and({0} > 0.0, {1} > 0.0)",
    },
    weight=0.5,
)
def comparison(draft: Draft) -> Call:
    x = draft.pick()
    return Call([x, draft.like(x.shape, x.dtype)])


@family(
    {
        "logical_xor": "tf.math.logical_xor({0}, {1})",
        "logical_or": "tf.logical_or({0}, tf.logical_not({1}))",
        "equal": "tf.equal({0}, {1})",
    },
    weight=0.4,
)
def logical(draft: Draft) -> Call:
    x = draft.pick(dtypes=("bool",))
    return Call([x, draft.like(x.shape, x.dtype)])


@family({"where": "tf.where({0}, {1}, {2})"}, weight=0.7)
def where(draft: Draft) -> Call:
    x = draft.pick(dtypes=_ANY)
    condition = draft.like(x.shape, "bool")
    return Call([condition, x, draft.like(x.shape, x.dtype)])


@family(
    {
        "integer_add": "{0} + {1} * 3",
        "integer_maximum": "tf.maximum({0}, {1})",
        "integer_subtract": "{0} - {1}",
        "bitwise_xor": "tf.bitwise.bitwise_xor({0}, {1})",
    },
    weight=0.4,
)
def integer(draft: Draft) -> Call:
    x = draft.pick(dtypes=("int32",))
    return Call([x, draft.like(x.shape, x.dtype)])


@family(
    {
        "floormod": "tf.math.floormod({0} * 5 + 2, {below})",
        "floordiv": "tf.math.floormod({0} // 2, {below})",
    },
    weight=0.6,
)
def bounded_integer(draft: Draft) -> Call:
    x = draft.pick(dtypes=("int32",))
    below = draft.rng.choice((2, 3, 5, 7))
    return Call([x], {"below": below}, below=below)


@family({"bucket": "tf.math.floormod(tf.cast(tf.round({0} * 2.3), tf.int32), {below})"}, weight=0.5)
def bucket(draft: Draft) -> Call:
    x = draft.pick(dtypes=("float32",))
    below = draft.rng.choice((3, 5, 8))
    return Call([x], {"below": below}, below=below)


@family(
    {
        "number": "tf.cast({0}, tf.float32) * 0.1",
        "number_bias": "tf.cast({0}, tf.float32) * 0.2 - 0.7",
    },
    weight=0.6,
)
def number(draft: Draft) -> Call:
    return Call([draft.pick(dtypes=("int32", "bool"))])


def _random(function: str, algorithm: str) -> str:
    """Returns an expression of random numbers.

    The numbers of TensorFlow's eager kernels differ from XLA's, or the kernels fail. A compiled
    function gives XLA's numbers; outside a partitioned program, it computes them on one device.
    """
    call = f"tf.random.stateless_{function}({{shape}}, {{seed}}, alg='{algorithm}')"
    return f"tf.function(lambda: {call}, jit_compile=True)()"


@family(
    {
        "random_uniform": f"{{0}} * {_random('uniform', 'philox')}",
        "random_normal": f"{{0}} + {_random('normal', 'philox')}",
        "random_threefry": f"{{0}} * {_random('uniform', 'threefry')}",
        "dropout": f"tf.where({_random('uniform', 'threefry')} < 0.5, {{0}} * 2.0, 0.0)",
    },
    weight=0.7,
)
def random_numbers(draft: Draft) -> Call:
    x = draft.pick(dtypes=("float32",))
    seed = [draft.rng.randrange(99), draft.rng.randrange(99)]
    return Call([x], {"shape": list(x.shape), "seed": seed})
