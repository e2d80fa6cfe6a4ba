"""All-gathers that are written as all-reduces."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from lingvo_gshard.hlo import gather_sums
from tests.hlo import programs

_WHOLE = (4, 64)


@jax.jit  # A fusion.
def _written(base, part, index):
    return lax.dynamic_update_slice(base, part, (jnp.uint32(0), index))


def _empty():
    return jnp.zeros(_WHOLE)


def _own_index():
    return 8 * lax.axis_index("d").astype(jnp.uint32)


def _found(fn):
    """The bytes gathered in each all-reduce of fn(part, whole), run on 8 partitions."""
    mesh = Mesh(np.array(jax.devices()[:8]), ("d",))
    specs = PartitionSpec(None, "d"), PartitionSpec()
    mapped = jax.shard_map(
        lambda part, whole: lax.psum(fn(part, whole), "d"),
        mesh=mesh,
        in_specs=specs,
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    module = programs.lowered(mapped, jnp.ones(_WHOLE), jnp.ones(_WHOLE))
    assert programs.every(module, "all-reduce")
    return sorted(gather_sums.find(module).values())


def test_a_part_at_the_partitions_own_index_in_zeros_is_gathered():
    assert _found(lambda part, _: _written(_empty(), part, _own_index())) == [4 * 4 * 64]


def test_a_change_of_dtype_or_shape_is_followed():
    def fn(part, _):
        return _written(_empty(), part, _own_index()).astype(jnp.bfloat16).T

    assert _found(fn) == [2 * 4 * 64]


def test_sums_of_whole_arrays_do_not_gather():
    assert _found(lambda _, whole: whole) == []
    assert _found(lambda part, whole: _written(whole, part, _own_index())) == []
    assert _found(lambda part, _: _written(_empty(), part, jnp.uint32(7))) == []


def test_the_split_weights_of_a_kept_program():
    """Rows of all partitions, and in one sum both weights."""
    m, h = programs.SPLIT_DIMS
    found = gather_sums.find(programs.kept("tpu_split"))
    assert sorted(found.values()) == [4 * 16 * 64 * m, 2 * 4 * m * h]
