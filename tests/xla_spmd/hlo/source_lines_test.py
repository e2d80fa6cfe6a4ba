"""Lines of the source in a compiled program, in JAX's form."""

import inspect

import jax
import jax.numpy as jnp

from xla_spmd.hlo import hlo_proto, source_lines


def _double(x):
    with jax.named_scope("double"):
        return jnp.sin(x) * 2.0


def test_an_operation_has_the_line_that_called_it():
    compiled = jax.jit(_double).lower(jnp.ones(4)).compile()
    (module,) = compiled.runtime_executable().hlo_modules()
    lines = source_lines.read(module.as_serialized_hlo_module_proto())

    _, first = inspect.getsourcelines(_double)
    assert lines["jit(_double)/double/sin"] == f"source_lines_test.py:{first + 2}"


def test_a_frame_is_looked_up_in_the_programs_table():
    proto = hlo_proto.messages()["xla.HloModuleProto"]()
    frames = proto.stack_frame_index
    frames.file_names.extend(["/home/me/train.py", "/home/me/model.py"])
    frames.file_locations.add(file_name_id=1, line=30)
    frames.file_locations.add(file_name_id=2, line=12)
    frames.stack_frames.add(file_location_id=1)
    frames.stack_frames.add(file_location_id=2, parent_frame_id=1)

    instructions = proto.computations.add().instructions
    instructions.add().metadata.op_name = "no_line"
    called = instructions.add().metadata
    called.op_name = "mlp/dot"
    called.stack_frame_id = 2
    direct = instructions.add().metadata
    direct.op_name = "mlp/add"
    direct.source_file = "/home/me/other.py"
    direct.source_line = 5
    assert source_lines.read(proto.SerializeToString()) == {
        "mlp/dot": "model.py:12",
        "mlp/add": "other.py:5",
    }
