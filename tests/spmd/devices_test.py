"""A process's devices are found, described, or refused in one line."""

import os
import subprocess
import sys
import types

import jax
import pytest

from lingvo_gshard.spmd import devices, processes
from xla_spmd.runtime import environment, jax_runtime


@pytest.mark.parametrize(
    ("chips", "gpu", "found"), [(4, False, "tpu"), (0, True, "cuda"), (0, False, "cpu")]
)
def test_accelerators_come_before_the_cpu(monkeypatch, chips, gpu, found):
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setattr(jax_runtime, "num_tpu_chips", lambda: chips)
    monkeypatch.setattr(jax_runtime, "has_nvidia_gpu", lambda: gpu)
    assert devices.find() == found


def test_the_users_variable_decides(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert devices.find() is None


class _Gpu:
    platform, device_kind = "gpu", "NVIDIA H100 80GB HBM3"


def test_devices_are_described(monkeypatch):
    monkeypatch.setattr(environment, "num_cores", lambda: 2)
    assert devices.start() == (8, "8 virtual CPU devices on 2 cores")
    monkeypatch.setattr(environment, "num_cores", lambda: 1)
    monkeypatch.setattr(jax, "devices", lambda: jax.local_devices()[:1])
    assert devices.start() == (1, "1 virtual CPU device on 1 core")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    monkeypatch.setattr(jax, "devices", lambda: [_Gpu()] * 8)
    assert devices.start() == (8, "8 x NVIDIA H100 80GB HBM3")


def test_cpu_devices_share_the_memory_of_their_host(monkeypatch):
    monkeypatch.setattr(environment, "memory_bytes", lambda: 2**34 + 5)
    assert devices.memory_bytes() == 2**31
    monkeypatch.setattr(processes, "num_on_host", lambda: 2)
    assert devices.memory_bytes() == 2**30


def test_an_accelerator_reports_its_memory(monkeypatch):
    gpu = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3")
    gpu.memory_stats = lambda: {"bytes_limit": 3 * 2**20 + 17}
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    monkeypatch.setattr(processes, "of_first", lambda value: value)
    assert devices.memory_bytes() == 3 * 2**20
    gpu.memory_stats = lambda: None
    with pytest.raises(ValueError, match="^NVIDIA H100 80GB HBM3 reports no bytes_limit"):
        devices.memory_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_a_platform_without_a_device_is_refused(platform):
    code = f"""
from xla_spmd.runtime import environment
environment.prepare(2, {platform!r})
from lingvo_gshard.spmd import devices
try:
    devices.start()
except ValueError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.startswith(f"--platform={platform}: JAX finds no such device here (")
    assert run.stdout.count("\n") == 1 and "`make setup-cuda12`" in run.stdout


@pytest.mark.slow
def test_the_error_names_the_variable_that_chose_the_platform_and_the_plugins_reason():
    code = """
import logging
from lingvo_gshard.spmd import devices
devices.prepare("auto", 1)
import jax
def finds_the_cpu_alone():
    try:
        raise RuntimeError("Unable to load cuDNN.")
    except RuntimeError:
        logging.getLogger(devices._PLUGINS_LOGGER).exception("plugin")
    return [Cpu()]
class Cpu:
    platform = device_kind = "cpu"
jax.devices = finds_the_cpu_alone
try:
    devices.start()
except ValueError as error:
    print(error)
"""
    env = os.environ | {"JAX_PLATFORMS": "cuda,cpu", "XLA_FLAGS": ""}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    line = "JAX_PLATFORMS=cuda: JAX finds no such device here (only cpu; Unable to load cuDNN.)"
    assert run.stdout.startswith(line), run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.slow
def test_a_platform_that_jax_does_not_know_needs_no_package():
    code = """
from lingvo_gshard.spmd import devices
devices.prepare("auto", 1)
try:
    devices.start()
except ValueError as error:
    print(error)
"""
    env = os.environ | {"JAX_PLATFORMS": "gup", "XLA_FLAGS": ""}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    line = "JAX_PLATFORMS=gup: JAX knows no such platform; expected cpu, cuda or tpu. Unset it to "
    assert run.stdout.startswith(line) and run.stdout.count("\n") == 1, run.stderr


def test_too_few_devices_and_idle_ones_of_other_processes_are_refused(monkeypatch):
    assert devices.start(2)[0] == 2
    with pytest.raises(ValueError, match="--num_partitions=9: there are only 8 virtual CPU dev"):
        devices.start(9)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="=4: expected all of the 8 virtual .* in 2 proc"):
        devices.start(4)


def test_a_model_of_the_paper_needs_to_be_asked_for_on_a_cpu():
    devices.check_model("toy.MoE8E4L", "auto")
    devices.check_model("m4.MoE128E12L", "cpu")
    with pytest.raises(ValueError, match=r"m4.MoE128E12L is made for accelerators, .*platform=cpu"):
        devices.check_model("m4.MoE128E12L", "auto")


@pytest.mark.slow
def test_tensorflow_leaves_gpus_alone_before_it_starts():
    code = """
from xla_spmd.runtime import environment
environment.prepare(1)
import tensorflow as tf
from tensorflow.python.eager import context
def hiding(devices, kind):
    print(devices, kind, context.context()._initialized)
    raise SystemExit
tf.config.set_visible_devices = hiding
from lingvo_gshard.spmd import lowering
lowering.export(None, None)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == "[] GPU False\n", run.stderr
