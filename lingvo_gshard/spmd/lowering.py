"""From TensorFlow to XLA: exports an AnnotatedFn over an abstract mesh as a Program.

TensorFlow's annotations are GSPMD's; shardy.py rewrites them.

jax2tf.call_tf gets a function's HLO from TensorFlow, turns it into StableHLO, and puts it into
JAX's module. It is called experimental, but it is released with each JAX, while our own code would
use the internal names of JAX that change most between releases.

Arguments and results are stored on the devices in equal parts, so dims that the mesh does not
divide are padded (padded.py). The program first removes the padding of its arguments, and finally
pads its results. In between, every tensor has its logical shape, and XLA masks uneven parts
(section 3.3.3).
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
from xla_spmd.annotations import shardy

_WRONG_TYPES = "Cannot lower jaxpr with verifier errors"


def export(annotated: annotated_fn.AnnotatedFn, partitioning: Partitioning) -> Program:
    """Traces and lowers for all partitions, without devices.

    Imports TensorFlow, and leaves the memory of GPUs to JAX. Raises ValueError if a result's shape
    is not static, if a donated argument is not returned with the same specs, if the function reads
    a tf.Variable, if TensorFlow lowers an operator to a wrong shape, or for a dtype that JAX would
    narrow.
    """
    from jax.experimental import jax2tf  # This imports TensorFlow.

    tf.config.set_visible_devices([], "GPU")

    function, results = annotated_fn.trace(annotated, partitioning)
    leaves = specs.named_leaves(annotated.arg_names, annotated.args)

    # A mesh of names and sizes: the compiling process chooses the devices. Its axes are Auto,
    # because along an Explicit axis JAX cannot slice a dim to an uneven size.
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

    # TensorFlow can lower only for the CPU. The result is plain XLA, which may be compiled for
    # other platforms, so the export must not be tied to the CPU.
    exporting = jax_export.export(
        jitted, platforms=["cpu"], disabled_checks=[jax_export.DisabledSafetyCheck.platform()]
    )
    try:
        exported = exporting(*inputs)
    except ValueError as error:  # JAX verifies TensorFlow's program.
        if _WRONG_TYPES not in str(error):
            raise
        detail = str(error).splitlines()[1].strip()
        raise ValueError(
            f"program {annotated.name}: TensorFlow lowers an operator to a wrong shape: {detail}. "
            "It does so for the gradient of a strided slice that takes no element."
        ) from error

    return Program(
        name=annotated.name,
        exported=shardy.annotated(annotated.name, bytes(exported.serialize()), partitioning.mesh),
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
    """Returns `call`, which takes arrays of `in_shapes`, as a function on padded arrays."""

    # Padding does not change the size of a device's part, so this needs no communication.
    def on_padded(*arrays: jax.Array) -> list[jax.Array]:
        logical = map(padded.without_padding, arrays, in_shapes)
        results = []
        for result, shape in zip(call(*logical), padded_out_shapes, strict=True):
            if result.shape != shape:
                result = jnp.pad(result, padded.end_padding(result.shape, shape))
            results.append(result)
        return results

    return on_padded
