"""Figure 2a: a program for each device (MPMD), beside one program for all devices (Figure 2b).

Both sides start from the program that XLA's partitioner makes, in which a device reads its number
and computes from it where its slices begin and which of its elements are padding. The program of
device d has the constant d in place of the number, so that the compiler folds slices and masks; its
collectives name the same devices. One compiler compiles the D programs one by one, and the SPMD
program once.

An MPMD partitioner would also partition D times. This work is not counted, so the cost of MPMD is
underestimated.
"""

import dataclasses
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from lingvo_gshard.spmd import executable, lowering, specs, tracer
from lingvo_gshard.spmd.program import Program
from repro.tables import moe_layer
from xla_plan.program import stablehlo_program
from xla_plan.program.stablehlo_program import StablehloProgram
from xla_spmd.hlo import collectives, hlo_module, hlo_proto
from xla_spmd.runtime import jax_private

# The numbers of devices D. The caller prepares the largest number of virtual devices.
DEVICES = (2, 4, 8, 16, 32, 64)

# XLA's name of the SPMD partitioner, among the passes that it can write the result of.
_PARTITIONER = "spmd-partitioning"

# A group of tokens and an expert for each device. Compile time hardly depends on the sizes.
_SIZES = moe_layer.Sizes(model_dim=64, hidden_dim=256, tokens=128, experts=1)


@dataclasses.dataclass(frozen=True)
class Compilation:
    """One program that was compiled."""

    cpu_secs: float  # The compiler's, in all threads of this process.
    instructions: int  # After the compiler, in all computations.


@dataclasses.dataclass(frozen=True)
class Row:
    """A function for D devices, compiled as one program and as D programs."""

    # From the annotated program, before the partitioner, to the SPMD program's machine code.
    whole_cpu_secs: float
    spmd: Compilation  # From the partitioned program to machine code.
    mpmd: tuple[Compilation, ...]  # The same, for each device's program.

    @property
    def mpmd_cpu_secs(self) -> float:
        """The CPU seconds of all devices' programs."""
        return sum(compilation.cpu_secs for compilation in self.mpmd)

    @property
    def mpmd_instructions(self) -> int:
        """The instructions of all devices' programs."""
        return sum(compilation.instructions for compilation in self.mpmd)

    @property
    def cpu_ratio(self) -> float:
        """The CPU seconds of all devices' programs over the SPMD program's."""
        return self.mpmd_cpu_secs / self.spmd.cpu_secs

    @property
    def instruction_ratio(self) -> float:
        """The instructions of all devices' programs over the SPMD program's."""
        return self.mpmd_instructions / self.spmd.instructions


def over_devices() -> Iterator[Row]:
    """Yields the MoE layer's training pass for each number of DEVICES."""
    # The first compilation also pays for the process's one-time work.
    measure(layer(DEVICES[0]), jax.devices()[: DEVICES[0]])
    for num_devices in DEVICES:
        yield measure(layer(num_devices), jax.devices()[:num_devices])


def measure(program: StablehloProgram, devices: Sequence[Any]) -> Row:
    """Compiles a program for `devices`, one per partition, both ways.

    Raises jax.errors.JaxRuntimeError if the compiler refuses it.
    """
    whole_cpu_secs, _ = _timed(lambda: stablehlo_program.compile_program(program, devices))
    module = partitioned(program, devices)
    spmd = _compilation(spmd_program(module), devices)
    mpmd = []
    for device in range(len(devices)):
        mpmd.append(_compilation(device_program(module, device), devices))
    return Row(whole_cpu_secs, spmd, tuple(mpmd))


def partitioned(program: StablehloProgram, devices: Sequence[Any]) -> bytes:
    """Returns the HloModuleProto that XLA's partitioner makes, before the compiler's later passes.

    Raises jax.errors.JaxRuntimeError if the compiler refuses the program, and ValueError if it does
    not write the partitioner's result.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "xla_dump_to": folder,
            "xla_dump_hlo_pass_re": _PARTITIONER,
            "xla_dump_hlo_as_proto": "True",
        }
        stablehlo_program.compile_program(program, devices, options)
        files = list(pathlib.Path(folder).glob(f"*.after_{_PARTITIONER}.*.hlo.pb"))
        if len(files) != 1:
            raise ValueError(
                f"program {program.name}: the compiler wrote {len(files)} results of its pass "
                f"{_PARTITIONER}, expected 1."
            )
        written = hlo_proto.messages()["xla.HloProto"].FromString(files[0].read_bytes())
    module: bytes = written.hlo_module.SerializeToString()
    return module


def spmd_program(module: bytes) -> bytes:
    """Returns the program of all devices of a partitioned HloModuleProto."""
    proto = _over_replicas(module)
    for instruction in _device_numbers(proto):
        instruction.opcode = "replica-id"
    program: bytes = proto.SerializeToString()
    return program


def device_program(module: bytes, device: int) -> bytes:
    """Returns the program of one device of a partitioned HloModuleProto."""
    proto = _over_replicas(module)
    for instruction in _device_numbers(proto):
        instruction.opcode = "constant"
        instruction.literal.shape.CopyFrom(instruction.shape)
        instruction.literal.u32s.append(device)
    program: bytes = proto.SerializeToString()
    return program


def compile_program(module: bytes, devices: Sequence[Any]) -> Any:
    """Compiles one of these programs, whose collectives are among `devices`.

    Returns an executable for hlo_module.read.
    """
    return jax_private.compile_replicas(_parsed(module), devices)


def layer(num_devices: int) -> StablehloProgram:
    """Returns an MoE layer's training pass, with one group and one expert per device."""
    program = tracer.traced(_export, num_devices)
    mesh = specs.device_mesh(program.partitioning, jax.devices(), f"program {program.name}")
    lowered = executable.lower(program, mesh)
    return stablehlo_program.of_module(program.name, lowered.compiler_ir("stablehlo"))


def _export(num_devices: int) -> Program:
    annotated = moe_layer.forward(num_devices, _SIZES)
    return lowering.export(annotated, moe_layer.partitioning(num_devices))


def _compilation(module: bytes, devices: Sequence[Any]) -> Compilation:
    parsed = _parsed(module)
    cpu_secs, compiled = _timed(lambda: jax_private.compile_replicas(parsed, devices))
    instructions = sum(1 for _ in hlo_module.read(compiled).instructions())
    return Compilation(cpu_secs, instructions)


def _timed(compile: Callable[[], Any]) -> tuple[float, Any]:
    """Returns the CPU seconds of a compilation, and its result."""
    started = time.process_time()
    compiled = compile()
    return time.process_time() - started, compiled


def _parsed(module: bytes) -> Any:
    return jax_private.stablehlo_module(jax_private.hlo_to_stablehlo(module))


def _over_replicas(module: bytes) -> Any:
    """Returns the HloModuleProto with devices as replicas, so that XLA does not partition it."""
    proto = hlo_proto.messages()["xla.HloModuleProto"].FromString(module)
    proto.ClearField("device_assignment")
    for computation in proto.computations:
        for instruction in computation.instructions:
            # A collective without a channel is among replicas, by the same numbers.
            instruction.ClearField("channel_id")
            instruction.ClearField("use_global_device_ids")
            instruction.ClearField("sharding")
            _list_groups(instruction)
    return proto


def _list_groups(instruction: Any) -> None:
    """Lists the devices of each group of a collective whose groups are written as axes of a mesh.

    The conversion to StableHLO of JAX 0.10 and back makes other groups of axes of size 1.
    """
    if not instruction.HasField("mesh_axes_replica_group_list"):
        return
    groups = collectives.groups_of(instruction)
    instruction.ClearField("mesh_axes_replica_group_list")
    for group in groups:
        instruction.replica_groups.add().replica_ids.extend(group)


def _device_numbers(proto: Any) -> Iterator[Any]:
    """Yields the instructions of a HloModuleProto that read the device's number."""
    for computation in proto.computations:
        for instruction in computation.instructions:
            if instruction.opcode == "partition-id":
                yield instruction
