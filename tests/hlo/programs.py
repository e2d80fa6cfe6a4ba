"""Programs for the readers' tests: kept ones of a TPU and a GPU, and small ones."""

from __future__ import annotations

import functools
import itertools
import lzma
import pathlib
from collections.abc import Callable
from typing import Any

import jax

from lingvo_gshard.hlo import hlo_module, hlo_proto
from lingvo_gshard.hlo.hlo_module import Array, Computation, Instruction, Module

FOLDER = pathlib.Path(__file__).parent / "kept"  # Filled by make_programs.py.

# Of the training step: its layers are loops over blocks of two layers.
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
CAPACITY = {"encoder": 8, "decoder": 6}  # Slots of an expert in a group; each core has two groups.
# A block without experts: attentions, a feed-forward layer, a gate, and norms of two vectors.
BLOCK_WEIGHTS = {
    "encoder": 2 * 4 * 32 * 128 + 2 * 32 * 512 + 32 * 8 + 4 * 2 * 32,
    "decoder": 4 * 4 * 32 * 128 + 2 * 32 * 512 + 32 * 8 + 6 * 2 * 32,
}
# M and H of the perceptron with split weights.
SPLIT_DIMS = 256, 640
# B, M and H of two products on 4 x 4 TPUs, beside which their factors are gathered.
BESIDE_DIMS = 16384, 8192, 16384
# Of the products by cuBLAS: a matrix by another one, and a batch of matrices by itself.
PRODUCTS = (512, 256), (256, 1024), (4, 128, 128)

_NUMBERS = itertools.count()


@functools.cache
def kept(name: str) -> Module:
    """One of the kept programs, such as `tpu_step`."""
    return hlo_module.parse(lzma.decompress((FOLDER / f"{name}.xz").read_bytes()))


def lowered(fn: Callable[..., Any], *args: Any) -> Module:
    """A JAX function as XLA's compilers receive it; the jitted functions it calls are fusions."""
    ir = jax.jit(fn).lower(*args).compiler_ir("hlo")
    proto = hlo_proto.messages()["xla.HloModuleProto"].FromString(
        ir.as_serialized_hlo_module_proto()
    )
    for computation in proto.computations:
        for instruction in computation.instructions:
            if instruction.opcode == "call":
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
    """An instruction by hand, with fields of its proto; its name is its opcode and a number."""
    proto = hlo_proto.messages()["xla.HloInstructionProto"](**fields)
    return Instruction(
        f"{opcode}.{next(_NUMBERS)}", opcode, op_name, arrays, operands, called, proto
    )


def computation(name: str, *instructions: Instruction) -> Computation:
    """A computation by hand; its last instruction is its result."""
    return Computation(name, instructions, instructions[-1])


def every(module: Module, opcode: str) -> list[Instruction]:
    """The instructions of one opcode in all computations."""
    return [each for each in module.instructions() if each.opcode == opcode]
