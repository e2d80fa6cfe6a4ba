"""Files of programs: jax.export's, StableHLO and HLO."""

import contextlib
import hashlib
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import jax
from google.protobuf.message import DecodeError

from xla_plan.program import program_path, stablehlo_program
from xla_plan.program.stablehlo_program import StablehloProgram, check_replicas
from xla_spmd.hlo import collectives, hlo_proto
from xla_spmd.hlo.hlo_module import COLLECTIVES
from xla_spmd.runtime import jax_private

_FORMATS = (
    "a file of jax.export, StableHLO (text or bytecode) or HLO (text or a serialized "
    "HloModuleProto)"
)
# HLO's text has the number of replicas, copies that XLA does not partition, in its first line.
_HEADER_BYTES = 1 << 16
_REPLICAS = re.compile(rb"\breplica_count=(\d+)")


def read(path: pathlib.Path, platform: str) -> StablehloProgram:
    """Returns the program in a file, which is to be compiled for `platform`.

    Raises ValueError if the file does not exist, is too large, has an unknown format or a version
    that this JAX cannot read, or if its program is exported for other platforms or already
    compiled.
    """
    what = f"--program={path}"
    program_path.check(what, path)
    source = path.read_bytes()

    replicas = _REPLICAS.search(source[:_HEADER_BYTES])
    if replicas is not None:
        check_replicas(what, int(replicas[1]))
    with _formats_in_errors(what):
        hlo = _hlo_module(source)
    if hlo is not None:
        # A compiled program has a schedule of its instructions.
        if hlo.schedule.sequences:
            raise ValueError(f"{what}: this HLO is compiled already; give its source.")
        check_replicas(what, _num_replicas(hlo))
        with _formats_in_errors(what):
            source = jax_private.hlo_to_stablehlo(hlo.SerializeToString())

    elif not jax_private.is_bytecode(source) and not _is_mlir(source):
        with _formats_in_errors(what):
            exported = _exported_module(source)
        # Programs without platform-specific operations may be exported for several platforms.
        if exported.platforms != (platform,) and not exported.is_for_any_platform:
            raise ValueError(
                f"{what}: exported for {', '.join(exported.platforms)}, expected {platform} alone; "
                f"give jax.export.export platforms=[{platform!r}]."
            )
        source = exported.stablehlo

    with _formats_in_errors(what):
        module = jax_private.stablehlo_module(source)
    if hlo is not None:
        donors = [donor.parameter_number for donor in hlo.buffer_donor.entries]
        jax_private.donate(module, donors)
    return stablehlo_program.of_module(path.name, module)


@contextlib.contextmanager
def _formats_in_errors(what: str) -> Iterator[None]:
    """Turns errors into a ValueError that begins with `what` and lists the known formats."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {error}; JAX {jax.__version__} reads {_FORMATS}.") from error


def digest(path: pathlib.Path) -> str:
    """Returns the SHA-256 of a file. Raises ValueError if the file cannot be a program."""
    program_path.check(f"--program={path}", path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _num_replicas(hlo: Any) -> int:
    """Returns the number of replicas that a HloModuleProto's collectives name.

    The proto does not store the number. Collectives of partitions have a channel.
    """
    highest = 0
    for computation in hlo.computations:
        for instruction in computation.instructions:
            is_collective = instruction.opcode.removesuffix("-start") in COLLECTIVES
            if is_collective and not instruction.channel_id:
                for group in collectives.groups_of(instruction):
                    highest = max(highest, *group)
    return 1 + highest


def _is_mlir(source: bytes) -> bool:
    """Whether a file begins as MLIR's text does, with a module, an alias or a comment."""
    return (
        re.match(rb"\s*(module\b|func\.func\b|#\w+ = |//|\"builtin\.module\")", source) is not None
    )


def _hlo_module(source: bytes) -> Any | None:
    """Returns the HloModuleProto in HLO's text, or in a serialized proto; otherwise None.

    Raises ValueError if the text is damaged.
    """
    if source.lstrip().startswith(b"HloModule"):
        source = jax_private.hlo_from_text(source)

    messages = hlo_proto.messages()
    for name in ("xla.HloProto", "xla.HloModuleProto"):
        try:
            proto = messages[name].FromString(source)
        except DecodeError:
            continue
        module = proto.hlo_module if name == "xla.HloProto" else proto
        if module.computations and module.entry_computation_name:
            return module
    return None


def _exported_module(source: bytes) -> jax_private.ExportedModule:
    """Returns the module of a jax.export file. Raises ValueError for any other file."""
    # The binary formats contain zeros.
    if b"\0" not in source:
        raise ValueError("this text is not a program")
    return jax_private.exported_module(source)
