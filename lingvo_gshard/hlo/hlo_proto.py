"""XLA's messages about compiled programs, such as HloModuleProto, without TensorFlow.

The file hlo.binpb describes them: a FileDescriptorSet of XLA's own files, in an order in which each
file follows those it imports. `python -m tools.write_hlo_descriptors` writes it.
"""

import functools
import pathlib
from typing import Any

DESCRIPTORS = pathlib.Path(__file__).with_name("hlo.binpb")


@functools.cache
def messages() -> dict[str, Any]:
    """Returns the class of each message by its full name, such as `xla.HloModuleProto`.

    The classes are not those of TensorFlow, and may be used in a process that has imported it.
    """
    # A bundle imports this module, but translates where protobuf need not be installed.
    from google.protobuf import (
        any_pb2,
        descriptor_pb2,
        descriptor_pool,
        duration_pb2,
        message_factory,
        timestamp_pb2,
    )

    # TensorFlow registers the same messages, perhaps of another version, in the default pool.
    pool = descriptor_pool.DescriptorPool()

    # The files that XLA's import from protobuf itself.
    for module in (any_pb2, duration_pb2, timestamp_pb2):
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)

    files = descriptor_pb2.FileDescriptorSet.FromString(DESCRIPTORS.read_bytes()).file
    for file in files:
        pool.Add(file)
    return message_factory.GetMessageClassesForFiles([file.name for file in files], pool)
