"""TensorFlow to XLA: a traced function exported over an abstract mesh, no devices needed."""

from __future__ import annotations

import jax
from jax import export as jax_export
from jax.experimental import jax2tf
from jax.sharding import AbstractMesh

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.spmd import annotated_fn, dtypes, specs


def lower(
    annotated: annotated_fn.AnnotatedFn, partitioning: Partitioning
) -> tuple[bytes, NestedMap]:
    """Lowers `annotated`; returns JAX's serialized export and the results' TensorSpecs.

    Raises:
      ValueError: as annotated_fn.trace and dtypes.check.
    """
    leaves = specs.named_leaves(annotated.arg_names, annotated.args)
    dtypes.check(annotated.name, "argument", leaves)
    traced = annotated_fn.trace(annotated, partitioning)
    dtypes.check(annotated.name, "result", traced.results.FlattenItems())
    mesh = AbstractMesh(partitioning.mesh.axis_sizes, partitioning.mesh.axis_names)
    ins = tuple(specs.sharding(partitioning, spec, mesh) for _, spec in leaves)
    outs = specs.shardings(partitioning, traced.results, mesh).Flatten()
    jitted = jax.jit(
        jax2tf.call_tf(traced.function, has_side_effects=False),
        in_shardings=ins,
        out_shardings=outs,
    )
    # TensorFlow can lower for the CPU alone. What it makes is plain XLA, which may be compiled for
    # another platform: the export shall not refuse.
    exported = jax_export.export(
        jitted, platforms=["cpu"], disabled_checks=[jax_export.DisabledSafetyCheck.platform()]
    )(*(specs.abstract_array(spec, placed) for (_, spec), placed in zip(leaves, ins, strict=True)))
    return bytes(exported.serialize()), traced.results
