"""TensorFlow to XLA: exports an AnnotatedFn over an abstract mesh as a Program.

jax2tf.call_tf does what is needed: it asks TensorFlow for a function's HLO, turns that into
StableHLO, and puts it into JAX's module. It is called experimental, but it comes with each JAX,
while code of our own would use the names of JAX's inside that change most between releases.
"""

import jax
from jax import export as jax_export
from jax.sharding import AbstractMesh

from lingvo_gshard.core.late import tf
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.spmd import annotated_fn, specs
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

    # A mesh of names and sizes: which devices these will be is decided by who compiles.
    mesh = AbstractMesh(partitioning.mesh.axis_sizes, partitioning.mesh.axis_names)
    jitted = jax.jit(
        jax2tf.call_tf(function, has_side_effects=False),
        out_shardings=specs.shardings(partitioning, results, mesh).Flatten(),
    )

    # TensorFlow can lower for the CPU alone. The result is plain XLA, which may be compiled for
    # another platform, so the export must not be tied to the CPU.
    exported = jax_export.export(
        jitted, platforms=["cpu"], disabled_checks=[jax_export.DisabledSafetyCheck.platform()]
    )(*specs.abstract_arrays(partitioning, leaves, mesh))

    return Program(
        name=annotated.name,
        exported=bytes(exported.serialize()),
        partitioning=partitioning,
        arg_names=annotated.arg_names,
        args=annotated.args,
        results=results,
        donate=annotated.donate,
    )
