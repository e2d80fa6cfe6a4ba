"""Programs for the readers' tests: stored ones for a TPU and a GPU, and small ones."""

from __future__ import annotations

import functools
import itertools
import lzma
import pathlib
from collections.abc import Callable
from typing import Any

import jax

from xla_spmd.hlo import hlo_module, hlo_proto
from xla_spmd.hlo.hlo_module import Array, Computation, Instruction, Module

FOLDER = pathlib.Path(__file__).parent / "kept"  # Filled by make_programs.py.

# The training step's model, whose layers are loops over blocks of two layers.
MODEL = "toy.MoE8E12L"
SETTINGS = (
    "task.source_vocab_size=96",
    "task.target_vocab_size=80",
    "task.dim=32",
    "task.encoder.num_layers=6",
    "task.decoder.num_layers=6",
    "task.encoder.moe.group_size=32",
    "task.decoder.moe.group_size=24",
    "input.batch_size=16",
    "input.source_len=32",
    "input.target_len=24",
)
MODEL_DIM = 32
CAPACITY = {"encoder": 8, "decoder": 6}  # Slots of an expert per group; each core has two groups.
# A block without experts: attentions, a feed-forward layer, a gate, and norms of two vectors.
BLOCK_WEIGHTS = {
    "encoder": 2 * 4 * 32 * 128 + 2 * 32 * 512 + 32 * 8 + 4 * 2 * 32,
    "decoder": 4 * 4 * 32 * 128 + 2 * 32 * 512 + 32 * 8 + 6 * 2 * 32,
}
# M and H of the perceptron with split weights.
SPLIT_DIMS = 256, 640
# B, M and H of two products on 4 x 4 TPUs, whose factors are gathered beside them.
BESIDE_DIMS = 16384, 8192, 16384
# The factors of cuBLAS's products: a matrix by another one, and a batch of matrices by itself.
PRODUCTS = (512, 256), (256, 1024), (4, 128, 128)

_NUMBERS = itertools.count()


@functools.cache
def kept(name: str) -> Module:
    """Returns one of the stored programs, such as `tpu_step`."""
    return hlo_module.parse(lzma.decompress((FOLDER / f"{name}.xz").read_bytes()))


def lowered(fn: Callable[..., Any], *args: Any) -> Module:
    """Returns a JAX function in the form that XLA's compilers receive.

    The jitted functions that it calls become fusions, unless they contain loops or branches, which
    a fusion cannot have.
    """
    ir = jax.jit(fn).lower(*args).compiler_ir("hlo")
    proto = hlo_proto.messages()["xla.HloModuleProto"].FromString(
        ir.as_serialized_hlo_module_proto()
    )
    with_control = set()
    for computation in proto.computations:  # Callees come first.
        for instruction in computation.instructions:
            called = set(instruction.called_computation_ids)
            if instruction.opcode in ("conditional", "while") or called & with_control:
                with_control.add(computation.id)
            elif instruction.opcode == "call":
                instruction.opcode = "fusion"
    return hlo_module.parse(proto.SerializeToString())


def instruction(
    opcode: str,
    *operands: Instruction,
    arrays: tuple[Array, ...] = (Array("f32", (4,)),),
    op_name: str = "",
    called: tuple[Computation, ...] = (),
    **fields: Any,
) -> Instruction:
    """Returns a handmade instruction with fields of its proto, named by its opcode and a number."""
    proto = hlo_proto.messages()["xla.HloInstructionProto"](**fields)
    return Instruction(
        f"{opcode}.{next(_NUMBERS)}", opcode, op_name, arrays, operands, called, proto
    )


def computation(name: str, *instructions: Instruction) -> Computation:
    """Returns a handmade computation; its last instruction is its result."""
    return Computation(name, instructions, instructions[-1])


def every(module: Module, opcode: str) -> list[Instruction]:
    """Returns the instructions of one opcode in all computations."""
    return [each for each in module.instructions() if each.opcode == opcode]
