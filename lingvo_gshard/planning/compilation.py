"""What it costs to compile the MoE layer as its devices and experts grow together (section 3.3).

One program serves all devices, so it should be no larger, and no slower to compile, for 2048 of
them than for 8. Letters are those of layers/moe.py.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.hlo.compiled_report import CompiledReport
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.moe import MoELayer
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.spmd import lowering, topology
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn

CORES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
FAMILY_CORES = (128, 2048)  # The fewest and the most that the paper trained on.


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The layer on each device; by default the paper's M and H.

    Attributes:
      model_dim, hidden_dim: M, H.
      tokens: one group of a device.
      experts: of a device.
    """

    model_dim: int = 1024
    hidden_dim: int = 8192
    tokens: int = 1024
    experts: int = 1


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A layer, forward and backward, compiled for a TPU v3.

    Attributes:
      num_partitions: of its cores.
      lower_cpu_secs: from TensorFlow to the exported program, of all threads together.
      compile_cpu_secs: from there to the program of one core.
      report: what the compiler made.
    """

    num_partitions: int
    lower_cpu_secs: float
    compile_cpu_secs: float
    report: CompiledReport


def partitioning(num_partitions: int) -> Partitioning:
    """The paper's table over one axis."""
    return Partitioning.from_dict(Mesh.flat(num_partitions), {"B": "d", "G": "d", "E": "d"})


def forward(num_partitions: int, sizes: Sizes) -> AnnotatedFn:
    """An MoE layer of D times `sizes`, training."""
    layer = _layer(num_partitions, sizes)

    def fn(theta: NestedMap, batch: NestedMap) -> NestedMap:
        y_BLM, _ = layer.FProp(theta, batch.x_BLM, batch.real_BL, Context(Mode.TRAIN, batch.seed))
        return NestedMap(y_BLM=y_BLM)

    args = (_theta(layer), _batch(num_partitions, sizes))
    return AnnotatedFn("moe", fn, ("theta", "batch"), args, {"y_BLM": "BLM"})


def forward_and_backward(num_partitions: int, sizes: Sizes) -> AnnotatedFn:
    """The same, and the gradients of its weights and inputs; d_y_BLM is that of its results."""
    layer = _layer(num_partitions, sizes)

    def fn(theta: NestedMap, batch: NestedMap) -> NestedMap:
        leaves = [*theta.Flatten(), batch.x_BLM]
        with tf.GradientTape() as tape:
            tape.watch(leaves)
            context = Context(Mode.TRAIN, batch.seed)
            y_BLM, routing = layer.FProp(theta, batch.x_BLM, batch.real_BL, context)
            loss = tf.reduce_sum(y_BLM * batch.d_y_BLM) + routing.aux_loss
        *d_theta, d_x_BLM = tape.gradient(loss, leaves)
        return NestedMap(d_theta=theta.Pack(d_theta), d_x_BLM=d_x_BLM)

    theta, batch = _theta(layer), _batch(num_partitions, sizes)
    batch.d_y_BLM = batch.x_BLM
    dims = {f"d_theta.{path}": spec.dims for path, spec in theta.FlattenItems()}
    dims["d_x_BLM"] = "BLM"
    return AnnotatedFn("moe", fn, ("theta", "batch"), (theta, batch), dims)


def measure(num_partitions: int, sizes: Sizes) -> Compiled:
    """Compiles the layer for a TPU v3; ValueError as topology.compile_program."""
    annotated = forward_and_backward(num_partitions, sizes)
    start = time.process_time()
    exported = lowering.export(annotated, partitioning(num_partitions))
    lowered = time.process_time()
    executable = topology.compile_program(exported, topology.v3(num_partitions))
    compiled = time.process_time()
    return Compiled(num_partitions, lowered - start, compiled - lowered, executable.report())


def table(rows: Sequence[Compiled]) -> str:
    """The rows as text, then the largest over the smallest of what should not grow.

    And the most cores of the paper's family over its fewest, where both are among the rows.
    """
    instructions = [row.report.num_instructions for row in rows]
    seconds = [row.compile_cpu_secs for row in rows]
    lines = [
        _line("cores", "instructions", "lower s", "compile s", "arguments", "temporaries", "sent"),
        *(_line(*_cells(row)) for row in rows),
        f"Largest over smallest: {max(instructions) / min(instructions):.2f} instructions, "
        f"{max(seconds) / min(seconds):.2f} s to compile. Seconds are of one CPU; MiB of one core.",
    ]
    secs = {row.num_partitions: row.compile_cpu_secs for row in rows}
    least, most = FAMILY_CORES
    if secs.keys() >= {least, most}:
        lines.append(f"{most} cores over {least}: {secs[most] / secs[least]:.2f} s to compile.")
    return "\n".join(lines)


def _cells(row: Compiled) -> tuple[object, ...]:
    report = row.report
    kinds = ", ".join(f"{count} {kind}" for kind, count in report.collectives if count)
    sent_bytes = sum(op.result_bytes for op in report.collective_ops)
    return (
        row.num_partitions,
        report.num_instructions,
        f"{row.lower_cpu_secs:.1f}",
        f"{row.compile_cpu_secs:.1f}",
        f"{report.argument_bytes / 2**20:.1f} MiB",
        f"{report.temp_bytes / 2**20:.1f} MiB",
        f"{sent_bytes / 2**20:.1f} MiB in {kinds}",
    )


def _line(*cells: object) -> str:
    *left, last = cells
    return "".join(f"{cell:>13}" for cell in left) + f"  {last}"


def _layer(num_partitions: int, sizes: Sizes) -> MoELayer:
    params = MoELayer.Params().Set(
        dim=sizes.model_dim,
        hidden_dim=sizes.hidden_dim,
        num_experts=sizes.experts * num_partitions,
        group_size=sizes.tokens,
    )
    return params.Instantiate(Annotator(partitioning(num_partitions)), "moe")


def _theta(layer: MoELayer) -> NestedMap:
    return layer.weight_specs.Transform(lambda w: TensorSpec(w.shape, "float32", w.dims))


def _batch(num_partitions: int, sizes: Sizes) -> NestedMap:
    x_BLM = (num_partitions, sizes.tokens, sizes.model_dim)
    return NestedMap(
        x_BLM=TensorSpec(x_BLM, "float32", "BLM"),
        real_BL=TensorSpec(x_BLM[:2], "float32", "BL"),
        seed=TensorSpec((2,), "int32", "_"),
    )
