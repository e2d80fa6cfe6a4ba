"""TensorFlow to XLA: exports an AnnotatedFn over an abstract mesh as a Program.

jax2tf.call_tf does what is needed: it asks TensorFlow for a function's HLO, turns that into
StableHLO, and puts it into JAX's module. It is called experimental, but it comes with each JAX,
while code of our own would use the names of JAX's inside that change most between releases.

Arguments and results lie on the devices in equal parts, so those that the mesh does not divide are
padded (padded.py). The program removes the padding of its arguments first, and pads its results
last. In between, every tensor has its logical shape, and XLA masks what is uneven (section 3.3.3).
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import export as jax_export
from jax.sharding import AbstractMesh, AxisType

from lingvo_gshard.core.late import tf
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.spmd import annotated_fn, padded, specs
from lingvo_gshard.spmd.program import Program


def export(annotated: annotated_fn.AnnotatedFn, partitioning: Partitioning) -> Program:
    """Traces and lowers for all partitions, without devices. Raises as trace and check_dtypes.

    Imports TensorFlow, and leaves the memory of GPUs to JAX.
    """
    from jax.experimental import jax2tf  # It imports TensorFlow.

    tf.config.set_visible_devices([], "GPU")

    # Before tracing, which takes long, and after it, when the results are known.
    leaves = specs.named_leaves(annotated.arg_names, annotated.args)
    specs.check_dtypes(f"{annotated.name}: argument", leaves)
    function, results = annotated_fn.trace(annotated, partitioning)
    specs.check_dtypes(f"{annotated.name}: result", results.FlattenItems())

    # A mesh of names and sizes: which devices these will be is decided by who compiles. Its axes
    # are Auto, since JAX slices no dim to an uneven size along an Explicit one.
    mesh = AbstractMesh(
        partitioning.mesh.axis_sizes,
        partitioning.mesh.axis_names,
        axis_types=(AxisType.Auto,) * len(partitioning.mesh.axis_names),
    )
    inputs = specs.abstract_arrays(partitioning, leaves, mesh)
    outputs = specs.abstract_arrays(partitioning, results.FlattenItems(), mesh)

    call = jax2tf.call_tf(function, has_side_effects=False)
    in_shapes = [spec.shape for _, spec in leaves]
    out_shapes = [spec.shape for spec in results.Flatten()]
    padded_in_shapes = [array.shape for array in inputs]
    padded_out_shapes = [array.shape for array in outputs]
    if in_shapes != padded_in_shapes or out_shapes != padded_out_shapes:
        call = _on_padded(call, in_shapes, padded_out_shapes)
    jitted = jax.jit(call, out_shardings=[array.sharding for array in outputs])

    # TensorFlow can lower for the CPU alone. The result is plain XLA, which may be compiled for
    # another platform, so the export must not be tied to the CPU.
    exported = jax_export.export(
        jitted, platforms=["cpu"], disabled_checks=[jax_export.DisabledSafetyCheck.platform()]
    )(*inputs)

    return Program(
        name=annotated.name,
        exported=bytes(exported.serialize()),
        partitioning=partitioning,
        arg_names=annotated.arg_names,
        args=annotated.args,
        results=results,
        donate=annotated.donate,
    )


def _on_padded(
    call: Callable[..., Sequence[jax.Array]],
    in_shapes: Sequence[tuple[int, ...]],
    padded_out_shapes: Sequence[tuple[int, ...]],
) -> Callable[..., Sequence[jax.Array]]:
    """Returns `call`, which takes arrays of `in_shapes`, from padded arrays to padded results."""

    # A device's part is as large with padding as without, so that none of this communicates.
    def on_padded(*arrays: jax.Array) -> list[jax.Array]:
        logical = map(padded.without_padding, arrays, in_shapes)
        results = []
        for result, shape in zip(call(*logical), padded_out_shapes, strict=True):
            if result.shape != shape:
                result = jnp.pad(result, padded.end_padding(result.shape, shape))
            results.append(result)
        return results

    return on_padded
