"""Any einsum of two operands, any sizes, split over a 2-D mesh in any way."""

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding import annotate
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.spmd import lowering
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import compile_program
from tests.spmd import functions

_MESH = Mesh(("x", "y"), (2, 4))


@st.composite
def _splits(draw: st.DrawFn, dims: str) -> tuple[str | None, ...]:
    """Both mesh axes, one or none, over different dims."""
    axes = ["x", "y", *[None] * len(dims)]
    return tuple(draw(st.permutations(axes))[: len(dims)])


@st.composite
def _einsums(draw: st.DrawFn) -> tuple[tuple[str, str, str], dict[str, int], tuple]:
    """Operands' and result's dims, sizes, and how each is split."""
    kinds = draw(st.lists(st.sampled_from(["lro", "lr", "lo", "ro"]), min_size=2, max_size=4))
    letters = "abcd"[: len(kinds)]
    dims = tuple(
        "".join(draw(st.permutations([d for d, k in zip(letters, kinds, strict=True) if t in k])))
        for t in "lro"
    )
    sizes = {letter: draw(st.integers(1, 13)) for letter in letters}
    return dims, sizes, tuple(draw(_splits(each)) for each in dims)


@pytest.mark.slow
@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(_einsums())
def test_partitioned_equals_numpy(drawn):
    (left, right, out), sizes, splits = drawn
    equation = f"{left},{right}->{out}"

    def fn(batch):
        leaves = batch.Flatten()
        with tf.GradientTape() as tape:
            tape.watch(leaves)
            placed = [
                annotate.mesh_split(x, _MESH, axes)
                for x, axes in zip(leaves, splits[:2], strict=True)
            ]
            y = annotate.mesh_split(tf.einsum(equation, *placed), _MESH, splits[2])
            loss = tf.reduce_sum(y * y)
        return NestedMap(y=y, d=tape.gradient(loss, leaves))

    shapes = [tuple(sizes[letter] for letter in dims) for dims in (left, right)]
    args = NestedMap(
        {f"x{i}": functions.f32(shape, "_" * len(shape)) for i, shape in enumerate(shapes)}
    )
    made = AnnotatedFn("einsum", fn, ("batch",), (args,))
    executable = compile_program(lowering.export(made, Partitioning(_MESH, ())))
    batch = functions.randoms(args, 1)
    got = executable(batch)
    y = np.einsum(equation, batch.x0, batch.x1)
    tolerance = dict(rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(got.y, y, **tolerance)
    for given, own, other, d in ((batch.x1, left, right, 0), (batch.x0, right, left, 1)):
        # Dims of this operand alone are in the result: every letter is in two tensors or more.
        want = np.einsum(f"{out},{other}->{own}", 2 * y, given)
        np.testing.assert_allclose(got.d[d], want, **tolerance)
