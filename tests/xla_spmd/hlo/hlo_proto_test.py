"""XLA's messages without TensorFlow."""

import subprocess
import sys

import pytest
from google.protobuf import descriptor_pb2
from tensorflow.compiler.xla.service import hlo_pb2

from tools import write_hlo_descriptors
from xla_spmd.hlo import hlo_proto

_READ_A_PROGRAM = """
import sys

import jax
from xla_spmd.hlo import hlo_module

x, w = jax.numpy.ones((2, 3)), jax.numpy.ones((3, 5))
module = hlo_module.read(jax.jit(lambda x, w: x @ w).lower(x, w).compile())
assert str(module.entry.root.arrays[0]) == "f32[2,5]", module.entry.root.arrays
assert "tensorflow" not in sys.modules
"""


@pytest.mark.slow
def test_a_compiled_program_is_read_without_tensorflow():
    subprocess.run([sys.executable, "-c", _READ_A_PROGRAM], check=True, timeout=300)


def test_the_kept_descriptors_equal_the_installed_tensorflows():
    """If this fails, run: python -m tools.write_hlo_descriptors."""
    kept = descriptor_pb2.FileDescriptorSet.FromString(hlo_proto.DESCRIPTORS.read_bytes())
    assert kept == write_hlo_descriptors.descriptors()
    assert [file.name for file in kept.file] == [
        "xla/service/metrics.proto",
        "xla/xla_data.proto",
        "xla/service/hlo.proto",
    ]


def test_a_message_is_the_same_beside_tensorflows_own():
    theirs = hlo_pb2.HloModuleProto(name="step", entry_computation_id=3)
    theirs.computations.add(name="main", id=3).instructions.add(name="x", opcode="parameter")
    ours = hlo_proto.messages()["xla.HloModuleProto"].FromString(theirs.SerializeToString())
    assert type(ours) is not type(theirs)
    assert str(ours) == str(theirs)
    assert ours.SerializeToString() == theirs.SerializeToString()
