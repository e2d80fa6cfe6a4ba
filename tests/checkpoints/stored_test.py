"""What is read of a saved array: ranges, whole experts, parts and means; and its errors."""

import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lingvo_gshard.checkpoints import stored
from lingvo_gshard.checkpoints.fingerprints import fingerprint
from lingvo_gshard.checkpoints.stored import DamagedCheckpointError, SavedArray
from lingvo_gshard.sharding.layout import TensorSpec

_E, _M, _H = 8, 4, 6


class _File:
    """Stands for the file of one array; `reads` are the indices that were read from it."""

    def __init__(self, values, dims, has_fingerprints=True):
        self.values = values
        self.reads = []
        here = NamedSharding(Mesh(jax.devices()[:1], ("here",)), PartitionSpec())
        saved = fingerprint(jax.device_put(values, here), dims) if has_fingerprints else None
        spec = TensorSpec(values.shape, values.dtype.name, dims)
        self.array = SavedArray("theta.w", spec, saved, self._read, ValueError)

    def _read(self, index):
        self.reads.append(index)
        return self.values[index]


def _random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    ("index", "want"),
    [
        ((), (slice(0, 8, 1), slice(0, 4, 1))),
        ((slice(2, None),), (slice(2, 8, 1), slice(0, 4, 1))),
        ((slice(None), slice(1, 3)), (slice(0, 8, 1), slice(1, 3, 1))),
        ((slice(6, 20), slice(-1, None)), (slice(6, 8, 1), slice(3, 4, 1))),
        ((slice(None, None, 2),), (slice(0, 8, 2), slice(0, 4, 1))),
    ],
)
def test_an_index_has_a_slice_for_each_dim_in_numbers(index, want):
    assert stored.whole_slices(index, (8, 4)) == want


@pytest.mark.parametrize(
    ("dims", "shape", "wanted", "read_range", "within"),
    [
        # Experts come first: those of the range, each of them whole.
        (
            "EMH",
            (8, 4, 6),
            (slice(2, 5, 1), slice(1, 3, 1), slice(0, 6, 1)),
            (slice(2, 5, 1), slice(0, 4, 1), slice(0, 6, 1)),
            (slice(None), slice(1, 3, 1), slice(0, 6, 1)),
        ),
        # Experts are in the middle, and each second one is wanted.
        (
            "HEM",
            (6, 8, 4),
            (slice(0, 1, 1), slice(0, 8, 2), slice(0, 4, 1)),
            (slice(0, 6, 1), slice(0, 8, 2), slice(0, 4, 1)),
            (slice(0, 1, 1), slice(None), slice(0, 4, 1)),
        ),
        # A lowercase letter is the same dim, in the optimizer.
        (
            "eM",
            (8, 4),
            (slice(7, 8, 1), slice(0, 2, 1)),
            (slice(7, 8, 1), slice(0, 4, 1)),
            (slice(None), slice(0, 2, 1)),
        ),
        # Without experts, there is one fingerprint for everything.
        (
            "MH",
            (4, 6),
            (slice(1, 2, 1), slice(2, 4, 1)),
            (slice(0, 4, 1), slice(0, 6, 1)),
            (slice(1, 2, 1), slice(2, 4, 1)),
        ),
        ("", (), (), (), ()),
    ],
)
def test_the_range_that_makes_experts_whole(dims, shape, wanted, read_range, within):
    assert stored.whole_experts(wanted, dims, shape) == (read_range, within)

    # What is read, and then cut, is what was wanted.
    values = _random(*shape)
    np.testing.assert_array_equal(values[read_range][within], values[wanted])


def test_a_part_of_some_experts_is_cut_from_whole_ones():
    file = _File(_random(_E, _M, _H), "EMH")
    values = file.array[2:5, 1:3]
    np.testing.assert_array_equal(values, file.values[2:5, 1:3])
    assert file.reads == [(slice(2, 5, 1), slice(0, _M, 1), slice(0, _H, 1))]


def test_an_array_without_fingerprints_is_read_as_asked():
    file = _File(_random(_E, _M, _H), "EMH", has_fingerprints=False)
    values = file.array[2:5, 1:3]
    np.testing.assert_array_equal(values, file.values[2:5, 1:3])
    assert file.reads == [(slice(2, 5, 1), slice(1, 3, 1), slice(0, _H, 1))]


def test_damage_is_found_in_each_expert_that_is_read_and_in_no_other():
    file = _File(_random(_H, _E, _M), "HEM")
    file.values[0, 6, 0] += 1
    with pytest.raises(ValueError, match=r"^theta.w is not what was saved, in experts \[6\]$"):
        file.array[5:6, 4:7, 3:4]  # Not even where the element was changed.
    np.testing.assert_array_equal(file.array[:, 0:6], file.values[:, 0:6])


def test_damage_is_found_anywhere_in_an_array_without_experts():
    file = _File(_random(_M, _H), "MH")
    file.values[3, 5] += 1
    with pytest.raises(ValueError, match="theta.w is not what was saved"):
        file.array[0:1, :]


def test_a_scalar_is_an_array_of_one_element():
    file = _File(np.array(5, np.int32), "")
    assert np.asarray(file.array) == 5
    file.values = np.array(6, np.int32)
    with pytest.raises(ValueError, match="theta.w is not what was saved"):
        np.asarray(file.array)


def test_a_part_reads_its_range_alone_and_checks_it():
    file = _File(_random(_H, _E, _M), "HEM")
    part = file.array.part(1, 2, 4)
    assert (part.shape, part.num_bytes, file.reads) == ((_H, 2, _M), 4 * _H * 2 * _M, [])
    np.testing.assert_array_equal(np.asarray(part), file.values[:, 2:4])
    assert file.reads == [(slice(0, _H, 1), slice(2, 4, 1), slice(0, _M, 1))]

    file.values[0, 3, 0] += 1
    with pytest.raises(ValueError, match=r"in experts \[3\]"):
        np.asarray(part)


def test_a_mean_is_computed_in_float64_of_parts_that_are_checked():
    files = [_File(np.full((4, 3), value, "bfloat16"), "EM") for value in (256, 1, 1)]
    mean = stored.mean([file.array for file in files])
    assert mean.dtype == "bfloat16" and mean.shape == (4, 3)
    # 258 / 3 = 86. A sum in bfloat16, which has no 257, would stay at 256.
    np.testing.assert_array_equal(mean[1:3, :], np.full((2, 3), 86, "bfloat16"))

    files[1].values[2, 0] = 2
    np.testing.assert_array_equal(mean[0:2, :], np.full((2, 3), 86, "bfloat16"))
    with pytest.raises(ValueError, match=r"in experts \[2\]"):
        mean[1:3, :]


def test_arrays_are_placed_by_their_names(tmp_path):
    mesh = jax.make_mesh((4,), ("x",))
    files = {name: _File(_random(8, 3, seed=seed), "EM") for seed, name in enumerate("ab")}
    split = NamedSharding(mesh, PartitionSpec("x"))
    shardings = {"b": split, "a": NamedSharding(mesh, PartitionSpec())}
    placed = stored.placed({name: file.array for name, file in files.items()}, shardings)
    assert list(placed) == ["b", "a"] and placed["b"].sharding == split
    for name, file in files.items():
        np.testing.assert_array_equal(placed[name], file.values)


@pytest.mark.parametrize(("budget", "most"), [(1000, 3), (100, 1)])
def test_only_so_many_bytes_are_read_at_a_time(monkeypatch, budget, most):
    """Four arrays of 320 bytes; with a smaller budget each is read alone."""
    monkeypatch.setattr(stored, "_BYTES_AT_ONCE", budget)
    lock = threading.Lock()
    reading = 0
    seen = []
    here = NamedSharding(Mesh(jax.devices()[:1], ("here",)), PartitionSpec())

    def read(index):
        nonlocal reading
        with lock:
            reading += 1
            seen.append(reading)
        time.sleep(0.05)
        with lock:
            reading -= 1
        return np.zeros((8, 10), np.float32)[index]

    spec = TensorSpec((8, 10), "float32", "MH")
    arrays = {name: SavedArray(name, spec, None, read, ValueError) for name in "abcd"}
    placed = stored.placed(arrays, dict.fromkeys(arrays, here))
    assert list(placed) == list("abcd")
    assert len(seen) == 4 and max(seen) <= most


def test_the_first_line_of_an_error_is_short():
    error = ValueError('NOT_FOUND: Error reading "a/b" [tensorstore_spec=\'{"driver": ...\nmore')
    assert stored.first_line(error) == 'NOT_FOUND: Error reading "a/b"'
    assert stored.first_line(ValueError("one\ntwo")) == "one"
    assert stored.first_line(KeyError()) == "KeyError()"


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
