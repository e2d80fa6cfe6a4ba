"""What it costs to compile for more cores (section 3.3), and to compile more layers.

One program serves all devices, so the program of an MoE layer should be no larger, and no slower
to compile, for 2048 cores than for 8. A stack of layers is a loop, so that the same should hold
for a training step of 60 layers and of 12. Letters are those of layers/moe.py.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence

import tensorflow as tf

from lingvo_gshard import registry
from lingvo_gshard.core import table
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.hlo.compiled_report import CompiledReport
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.moe import MoELayer
from lingvo_gshard.model import placement
from lingvo_gshard.planning import planner
from lingvo_gshard.planning.plan import Plan
from lingvo_gshard.planning.planner import Request
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.spmd import lowering, topology
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn

CORES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_FAMILY_CORES = (128, 2048)  # The fewest and the most that the paper trained on.
LAYERS = (12, 36, 60)  # The paper's depths.

# The compiler's time depends little on the sizes of the tensors, so a toy stands for the model.
_DEEP_MODEL, _DEEP_TOPOLOGY, _DEEP_CORES = "toy.MoE8E12L", "v3:2x2", 8
_STACKS = ("encoder", "decoder")
_DEEP_SETTINGS = (
    *("task.source_vocab_size=512", "task.target_vocab_size=512"),
    *(f"task.{stack}.remat=ALL_BUT_PRODUCTS" for stack in _STACKS),
    *(f"task.{stack}.moe.dispatch=EINSUM" for stack in _STACKS),
    *(f"task.{stack}.moe.group_size=64" for stack in _STACKS),  # Equally many for each core.
)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The layer on each device: M, H, the tokens of its one group, and its experts.

    The defaults are the paper's.
    """

    model_dim: int = 1024
    hidden_dim: int = 8192
    tokens: int = 1024
    experts: int = 1


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A layer, forward and backward, compiled for a TPU v3.

    Lowering goes from TensorFlow to the exported program, and compiling from there to the program
    of one core, which `report` describes.
    """

    num_partitions: int
    lower_cpu_secs: float
    compile_cpu_secs: float
    report: CompiledReport


def partitioning(num_partitions: int) -> Partitioning:
    """Returns the paper's table over one axis."""
    return Partitioning.from_dict(Mesh.flat(num_partitions), {"B": "d", "G": "d", "E": "d"})


def forward_and_backward(num_partitions: int, sizes: Sizes) -> AnnotatedFn:
    """Returns the gradients of the layer's weights and inputs, given d_y_BLM in the batch."""
    layer = _layer(num_partitions, sizes)

    def fn(theta: NestedMap, batch: NestedMap) -> NestedMap:
        leaves = [*theta.Flatten(), batch.x_BLM]
        with tf.GradientTape() as tape:
            tape.watch(leaves)
            context = Context(Mode.TRAIN, batch.seed)
            y_BLM, routing = layer.FProp(theta, batch.x_BLM, batch.valid_BL, context)
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


def cores_table(compiled: Sequence[Compiled]) -> str:
    """Returns the layer's figures by CORES, and the growth of what should not grow."""
    head = ("cores", "instructions", "lower s", "compile s", "arguments MiB", "temporaries MiB")
    rows: list[Sequence[object]] = [(*head, "sent")]
    for each in compiled:
        report = each.report
        kinds = ", ".join(f"{count} {kind}" for kind, count in report.collectives if count)
        sent_bytes = sum(op.result_bytes for op in report.collective_ops)
        secs = (f"{each.lower_cpu_secs:.1f}", f"{each.compile_cpu_secs:.1f}")
        memory = (f"{report.argument_bytes / 2**20:.1f}", f"{report.temp_bytes / 2**20:.1f}")
        sent = f"{sent_bytes / 2**20:.1f} MiB in {kinds}"
        rows.append((each.num_partitions, report.num_instructions, *secs, *memory, sent))
    instructions = [each.report.num_instructions for each in compiled]
    secs_by_cores = {each.num_partitions: each.compile_cpu_secs for each in compiled}
    slowest = max(secs_by_cores.values()) / min(secs_by_cores.values())
    least, most = _FAMILY_CORES
    return (
        f"{table.text(rows)}\n"
        f"Largest over smallest: {max(instructions) / min(instructions):.2f} instructions, "
        f"{slowest:.2f} s to compile. Seconds are of one CPU; MiB of one core.\n"
        f"{most} cores over {least}: {secs_by_cores[most] / secs_by_cores[least]:.2f} s to compile."
    )


def layers_request(num_layers: int) -> Request:
    """Returns the request for a step of so many layers, half of them in the encoder."""
    depths = [f"task.{stack}.num_layers={num_layers // 2}" for stack in _STACKS]
    settings = (*_DEEP_SETTINGS, *depths)
    params = registry.get_params(_DEEP_MODEL, settings)
    parts = placement.partitioning(params, _DEEP_CORES)
    return Request(_DEEP_MODEL, settings, params, _DEEP_TOPOLOGY, parts)


def measure_layers() -> Iterator[Plan]:
    """Plans the step for each of LAYERS, all in this process.

    Raises:
      ValueError: the TPU compiler is not installed.
    """
    planner.make(layers_request(min(LAYERS)))  # Pays for what is made only once.
    for num_layers in LAYERS:
        yield planner.make(layers_request(num_layers))


def layers_table(plans: Sequence[Plan]) -> str:
    """Returns the plans of LAYERS as text, and the growth of the time to compile."""
    rows: list[Sequence[object]] = [("layers", "instructions", "lower s", "compile CPU s")]
    for num_layers, plan in zip(LAYERS, plans, strict=True):
        assert plan.cost is not None  # The model is small enough for any core.
        secs = (f"{plan.lower_secs:.1f}", f"{plan.compile_cpu_secs:.1f}")
        rows.append((num_layers, plan.cost.instructions, *secs))
    growth = plans[-1].compile_cpu_secs / plans[0].compile_cpu_secs
    last = f"{LAYERS[-1]} layers over {LAYERS[0]}: x{growth:.2f} to compile"
    return f"{table.text(rows)}\n{last}"


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
        valid_BL=TensorSpec(x_BLM[:2], "float32", "BL"),
        seed=TensorSpec((2,), "int32", "_"),
    )
