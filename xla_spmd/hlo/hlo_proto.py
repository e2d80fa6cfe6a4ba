"""XLA's messages about compiled programs, such as HloModuleProto, without TensorFlow.

The file hlo.binpb describes them. It is a FileDescriptorSet of XLA's own files, in which each file
follows its imports. `python -m tools.write_hlo_descriptors` writes it.
"""

import functools
import pathlib
from typing import Any

DESCRIPTORS = pathlib.Path(__file__).with_name("hlo.binpb")


@functools.cache
def messages() -> dict[str, Any]:
    """Returns the class of each message by its full name, such as `xla.HloModuleProto`.

    The classes differ from TensorFlow's, and work in a process that has imported TensorFlow.
    """
    # A bundle imports this module, but also translates on machines without protobuf.
    from google.protobuf import (
        any_pb2,
        descriptor_pb2,
        descriptor_pool,
        duration_pb2,
        message_factory,
        timestamp_pb2,
    )

    # TensorFlow registers the same messages, perhaps in a different version, in the default pool.
    pool = descriptor_pool.DescriptorPool()

    # The files of protobuf itself that XLA's files import.
    for module in (any_pb2, duration_pb2, timestamp_pb2):
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)

    files = descriptor_pb2.FileDescriptorSet.FromString(DESCRIPTORS.read_bytes()).file
    for file in files:
        _add_transposed_devices(file)
        pool.Add(file)
    return message_factory.GetMessageClassesForFiles([file.name for file in files], pool)


def _add_transposed_devices(file: Any) -> None:
    """Adds a field of MeshProto that TensorFlow's XLA lacks.

    A mesh lists its devices, or gives them as a transposed grid of 0, 1, 2, ...
    """
    for message in file.message_type:
        if message.name == "MeshProto" and all(field.number != 3 for field in message.field):
            grid = message.nested_type.add(name="Transposed")
            kind = type(message.field[0])
            for number, name in ((1, "reshape_dims"), (2, "transpose_perm")):
                grid.field.add(
                    name=name, number=number, type=kind.TYPE_INT64, label=kind.LABEL_REPEATED
                )
            message.field.add(
                name="transposed",
                number=3,
                type=kind.TYPE_MESSAGE,
                label=kind.LABEL_OPTIONAL,
                type_name=f".{file.package}.MeshProto.Transposed",
            )
