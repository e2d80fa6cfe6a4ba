"""A missing private name of JAX is reported in one sentence."""

import ast
import pathlib
import re
import sys

import jax
import pytest

from xla_spmd.runtime import jax_names, jax_private, jax_runtime, versions

_LIBRARY = pathlib.Path(jax_names.__file__).parents[1]
_HLO = b"HloModule m\nENTRY e { ROOT x = f32[] parameter(0) }"
_STABLEHLO = b"""
module @m {
  func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> { return %x : tensor<4xf32> }
}
"""


_EXPORTED = jax.export.export(jax.jit(lambda x: x))(jax.ShapeDtypeStruct((4,), "f4"))


def _use_indices():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax_private.num_addressable_indices(sharding, 0, (4,))


def _use_compiler():
    module = jax_private.stablehlo_module(_STABLEHLO)
    return jax_private.compile_stablehlo(module, jax.devices()[:1], [True], {}).runtime_executable()


def _use_export():
    return jax_private.exported_module(bytes(_EXPORTED.serialize()))


def _use_module():
    module = jax_private.stablehlo_module(_EXPORTED.mlir_module_serialized)
    return jax_private.with_module(_EXPORTED, module)


# A function that needs each name.
def _use_hlo():
    return jax_private.through_hlo(jax_private.stablehlo_module(_STABLEHLO))


_USES = {
    "clusters.ClusterEnv.auto_detect_unset_distributed_params": (
        lambda: jax_runtime.detected_processes(1)
    ),
    "compiler.backend_compile_and_load": _use_compiler,
    "compiler.get_compile_options": _use_compiler,
    "distributed.global_state": lambda: jax_runtime.join("127.0.0.1:1", 1, 0, 1, 1),
    "export._export._module_to_bytecode": _use_module,
    "export.serialization_generated.DisabledSafetyCheckKind": _use_export,
    "export.serialization_generated.Exported": _use_export,
    "hardware_utils.has_visible_nvidia_gpu": jax_runtime.has_nvidia_gpu,
    "hardware_utils.num_available_tpu_chips_and_device_id": jax_runtime.num_tpu_chips,
    "interpreters.mlir.make_ir_context": lambda: jax_private.stablehlo_module(_STABLEHLO),
    "lib._jax.get_distributed_runtime_client": (
        lambda: jax_runtime.join("127.0.0.1:1", 1, 0, 1, 1)
    ),
    "lib._jax.get_distributed_runtime_service": (
        lambda: jax_runtime.coordination_service("127.0.0.1:0", 1, 10)
    ),
    "lib._jax.mlir.mlir_module_to_xla_computation": _use_hlo,
    "lib.xla_client.DeviceList": _use_compiler,
    "lib.xla_client.hlo.hlo_module_from_text": lambda: jax_private.hlo_from_text(_HLO),
    "sharding_impls.num_addressable_indices": _use_indices,
    "xla_bridge.backends_are_initialized": jax_runtime.has_started,
}
# Without this name, an export that does not call LAPACK loads more slowly.
_DISPENSABLE = {"jax._src.export._export._ensure_backends_initialized"}


def test_every_name_is_used_here():
    assert {f"jax._src.{name}" for name in _USES} == jax_names.NAMES.keys() - _DISPENSABLE


@pytest.mark.parametrize("name", sorted(jax_names.NAMES))
def test_the_installed_jax_has_its_listed_names(name):
    (installed,) = versions.installed(["jax"]).values()
    is_tested = installed in {version for seen in jax_names.NAMES.values() for version in seen}
    assert jax_names.has(name) == (installed in jax_names.NAMES[name] or not is_tested)


@pytest.mark.parametrize("name", sorted(_USES))
def test_a_missing_name_ends_in_a_sentence(monkeypatch, name):
    name = f"jax._src.{name}"
    monkeypatch.setattr(versions, "installed", lambda packages: {"jax": "0.99.1"})
    monkeypatch.delattr(jax_names._owner(name), name.rpartition(".")[2])
    sentence = (
        f"jax 0.99.1 has no {name}, which jax 0.10.2 and 0.12.0.1 have: pip install 'jax>=0.1"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}[^ ]+ 'jaxlib>=0[^ ]+'[.]$"):
        _USES[name.removeprefix("jax._src.")]()


def test_a_missing_module_ends_in_a_sentence(monkeypatch):
    monkeypatch.delattr(jax._src, "hardware_utils")
    monkeypatch.setitem(sys.modules, "jax._src.hardware_utils", None)
    with pytest.raises(ValueError, match="has no jax._src.hardware_utils.has_visible_nvidia_gpu,"):
        jax_runtime.has_nvidia_gpu()


def test_a_program_runs_without_optional_names(monkeypatch):
    (name,) = _DISPENSABLE
    monkeypatch.delattr(jax_names._owner(name), name.rpartition(".")[2])
    with jax_private.loading_lapack_if_called(b""):
        assert not jax_names.has(name)


def test_all_private_names_are_in_the_table():
    for path in sorted(_LIBRARY.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            imported = []
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                imported = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Constant) and path.name != "jax_names.py":
                text = str(node.value)
                assert not text.startswith("jax._src") or text in jax_names.NAMES, (path, text)
            assert not [each for each in imported if each.startswith(("jax._src", "jaxlib"))], path
