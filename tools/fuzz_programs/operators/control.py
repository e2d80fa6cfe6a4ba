"""Loops, conditionals, manual regions and partial sums."""

from tools.fuzz_programs.draft import Draft
from tools.fuzz_programs.registry import Call, NoOperands, family


def _loop(step: str) -> str:
    """Returns a loop whose body computes `step` of the loop's tensor `h`."""
    return (
        f"tf.while_loop(lambda i, h: i < {{trips}}, lambda i, h: (i + 1, {step}), (0, {{0}}), "
        "maximum_iterations={trips})[1]"
    )


@family(
    {
        "loop_roll": _loop("tf.roll(h, 1, {axis}) * 0.5 + tf.cumsum(h, {axis}) * 0.1"),
        "loop_softmax": _loop("tf.nn.softmax(h) + h * 0.5"),
        "loop_split": _loop("annotator.annotate(tf.tanh(h) + 0.3, '{dims}')"),
        "loop_replicate": _loop("gshard.replicate(tf.exp(-h * h)) - tf.reverse(h, [{axis}])"),
        "loop_reduce": _loop("h * 0.5 + tf.reduce_max(h, {axis}, keepdims=True)"),
        "loop_pad": _loop("tf.pad(h, {pads})[{shifted}] + tf.sin(h)"),
        "loop_counter": _loop("h + tf.cast(i, h.dtype) * tf.reduce_mean(h, {axis}, keepdims=True)"),
    },
    weight=1.2,
)
def loop(draft: Draft) -> Call:
    x = draft.pick_full(max_rank=4)
    axis = draft.rng.randrange(x.rank)
    pads = [[0, 0] for _ in x.shape]
    pads[axis] = [1, 0]
    shifted = [":"] * x.rank
    shifted[axis] = f":{x.shape[axis]}"
    return Call(
        [x],
        {
            "axis": axis,
            "trips": draft.rng.randint(2, 4),
            "dims": draft.draw_dims(x.rank),
            "pads": pads,
            "shifted": ", ".join(shifted),
        },
    )


@family({"loop_matmul": _loop("tf.tanh(tf.matmul(h, {1})) + h * 0.5")}, weight=0.6)
def loop_of_products(draft: Draft) -> Call:
    x = draft.pick(min_rank=2, where=lambda tensor: tensor.size > 0 and tensor.shape[-1] <= 24)
    weights = draft.like([x.shape[-1], x.shape[-1]], x.dtype)
    return Call([x, weights], {"trips": draft.rng.randint(2, 4)})


@family(
    {
        "loop_read": (
            "tf.while_loop(lambda i, h: i < {trips}, lambda i, h: (i + 1, h * 0.7 + "
            "tf.gather({0}, i * 2 % {rows})), (0, tf.zeros_like({0}[0])), "
            "maximum_iterations={trips})[1]"
        ),
        "loop_write": _loop(
            "tf.tensor_scatter_nd_update(h, [[i * 3 % {rows}]], "
            "tf.reduce_mean(h, 0, keepdims=True) + 0.1)"
        ),
        "map_fn": "tf.map_fn(lambda row: tf.tanh(row) + tf.reduce_sum(row), {0})",
        "scan": "tf.scan(lambda carry, row: tf.tanh(carry) * 0.5 + row, {0})",
        "vectorized_map": (
            "tf.vectorized_map(lambda row: tf.nn.softplus(row) + tf.reduce_max(row), {0})"
        ),
    },
    weight=1.0,
)
def loop_over_rows(draft: Draft) -> Call:
    x = draft.pick_full()
    return Call([x], {"trips": draft.rng.randint(2, 4), "rows": x.shape[0]})


@family(
    {
        "cond": (
            "tf.cond(tf.reduce_sum({0}) > {threshold}, lambda: tf.cumsum({0}, {axis}) * 0.5, "
            "lambda: tf.reverse({0}, [{axis}]) * 2.0)"
        ),
        "switch_case": (
            "tf.switch_case(tf.cast(tf.reduce_max({0}) > 1.0, tf.int32), "
            "[lambda: tf.exp(-{0} * {0}), lambda: tf.roll({0}, 1, {axis})])"
        ),
        "cond_of_sums": (
            "tf.cond(tf.reduce_mean({0}) < {threshold}, lambda: tf.reduce_max({0}, {axis}), "
            "lambda: tf.reduce_sum(tf.nn.softplus({0}), {axis}))"
        ),
    },
    weight=0.8,
)
def conditional(draft: Draft) -> Call:
    x = draft.pick_full()
    axis = draft.rng.randrange(x.rank)
    return Call([x], {"axis": axis, "threshold": draft.rng.choice((-99.0, 0.0, 99.0))})


# A manual region does not contain reductions, pads, slices or broadcasts.
@family(
    {
        "local_map": (
            "annotator.locally(lambda x: tf.exp(-x * x) + tf.tanh(x), [({0}, '{dims}')], '{dims}')"
        ),
        "local_bias": "annotator.locally(lambda x: tf.nn.softplus(x), [({0}, '{dims}')], '{dims}')",
        "local_loop": (
            "annotator.locally(lambda x: tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, "
            "tf.tanh(h) + h * 0.5), (0, x), maximum_iterations=3)[1], [({0}, '{dims}')], '{dims}')"
        ),
    },
    weight=0.7,
)
def local(draft: Draft) -> Call:
    x = draft.pick_full(dtypes=("float32",), max_rank=4)
    return Call([x], {"dims": draft.draw_dims(x.rank)})


@family(
    {
        "local_product": (
            "annotator.locally(lambda x, w: tf.einsum('bm,mh->bh', x, w) * 0.3, "
            "[({0}, '{b}_'), ({1}, '_{h}')], '{b}{h}')"
        ),
        "local_terms": (
            "tf.reduce_sum(annotator.locally(lambda x, w: tf.expand_dims("
            "tf.einsum('bm,mh->bh', x, w) * 0.3, 0), [({0}, '_P'), ({1}, 'P_')], 'T__'), 0)"
        ),
        "partial": (
            "gshard.Partial.from_einsum(partitioning, 'BP,PH->BH', {0}, {1}, letter='P')"
            ".reduce() * 0.3"
        ),
        "partial_split": (
            "gshard.Partial.from_einsum(partitioning, 'BP,PH->BH', {0}, {1}, letter='P')"
            ".reduce(split='H') * 0.3"
        ),
    },
    weight=0.7,
)
def local_product(draft: Draft) -> Call:
    x = draft.pick_full(dtypes=("float32",), min_rank=2, max_rank=2)
    weights = draft.like([x.shape[1], max(draft.draw_size(), 1)], "float32")
    b, h = draft.rng.choice((("P", "_"), ("_", "P"), ("P", "Q"), ("Q", "P"), ("_", "_")))
    return Call([x, weights], {"b": b, "h": h})


@family(
    {
        "local_gather": (
            "annotator.locally(lambda x, i: tf.gather(x, i), [({0}, '_{h}'), ({1}, '_')], '_{h}')"
        )
    },
    weight=0.5,
)
def local_gather(draft: Draft) -> Call:
    x = draft.pick_full(dtypes=("float32",), min_rank=2, max_rank=2)
    if not x.shape[0]:
        raise NoOperands
    ids = draft.ids((draft.rng.choice((3, 8)),), x.shape[0])
    return Call([x, ids], {"h": draft.rng.choice("PQ_")})
