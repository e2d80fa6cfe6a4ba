"""Program: the exported artifact in one file, which loads and runs without TensorFlow."""

import dataclasses
import hashlib
import json
import pathlib

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.files import atomic_file
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.spmd import specs

_MAGIC = b"lingvo_gshard program\n"
_VERSION = 1
_DIGEST_BYTES = 32
_LENGTH_BYTES = 8


@dataclasses.dataclass(frozen=True)
class Program:
    """An XLA program for all partitions, with its arguments and results."""

    name: str
    exported: bytes  # JAX's serialized, versioned export.
    partitioning: Partitioning  # The mesh, and the table from the letters of the dims below.
    arg_names: tuple[str, ...]  # One name and one tree of TensorSpec for each argument.
    args: tuple[NestedMap, ...]
    results: NestedMap  # Of TensorSpec.
    donate: tuple[str, ...]  # The names of the donated arguments.

    def save(self, path: str | pathlib.Path) -> None:
        """Writes one file: magic, sha256, header length, header (JSON), export."""
        fields = {
            "version": _VERSION,
            "name": self.name,
            "mesh": dataclasses.astuple(self.partitioning.mesh),
            "table": self.partitioning.table,
            "arg_names": self.arg_names,
            "args": [specs.to_json(arg) for arg in self.args],
            "results": specs.to_json(self.results),
            "donate": self.donate,
        }
        header = json.dumps(fields, sort_keys=True).encode()
        body = len(header).to_bytes(_LENGTH_BYTES, "little") + header + self.exported
        atomic_file.write(path, _MAGIC + hashlib.sha256(body).digest() + body)


def load(path: str | pathlib.Path) -> Program:
    """Reads a Program that `save` wrote.

    Raises FileNotFoundError if there is no such file, and ValueError if the file holds no program,
    is of another version, or is damaged.
    """
    data = pathlib.Path(path).read_bytes()
    if not data.startswith(_MAGIC):
        raise ValueError(f"{path} is not a program of lingvo_gshard.")
    rest = data[len(_MAGIC) :]
    digest, body = rest[:_DIGEST_BYTES], rest[_DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != digest:
        raise ValueError(f"{path} is damaged; its checksum does not match.")
    size = int.from_bytes(body[:_LENGTH_BYTES], "little")
    fields = json.loads(body[_LENGTH_BYTES : _LENGTH_BYTES + size])
    if fields["version"] != _VERSION:
        raise ValueError(
            f"{path}: the program has version {fields['version']}, this lingvo_gshard reads "
            f"{_VERSION}; export it again with this one."
        )
    axis_names, axis_sizes, assignment = fields["mesh"]
    table = tuple(
        (letter, axis if isinstance(axis, str) else tuple(axis)) for letter, axis in fields["table"]
    )
    mesh = Mesh(tuple(axis_names), tuple(axis_sizes), assignment and tuple(assignment))
    return Program(
        name=fields["name"],
        exported=body[_LENGTH_BYTES + size :],
        partitioning=Partitioning(mesh, table),
        arg_names=tuple(fields["arg_names"]),
        args=tuple(specs.from_json(arg) for arg in fields["args"]),
        results=specs.from_json(fields["results"]),
        donate=tuple(fields["donate"]),
    )
