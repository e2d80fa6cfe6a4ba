"""Arrays that are placed on devices, and errors that all processes raise."""

import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lingvo_gshard.checkpoints import stored
from lingvo_gshard.checkpoints.checked_array import CheckedArray, computed_view
from lingvo_gshard.checkpoints.stored import DamagedCheckpointError
from lingvo_gshard.sharding.layout import TensorSpec
from lingvo_gshard.spmd.padded import PaddedArray
from tests.checkpoints.in_memory import File


def _random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_arrays_are_placed_by_their_names(tmp_path):
    mesh = jax.make_mesh((4,), ("x",))
    files = {name: File(_random(8, 3, seed=seed), "EM") for seed, name in enumerate("ab")}
    split = NamedSharding(mesh, PartitionSpec("x"))
    shardings = {"b": split, "a": NamedSharding(mesh, PartitionSpec())}
    placed = stored.placed({name: file.array for name, file in files.items()}, shardings)
    assert list(placed) == ["b", "a"] and placed["b"].sharding == split
    for name, file in files.items():
        np.testing.assert_array_equal(placed[name], file.values)


@pytest.mark.parametrize(("budget", "most"), [(1000, 3), (100, 1)])
def test_reading_is_limited_to_a_number_of_bytes(monkeypatch, budget, most):
    """There are four arrays of 320 bytes. With a smaller budget, each is read alone."""
    monkeypatch.setattr(stored, "_BYTES_AT_ONCE", budget)
    lock = threading.Lock()
    reading = 0
    seen = []
    here = NamedSharding(Mesh(jax.devices()[:1], ("here",)), PartitionSpec())

    def read(index, values):
        nonlocal reading
        with lock:
            reading += 1
            seen.append(reading)
        time.sleep(0.05)
        with lock:
            reading -= 1
        values[...] = 0

    def view():
        return computed_view(read, (8, 10), np.float32)

    spec = TensorSpec((8, 10), "float32", "MH")
    arrays = {name: CheckedArray(name, spec, view) for name in "abcd"}
    placed = stored.placed(arrays, dict.fromkeys(arrays, here))
    assert list(placed) == list("abcd")
    assert len(seen) == 4 and max(seen) <= most


@pytest.mark.parametrize("num_devices", [1, 4])
def test_weights_on_devices_are_counted_once(num_devices):
    """An array is split along one axis of the mesh, with padding, and copied along the other."""
    mesh = Mesh(np.array(jax.devices()[:num_devices]).reshape(-1, 1), ("d", "e"))
    values = _random(6, 3)
    values[[1, 5], 0] = np.nan
    values[3, 2] = np.inf
    split = NamedSharding(mesh, PartitionSpec("d"))
    padded_values = np.pad(values, [(0, 2), (0, 0)])
    arrays = {
        "step": jax.device_put(np.float32(np.nan), NamedSharding(mesh, PartitionSpec())),
        "theta.copied": jax.device_put(values[:2], NamedSharding(mesh, PartitionSpec())),
        "theta.split": PaddedArray(jax.device_put(padded_values, split), values.shape),
        "theta.whole": jax.device_put(_random(8, 2), split),
    }
    with pytest.raises(ValueError, match=r"^RUN: theta\.copied has 1 number .* another weight"):
        stored.check_finite("RUN", arrays)
    del arrays["theta.copied"]
    with pytest.raises(ValueError, match=r"^RUN: theta\.split has 3 numbers .*infinite\)\.$"):
        stored.check_finite("RUN", arrays)
    del arrays["theta.split"]
    stored.check_finite("RUN", arrays)


@pytest.mark.parametrize(
    ("votes", "message"),
    [([0], None), ([3], "run/7: the checkpoint is damaged: process 2 names the file.")],
)
def test_every_process_learns_who_found_damage(tmp_path, monkeypatch, votes, message):
    monkeypatch.setattr(stored.processes, "largest", lambda own: votes)
    path = tmp_path / "run/7"
    if message is None:
        assert stored.in_all_processes(path, lambda: "read") == "read"
    else:
        with pytest.raises(DamagedCheckpointError, match=message):
            stored.in_all_processes(path, lambda: "read")
