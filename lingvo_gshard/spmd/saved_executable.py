"""Executables in files: compiled once, then called on other machines of the same kind.

FOLDER/NAME.executable   the compiled program of that name, serialized by JAX
FOLDER/NAME.json         the program from which it was compiled, and its machine

The first is a pickle, which can run any code when it is loaded: load only folders that you trust.
An executable for CPUs needs the instruction set of the CPU on which it was compiled.
"""

import contextlib
import hashlib
import json
import logging
import pathlib
import re
import reprlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.experimental import serialize_executable

from lingvo_gshard.spmd import executable, executables_folder, specs
from lingvo_gshard.spmd.executable import Executable
from lingvo_gshard.spmd.program import Program
from xla_spmd.files import atomic_file, json_records
from xla_spmd.runtime import progress, versions

_ADVICE = "save it again with `plan model --save`, or leave out --executables"
# In the text of a lowered program: the definition of a function, and any use of its name.
_FUNCTION = re.compile(r"func\.func private @([\w.$-]+)")
_SYMBOL = re.compile(r"@([\w.$-]+)")


def save(compiled: Executable, folder: str | pathlib.Path) -> None:
    """Writes an executable and its facts.

    Raises ValueError if the compiler cannot serialize it.
    """
    program = compiled.program
    path, facts_path = _files(pathlib.Path(folder), program)
    with _one_line(f"program {program.name} cannot be saved"):
        content, _, _ = serialize_executable.serialize(compiled.compiled)

    # Lower the program again: the digest covers the program that JAX gives to the compiler.
    facts = {
        **_machine(compiled.mesh),
        "program_digest": _program_digest(program, executable.lower(program, compiled.mesh)),
        "file_digest": _digest(content),
    }

    # An executable without facts does not count, so the facts are removed first and written last.
    path.parent.mkdir(parents=True, exist_ok=True)
    facts_path.unlink(missing_ok=True)
    atomic_file.write(path, content)
    atomic_file.write(facts_path, json.dumps(facts, indent=2) + "\n")


class SavedExecutables:
    """A folder of saved executables, loaded for the programs from which they were compiled."""

    def __init__(self, folder: str | pathlib.Path) -> None:
        """Raises ValueError if the folder contains no saved executable."""
        self._folder = pathlib.Path(folder)
        executables_folder.check(self._folder)

    def load_or_compile(self, program: Program, devices: Sequence[Any] | None = None) -> Executable:
        """Returns the saved executable of `program`, or, if it is missing, compiles it and warns.

        Raises ValueError for an executable of a different machine or version, for damaged or
        missing files, and if XLA refuses the program.
        """
        mesh = specs.device_mesh(program.partitioning, devices, f"program {program.name}")
        path, facts_path = _files(self._folder, program)
        if not facts_path.is_file():
            logging.warning("%s does not exist; %s is compiled.", facts_path, program.name)
            return Executable(program, mesh)

        # Lowering is quick, and shows whether the executable belongs to this very program.
        program_digest, file_digest = _read_digests(facts_path, mesh)
        lowered = executable.lower(program, mesh)
        if program_digest != _program_digest(program, lowered):
            logging.warning("%s has other settings or code; %s is compiled.", path, program.name)
            with progress.shown(f"compiling {program.name}"):
                compiled = lowered.compile()
            return Executable(program, mesh, compiled)

        return Executable(program, mesh, _load(path, file_digest, lowered, mesh))


def _files(folder: pathlib.Path, program: Program) -> tuple[pathlib.Path, pathlib.Path]:
    """Returns the paths of a program's executable and facts."""
    return folder / f"{program.name}.executable", folder / f"{program.name}.json"


def _machine(mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Returns the facts that decide whether an executable can be loaded."""
    devices = list(mesh.devices.flat)
    platform = devices[0].platform
    return {
        "platform": platform,
        "device_kind": devices[0].device_kind,
        "num_devices": len(devices),
        "device_ids": [device.id for device in devices],
        "versions": versions.installed([*versions.JAX, *versions.COMPILERS.get(platform, ())]),
    }


def _read_digests(path: pathlib.Path, mesh: jax.sharding.Mesh) -> tuple[str, str]:
    """Returns the digests of an executable's program and file, from its facts.

    Raises ValueError if the facts are damaged, or if the machine of `mesh` differs from theirs.
    """
    machine = _machine(mesh)
    try:
        facts = json_records.parse(path.read_text(encoding="utf-8"))
        saved_machine = {name: facts[name] for name in machine}
        program_digest = facts["program_digest"]
        file_digest = facts["file_digest"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error!r}); {_ADVICE}.") from error

    # On a different machine, the executable would crash, or compute wrong results.
    for name, value in machine.items():
        if saved_machine[name] != value:
            saved = reprlib.repr(saved_machine[name])
            raise ValueError(f"{path} is for {name} {saved}, not {reprlib.repr(value)}; {_ADVICE}.")
    return program_digest, file_digest


def _load(
    path: pathlib.Path, digest: str, lowered: jax.stages.Lowered, mesh: jax.sharding.Mesh
) -> Any:
    """Loads the jax.stages.Compiled in a file.

    Raises ValueError if it is missing or damaged.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing; {_ADVICE}.")
    content = path.read_bytes()
    if _digest(content) != digest:
        raise ValueError(f"{path} is damaged, its checksum does not match; {_ADVICE}.")

    # This is a pickle: read it only after its digest has been checked.
    devices = list(mesh.devices.flat)
    with _one_line(f"{path}: cannot be loaded"):
        return serialize_executable.deserialize_and_load(
            content, lowered.in_tree, lowered.out_tree, devices[0].client, devices
        )


@contextlib.contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Turns JAX's errors into a ValueError of one line."""
    try:
        yield
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        raise ValueError(f"{what}: {str(error).splitlines()[0]}") from error


def _program_digest(program: Program, lowered: jax.stages.Lowered) -> str:
    """Returns a digest that is equal in all processes.

    The exported bytes would not work, because they contain paths of source files.
    """
    text = lowered.as_text()

    # TensorFlow numbers function names by earlier traces in the process; we renumber them.
    numbers = {name: f"@{i}" for i, name in enumerate(_FUNCTION.findall(text))}
    text = _SYMBOL.sub(lambda symbol: numbers.get(symbol[1], symbol[0]), text)

    arguments = specs.named_leaves(program.arg_names, program.args)
    return _digest(repr((arguments, program.results.FlattenItems(), text)).encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
