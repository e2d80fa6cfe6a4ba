"""Program: the exported artifact in one file, which loads and runs without TensorFlow."""

import dataclasses
import hashlib
import json
import pathlib
from typing import Any

from lingvo_gshard.core import atomic_file
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.spmd import specs

_MAGIC = b"lingvo_gshard program\n"
_VERSION = 1
_DIGEST_BYTES = 32
_LENGTH_BYTES = 8


@dataclasses.dataclass(frozen=True)
class Program:
    """An XLA program for all partitions, with its arguments and results.

    Attributes:
      name: the function's name.
      exported: JAX's serialized, versioned export.
      partitioning: the mesh, and the table from the letters of the dims below to its axes.
      arg_names, args: one name and one NestedMap of TensorSpec for each argument.
      results: NestedMap of TensorSpec.
      donate: the names of the donated arguments.
    """

    name: str
    exported: bytes
    partitioning: Partitioning
    arg_names: tuple[str, ...]
    args: tuple[NestedMap, ...]
    results: NestedMap
    donate: tuple[str, ...]

    def save(self, path: str | pathlib.Path) -> None:
        """Writes one file: magic, sha256, header length, header (JSON), export."""
        header = json.dumps(_header(self), sort_keys=True).encode()
        body = len(header).to_bytes(_LENGTH_BYTES, "little") + header + self.exported
        atomic_file.write(path, _MAGIC + hashlib.sha256(body).digest() + body)


def load(path: str | pathlib.Path) -> Program:
    """Reads a Program that `save` wrote.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file holds no program, is of another version, or is damaged.
    """
    data = pathlib.Path(path).read_bytes()
    if not data.startswith(_MAGIC):
        raise ValueError(f"{path}: this is no program of lingvo_gshard.")
    digest, body = (
        data[len(_MAGIC) :][:_DIGEST_BYTES],
        data[len(_MAGIC) + _DIGEST_BYTES :],
    )
    if hashlib.sha256(body).digest() != digest:
        raise ValueError(f"{path}: the program is damaged; its checksum does not match.")
    size = int.from_bytes(body[:_LENGTH_BYTES], "little")
    header = json.loads(body[_LENGTH_BYTES : _LENGTH_BYTES + size])
    version = header["version"]
    if version > _VERSION:
        raise ValueError(
            f"{path}: the program has version {version}, made by a newer lingvo_gshard; this one "
            f"reads version {_VERSION}."
        )
    if version < _VERSION:
        raise ValueError(
            f"{path}: the program has version {version}, not {_VERSION}; export it again."
        )
    return _from_header(header, body[_LENGTH_BYTES + size :])


def _header(program: Program) -> dict[str, Any]:
    mesh = program.partitioning.mesh
    return {
        "version": _VERSION,
        "name": program.name,
        "mesh": [mesh.axis_names, mesh.axis_sizes, mesh.device_assignment],
        "table": program.partitioning.table,
        "arg_names": program.arg_names,
        "args": [specs.to_json(arg) for arg in program.args],
        "results": specs.to_json(program.results),
        "donate": program.donate,
    }


def _from_header(header: dict[str, Any], exported: bytes) -> Program:
    axis_names, axis_sizes, assignment = header["mesh"]
    mesh = Mesh(
        tuple(axis_names), tuple(axis_sizes), None if assignment is None else tuple(assignment)
    )
    table = tuple(
        (letter, axis if isinstance(axis, str) else tuple(axis)) for letter, axis in header["table"]
    )
    return Program(
        name=header["name"],
        exported=exported,
        partitioning=Partitioning(mesh, table),
        arg_names=tuple(header["arg_names"]),
        args=tuple(specs.from_json(arg) for arg in header["args"]),
        results=specs.from_json(header["results"]),
        donate=tuple(header["donate"]),
    )
