"""Writes xla_spmd/hlo/hlo.binpb: the descriptors of XLA's messages, taken from TensorFlow.

    python -m tools.write_hlo_descriptors

It is run again when another version of TensorFlow is pinned. tests/xla_spmd/hlo/hlo_proto_test.py
compares the file with the installed one.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2
from tensorflow.compiler.xla.service import hlo_pb2

from xla_spmd.hlo import hlo_proto

_PROTOBUF = "google/protobuf/"  # Protobuf's own files, which its package contains.


def descriptors() -> descriptor_pb2.FileDescriptorSet:
    """Returns the descriptors of XLA's hlo.proto and its imports; imports come first."""
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
