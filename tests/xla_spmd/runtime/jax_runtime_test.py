"""The available devices; processes_test.py tests several processes."""

import jax

from xla_spmd.runtime import jax_runtime


def test_attached_devices_are_counted_without_an_error():
    assert jax_runtime.num_tpu_chips() >= 0
    assert jax_runtime.has_nvidia_gpu() in (False, True)


def test_jax_has_started_once_its_devices_are_asked_for():
    jax.devices()
    assert jax_runtime.has_started()
