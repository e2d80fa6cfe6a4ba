"""The forms of products and of copies, as XLA's own compiler for CPUs writes them."""

import jax
import jax.numpy as jnp
import pytest

from xla_spmd.hlo import hlo_cost, hlo_module


def _costs(function, *shapes):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return hlo_cost.costs(hlo_module.read(jax.jit(function).lower(*arguments).compile()))


@pytest.mark.parametrize(
    ("equation", "form"),
    [("ab,bc->ac", "nn"), ("ab,cb->ac", "nt"), ("ba,bc->ac", "tn"), ("ba,cb->ac", "tt")],
)
def test_the_contracted_dims_are_the_form(equation, form):
    sizes = {"a": 128, "b": 192, "c": 256}
    operands = equation.partition("->")[0].split(",")
    shapes = [[sizes[letter] for letter in letters] for letters in operands]
    costs = _costs(lambda x, w: jnp.einsum(equation, x, w), *shapes)
    assert [cost.form for cost in costs if cost.flops] == [form]


def test_only_copies_that_move_the_minor_dim_transpose():
    (moved,) = _costs(lambda x: x.T * 0.5, (96, 128))
    assert moved.form == "transposing"
    (kept,) = _costs(lambda x: jnp.swapaxes(x, 0, 1) * 0.5, (6, 7, 128))
    assert kept.form == ""
    (one,) = _costs(lambda x: x.T * 0.5, (1, 128))
    assert one.form == ""
