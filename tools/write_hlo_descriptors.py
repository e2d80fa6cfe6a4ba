"""Writes lingvo_gshard/hlo/hlo.binpb: the descriptors of XLA's messages, taken from TensorFlow.

    python -m tools.write_hlo_descriptors

It is run again when another version of TensorFlow is pinned; tests/hlo/hlo_proto_test.py compares
the file with the installed one.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2
from tensorflow.compiler.xla.service import hlo_pb2

from lingvo_gshard.hlo import hlo_proto

_PROTOBUF = "google/protobuf/"  # The files of protobuf's own package, which come with it.


def descriptors() -> descriptor_pb2.FileDescriptorSet:
    """Returns XLA's hlo.proto and what it imports, each file after those it imports."""
    files = descriptor_pb2.FileDescriptorSet()
    names: set[str] = set()

    def add(file: Any) -> None:
        if file.name in names or file.name.startswith(_PROTOBUF):
            return
        names.add(file.name)
        for imported in file.dependencies:
            add(imported)
        file.CopyToProto(files.file.add())

    add(hlo_pb2.DESCRIPTOR)
    return files


def main() -> None:
    """Writes the file."""
    content = descriptors().SerializeToString(deterministic=True)
    hlo_proto.DESCRIPTORS.write_bytes(content)
    print(f"{hlo_proto.DESCRIPTORS}: {len(content)} bytes")


if __name__ == "__main__":
    main()
