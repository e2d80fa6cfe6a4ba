"""The dims of a program that are the same, because they meet."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from tests.xla_plan import foreign_models
from xla_plan.program import stablehlo_program
from xla_plan.program.dims import reader


def _spec(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def _read(function, *args):
    """The program's dims as a word for each tensor: the same letter for the same dim."""
    program = stablehlo_program.of_jitted(jax.jit(function, keep_unused=True), args, "cpu")
    reading = reader.read(program)
    names = {}

    def word(dims):
        roots = [reading.sets.find(dim) for dim in dims]
        return "".join(names.setdefault(root, "abcdefghijklmnop"[len(names)]) for root in roots)

    return [*map(word, reading.arguments)], [*map(word, reading.results)], reading


@pytest.mark.parametrize(
    ("function", "shapes", "arguments", "results"),
    [
        (lambda x, w: x @ w, [(4, 3), (3, 5)], ["ab", "bc"], ["ac"]),
        (lambda x, y: x + y, [(4, 3), (3,)], ["ab", "b"], ["ab"]),
        (lambda x, y: jnp.swapaxes(x, 0, 1) * y, [(4, 3), (3, 4)], ["ab", "ba"], ["ba"]),
        (lambda x, w: jnp.einsum("bsh,bth->bst", x, w), [(2, 3, 5), (2, 4, 5)], ["abc", "adc"], 0),
        (lambda x, y: x.reshape(3, 20) @ y, [(3, 4, 5), (20, 7)], ["abc", "de"], ["ae"]),
        (lambda x, y: jnp.concatenate([x, y]), [(4, 3), (2, 3)], ["ab", "cb"], ["db"]),
        (lambda x, y: jnp.pad(x, ((1, 1), (0, 0))) + y, [(4, 3), (6, 3)], ["ab", "cb"], ["cb"]),
        (lambda x, y: x[:, 1:] * y, [(4, 3), (4, 2)], ["ab", "ac"], ["ac"]),
        (lambda x, y: jnp.sum(x, 1) * y, [(4, 3), (4,)], ["ab", "a"], ["a"]),
        (lambda x, y: jnp.cumsum(x, 1) * y, [(4, 3), (4, 3)], ["ab", "ab"], ["ab"]),
        (lambda x, y: jax.nn.silu(x) * jax.nn.silu(y), [(4, 3), (4, 3)], ["ab", "ab"], ["ab"]),
        (
            lambda x, y: jax.lax.cond(x[0, 0] > 0, lambda: x * 2, lambda: y * 3),
            [(4, 3), (4, 3)],
            ["ab", "ab"],
            ["ab"],
        ),
        (
            lambda x, k: jax.lax.conv_general_dilated(x, k, (1, 1), "SAME"),
            [(2, 3, 8, 8), (5, 3, 3, 3)],
            ["abcd", "ebfg"],
            0,
        ),
        (lambda x, y: jnp.argmax(x, 1) + y, [(4, 3), (4,)], ["ab", "a"], ["a"]),
    ],
)
def test_dims_that_meet_are_the_same(function, shapes, arguments, results):
    found = _read(function, *(_spec(*shape) for shape in shapes))
    assert found[0] == arguments
    assert not results or found[1] == results


def test_a_lookup_is_split_like_its_indices_and_a_table_keeps_its_rows():
    def lookup(table, indices, weight):
        return table[indices] @ weight

    arguments, results, reading = _read(
        lookup, _spec(20, 6), _spec(3, 4, dtype=jnp.int32), _spec(6, 7)
    )
    assert arguments == ["ab", "cd", "be"] and results == ["cde"]
    assert reading.tables == ((reading.arguments[0], frozenset({1})),)

    # Its gradient is scattered to the same dims.
    def update(table, indices, weight):
        return table - jax.grad(lambda t: jnp.sum(lookup(t, indices, weight) ** 2))(table)

    arguments, results, _ = _read(update, _spec(20, 6), _spec(3, 4, dtype=jnp.int32), _spec(6, 7))
    assert arguments == ["ab", "cd", "be"] and results == ["ab"]


def test_heads_that_are_split_and_merged_again_join_the_weights():
    def attend(x, q, k, v, o):
        heads = (2, 5, 4, 3)
        q_heads, k_heads, v_heads = ((x @ w).reshape(heads) for w in (q, k, v))
        probs = jnp.einsum("blhd,bmhd->bhlm", q_heads, k_heads)
        return jnp.einsum("bhlm,bmhd->blhd", probs, v_heads).reshape(2, 5, 12) @ o

    weight = _spec(6, 12)
    arguments, results, reading = _read(attend, _spec(2, 5, 6), *[weight] * 3, _spec(12, 6))
    # The products know queries' and keys' dim, and values' and the output's.
    assert arguments == ["abc", "cd", "cd", "ce", "ef"] and results == ["abf"]
    assert len(reading.heads) == 2


def test_loops_know_their_length_and_the_dim_that_they_go_through():
    step, args = foreign_models.plain()
    program = stablehlo_program.of_jitted(step, args, "cpu")
    reading = reader.read(program)

    # Forward, once more for the gradient, and two products for each; a product that only the
    # output needs is not repeated.
    m = foreign_models
    tokens = m.BATCH * m.LENGTH
    once = 2 * tokens * (4 * m.DIM**2 + 2 * m.LENGTH * m.DIM + 2 * m.DIM * m.HIDDEN)
    flops = sum(operation.flops * operation.times for operation in reading.operations)
    assert 3 * once * m.LAYERS < flops <= 4 * once * m.LAYERS

    for argument, dims in zip(program.arguments, reading.arguments, strict=True):
        is_stacked = argument.array.shape[0] == m.LAYERS
        assert (reading.sets.find(dims[0]) in reading.sequential) == is_stacked


def test_memory_is_held_from_its_first_to_its_last_use():
    def function(x, w):
        hidden = x @ w  # Held until the last product.
        return jnp.tanh(jnp.tanh(hidden @ w) @ w) @ hidden

    _, _, reading = _read(function, _spec(64, 64), _spec(64, 64))
    held = [sum(b.born <= time < b.dies for b in reading.buffers) for time in range(7)]
    # The arguments, which their caller keeps; `hidden`, until the last product reads it; and each
    # result until the next.
    assert held == [2, 3, 4, 4, 4, 4, 3]


def test_a_shard_map_is_refused():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    axes = PartitionSpec("data")
    mapped = jax.jit(jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=axes, out_specs=axes))
    sharding = jax.sharding.NamedSharding(mesh, axes)
    batch = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=sharding)
    program = stablehlo_program.of_jitted(mapped, (batch,), "cpu")
    with pytest.raises(ValueError, match="it has a shard map, whose body is written for the mesh"):
        reader.read(program)
