"""Operators that move elements: reshapes, slices, pads, concatenations."""

import math

from tools.fuzz_programs.draft import MAX_ELEMENTS, Draft, Tensor
from tools.fuzz_programs.program import FLOATS
from tools.fuzz_programs.registry import Call, NoOperands, family

_ANY = (*FLOATS, "int32", "bool")


def _bounded(x: Tensor, attributes: dict, inputs: list[Tensor] | None = None) -> Call:
    """Returns a call whose result contains only elements of `x`, and so has the same bound."""
    return Call(inputs or [x], attributes, below=x.below)


@family({"reshape": "tf.reshape({0}, {shape})"}, weight=1.5)
def reshape(draft: Draft) -> Call:
    x = draft.pick(dtypes=_ANY, min_rank=0)
    remaining = x.size
    shape = []
    for _ in range(draft.rng.randint(0, 3)):
        divisors = [k for k in range(1, remaining + 1) if remaining % k == 0] or [0]
        divisor = draft.rng.choice(divisors)
        shape.append(divisor)
        remaining //= max(divisor, 1)
    shape.append(remaining)
    draft.rng.shuffle(shape)
    return _bounded(x, {"shape": shape})


@family({"transpose": "tf.transpose({0}, {order})"})
def transpose(draft: Draft) -> Call:
    x = draft.pick(dtypes=_ANY, min_rank=2)
    return _bounded(x, {"order": draft.rng.sample(range(x.rank), x.rank)})


@family({"expand_dims": "tf.expand_dims({0}, {axis})"}, weight=0.4)
def expand_dims(draft: Draft) -> Call:
    x = draft.pick(dtypes=_ANY, max_rank=4)
    return _bounded(x, {"axis": draft.rng.randint(0, x.rank)})


@family({"strided_slice": "{0}[{index}]"}, weight=2.0)
def strided_slice(draft: Draft) -> Call:
    x = draft.pick(dtypes=_ANY)
    index = []
    for size in x.shape:
        if size < 2 or draft.chance(0.35):
            index.append(":")
            continue

        begin = draft.rng.randrange(size - 1)
        end = draft.rng.randint(begin + 1, size)
        step = draft.rng.choice((1, 1, 1, 2, 3))

        # The slice runs backwards, or has a single element, or runs forwards.
        if draft.chance(0.15):
            last = begin - 1 if begin else ""
            index.append(f"{end - 1}:{last}:-{step}")
        elif draft.chance(0.1):
            index.append(str(begin))
        else:
            index.append(f"{begin}:{end}:{step}")
    return _bounded(x, {"index": ", ".join(index)})


@family(
    {
        "dynamic_slice": (
            "tf.slice({0}, [tf.math.floormod(tf.reduce_sum({1}), {rest} + 1)] + {begin}, {sizes})"
        )
    },
    weight=0.5,
)
def dynamic_slice(draft: Draft) -> Call:
    x = draft.pick_full(dtypes=_ANY)
    sizes = [draft.rng.randint(1, size) for size in x.shape]
    begin = [draft.rng.randint(0, n - m) for n, m in zip(x.shape, sizes, strict=True)]
    where = draft.ids((draft.rng.choice((1, 5)),), 7)
    rest = x.shape[0] - sizes[0]
    attributes = {"rest": rest, "begin": begin[1:], "sizes": sizes}
    return _bounded(x, attributes, [x, where])


@family(
    {
        "pad": "tf.pad({0}, {pads})",
        "pad_with": "tf.pad({0}, {pads}, constant_values=1.5)",
    },
    weight=1.2,
)
def pad(draft: Draft) -> Call:
    x = draft.pick()
    pads = []
    for _ in x.shape:
        amount = [draft.rng.randint(0, 4), draft.rng.randint(0, 4)]
        pads.append(amount if draft.chance(0.6) else [0, 0])
    return Call([x], {"pads": pads})


@family(
    {
        "pad_reflect": "tf.pad({0}, {pads}, 'REFLECT')",
        "pad_symmetric": "tf.pad({0}, {pads}, 'SYMMETRIC')",
    },
    weight=0.6,
)
def mirror_pad(draft: Draft) -> Call:
    x = draft.pick_full()
    pads = []
    for size in x.shape:
        most = min(size - 1, 4)
        pads.append([draft.rng.randint(0, most), draft.rng.randint(0, most)])
    return Call([x], {"pads": pads})


@family({"concat": "tf.concat([{every}], {axis})"}, weight=1.5)
def concat(draft: Draft) -> Call:
    x = draft.pick(dtypes=_ANY)
    axis = draft.axis(x) % x.rank

    def others(y: Tensor) -> tuple[int, ...]:
        return y.shape[:axis] + y.shape[axis + 1 :]

    def fits(y: Tensor) -> bool:
        return y.rank == x.rank and others(y) == others(x)

    inputs = [x]
    for _ in range(draft.rng.randint(1, 2)):
        if draft.chance(0.5):
            shape = list(x.shape)
            shape[axis] = draft.draw_size()
            inputs.append(draft.like(shape, x.dtype))
        else:
            inputs.append(draft.pick(dtypes=(x.dtype,), where=fits))
    draft.rng.shuffle(inputs)
    return Call(inputs, {"axis": axis})


@family({"stack": "tf.stack([{every}], {axis})"}, weight=0.6)
def stack(draft: Draft) -> Call:
    x = draft.pick(dtypes=_ANY, max_rank=4)
    inputs = [x, *[draft.like(x.shape, x.dtype) for _ in range(draft.rng.randint(1, 2))]]
    return Call(inputs, {"axis": draft.rng.randint(0, x.rank)})


@family(
    {
        "unstack": (
            "tf.add_n([part * (i + 1.0) for i, part in enumerate(tf.unstack({0}, axis={axis}))])"
        ),
        "split_parts": "tf.concat(tf.split({0}, {sizes}, {axis})[::-1], {axis})",
    },
    weight=0.7,
)
def unstack(draft: Draft) -> Call:
    x = draft.pick_full()
    axis = draft.axis(x)
    first = draft.rng.randint(0, x.shape[axis])
    return Call([x], {"axis": axis, "sizes": [first, x.shape[axis] - first]})


@family({"reverse": "tf.reverse({0}, {axes})"})
def reverse(draft: Draft) -> Call:
    x = draft.pick(dtypes=_ANY)
    return _bounded(x, {"axes": draft.axes(x)})


@family({"roll": "tf.roll({0}, {shifts}, {axes})"})
def roll(draft: Draft) -> Call:
    x = draft.pick(dtypes=(*FLOATS, "int32"))
    axes = draft.axes(x)
    return _bounded(x, {"shifts": [draft.rng.randint(-9, 9) for _ in axes], "axes": axes})


@family({"tile": "tf.tile({0}, {counts})"}, weight=0.8)
def tile(draft: Draft) -> Call:
    x = draft.pick(dtypes=_ANY)
    counts = [draft.rng.choice((1, 1, 2, 3)) for _ in x.shape]
    if math.prod(counts) * x.size > MAX_ELEMENTS:
        raise NoOperands
    return _bounded(x, {"counts": counts})


@family({"repeat": "tf.repeat({0}, {count}, axis={axis})"}, weight=0.5)
def repeat(draft: Draft) -> Call:
    x = draft.pick()
    return Call([x], {"count": draft.rng.choice((2, 3)), "axis": draft.rng.randrange(x.rank)})


@family({"broadcast_to": "tf.broadcast_to({0}, {shape})"}, weight=0.5)
def broadcast_to(draft: Draft) -> Call:
    x = draft.pick(dtypes=_ANY, max_rank=3)
    shape = [draft.rng.choice((2, 3, 5, 8)), *x.shape]
    return _bounded(x, {"shape": shape})


@family({"reverse_sequence": "tf.reverse_sequence({0}, {1}, seq_axis=1, batch_axis=0)"}, weight=0.4)
def reverse_sequence(draft: Draft) -> Call:
    x = draft.pick_full(min_rank=2)
    return Call([x, draft.ids(x.shape[:1], x.shape[1] + 1)])


@family(
    {
        "diagonal": "tf.linalg.diag_part({0})",
        "diag": "tf.linalg.diag({0})",
        "band_part": "tf.linalg.band_part({0}, 1, -1)",
        "trace": "tf.linalg.trace({0})",
    },
    weight=0.5,
)
def diagonals(draft: Draft) -> Call:
    return Call([draft.pick_full(min_rank=2, max_rank=4)])
