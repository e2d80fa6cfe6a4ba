"""Program: an exported program in one file, which loads and runs without TensorFlow."""

import dataclasses
import hashlib
import json
import pathlib
from typing import Any

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.spmd import specs
from xla_spmd.files import atomic_file
from xla_spmd.mesh import Mesh

_MAGIC = b"lingvo_gshard program\n"
_VERSION = 2
_DIGEST_BYTES = 32
_LENGTH_BYTES = 8


@dataclasses.dataclass(frozen=True)
class Program:
    """An XLA program for all partitions, with its arguments and results."""

    name: str
    exported: bytes  # JAX's serialized, versioned export.
    partitioning: Partitioning  # The mesh, and the table for the letters of the dims below.
    # A name and a tree of TensorSpec for each argument.
    arg_names: tuple[str, ...]
    args: tuple[NestedMap, ...]
    results: NestedMap  # A tree of TensorSpec.
    donate: tuple[str, ...]  # The names of the donated arguments.

    def save(self, path: str | pathlib.Path, key: str = "") -> None:
        """Writes one file: magic, sha256 of the key and the rest, header length, header, export.

        The header is JSON. A reader needs the same `key`, which identifies the origin of the
        program: so a different program is never mistaken for it, whatever the file is called.
        """
        header = {
            "version": _VERSION,
            "name": self.name,
            "mesh": dataclasses.astuple(self.partitioning.mesh),
            "table": self.partitioning.table,
            "arg_names": self.arg_names,
            "args": [specs.to_json(arg) for arg in self.args],
            "results": specs.to_json(self.results),
            "donate": self.donate,
        }

        # Sorted, so that equal programs give equal files.
        encoded = json.dumps(header, sort_keys=True).encode()
        body = len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded + self.exported
        # Several processes of a run may write the same program at the same time.
        with atomic_file.replacing(path, is_shared=True) as partial:
            partial.write_bytes(_MAGIC + _digest(key, body) + body)


def load(path: str | pathlib.Path, key: str = "") -> Program:
    """Reads a Program that `save` wrote with this key.

    Raises FileNotFoundError if the file does not exist, and ValueError if it is not a program, has
    another version, is damaged, or was written with a different key.
    """
    data = pathlib.Path(path).read_bytes()
    if not data.startswith(_MAGIC):
        raise ValueError(f"{path} is not a program of lingvo_gshard.")

    # The digest covers everything that follows it, so the header can be trusted.
    body_start = len(_MAGIC) + _DIGEST_BYTES
    digest = data[len(_MAGIC) : body_start]
    body = data[body_start:]
    if _digest(key, body) != digest:
        raise ValueError(f"{path} is damaged; its checksum does not match.")

    header_end = _LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "little")
    header = json.loads(body[_LENGTH_BYTES:header_end])
    if header["version"] != _VERSION:
        raise ValueError(
            f"{path}: the program has version {header['version']}, this lingvo_gshard reads "
            f"{_VERSION}; export it again with this one."
        )

    return Program(
        name=header["name"],
        exported=body[header_end:],
        partitioning=_partitioning(header),
        arg_names=tuple(header["arg_names"]),
        args=tuple(specs.from_json(arg) for arg in header["args"]),
        results=specs.from_json(header["results"]),
        donate=tuple(header["donate"]),
    )


def _digest(key: str, body: bytes) -> bytes:
    return hashlib.sha256(key.encode() + body).digest()


def _partitioning(header: dict[str, Any]) -> Partitioning:
    """Returns the partitioning of a header; JSON has turned its tuples into lists."""
    axis_names, axis_sizes, device_assignment = header["mesh"]
    mesh = Mesh(
        axis_names=tuple(axis_names),
        axis_sizes=tuple(axis_sizes),
        device_assignment=None if device_assignment is None else tuple(device_assignment),
    )

    table = []
    for letter, axis in header["table"]:
        table.append((letter, tuple(axis) if isinstance(axis, list) else axis))
    return Partitioning(mesh, tuple(table))
