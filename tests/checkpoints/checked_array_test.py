"""Saved arrays: the experts and parts that are read, their views, and the damage that is found.

E experts, R blocks, M model, H hidden, V vocabulary.
"""

import threading
import time

import numpy as np
import pytest
import tensorstore

from lingvo_gshard.checkpoints import checked_array
from lingvo_gshard.checkpoints.checked_array import computed_view
from tests.checkpoints import in_memory
from tests.checkpoints.in_memory import File

_E, _M, _H = 8, 4, 6


def _random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("has_fingerprints", [True, False])
@pytest.mark.parametrize(
    "index",
    [(), np.s_[2:5, 1:3], np.s_[-1:, :], np.s_[1:20, :, ::2], np.s_[3:3, :], np.s_[:, 1:2, 0:1]],
)
def test_an_array_is_indexed_as_numpy_does(index, has_fingerprints):
    file = File(_random(_E, _M, _H), "EMH", has_fingerprints=has_fingerprints)
    np.testing.assert_array_equal(file.array[index], file.values[index])


@pytest.mark.parametrize(
    ("dims", "shape", "index", "reads"),
    [
        # Experts come first. The range's experts are read, each of them whole.
        ("EMH", (8, 4, 6), np.s_[2:4, 1:3], [np.s_[2:3, 0:4, 0:6], np.s_[3:4, 0:4, 0:6]]),
        # Experts are in the middle, and each second one is wanted.
        ("HEM", (6, 8, 4), np.s_[0:1, 4:8:2], [np.s_[0:6, 4:5, 0:4], np.s_[0:6, 6:7, 0:4]]),
        # A lowercase letter is the same dim, in the optimizer.
        ("eM", (8, 4), np.s_[7:8, 0:2], [np.s_[7:8, 0:4]]),
        # An expert is read in all blocks of a stack, since these have one fingerprint.
        ("REM", (2, 8, 4), np.s_[1:2, 3:4], [np.s_[0:2, 3:4, 0:4]]),
        # Without experts, there is one fingerprint for everything.
        ("MH", (4, 6), np.s_[1:2, 2:4], [np.s_[0:4, 0:6]]),
        ("", (), (), [()]),
    ],
)
def test_whole_experts_are_read_to_check_them(monkeypatch, dims, shape, index, reads):
    file = File(_random(*shape), dims)
    checked = []
    read_experts = checked_array.CheckedArray._read_experts

    def noted(array, index, values):
        checked.append(index)
        read_experts(array, index, values)

    monkeypatch.setattr(checked_array.CheckedArray, "_read_experts", noted)
    np.testing.assert_array_equal(file.array[index], file.values[index])
    assert sorted(checked, key=str) == sorted(reads, key=str)


def test_damage_is_found_in_exactly_the_experts_that_are_read():
    file = File(_random(_H, _E, _M), "HEM")
    file.values[0, 6, 0] += 1
    with pytest.raises(ValueError, match=r"^theta.w is not what was saved, in experts \[6\]$"):
        file.array[5:6, 4:7, 3:4]  # Not even where the element was changed.
    np.testing.assert_array_equal(file.array[:, 0:6], file.values[:, 0:6])


@pytest.mark.parametrize("chunk_shape", [(_H, 1, _M), (_H, 3, _M)])
def test_a_range_of_experts_names_damage_by_the_whole_arrays_numbers(chunk_shape):
    file = File(_random(_H, _E, _M), "HEM", chunk_shape=chunk_shape)
    some = file.array.experts(1, 8).experts(2, 7)  # Experts 3 to 7.
    np.testing.assert_array_equal(some, file.values[:, 3:8])
    np.testing.assert_array_equal(some[:, 1:3], file.values[:, 4:6])
    file.values[0, 6, 0] += 1
    again = file.array.experts(3, 8)
    with pytest.raises(ValueError, match=r"^theta.w is not what was saved, in experts \[6\]$"):
        again[()]
    np.testing.assert_array_equal(again[:, 0:3], file.values[:, 3:6])


def test_whole_experts_are_checked_without_a_copy_in_the_cache(monkeypatch):
    monkeypatch.setattr(checked_array, "computed_view", None)
    file = File(_random(_E, _M, _H), "EMH", chunk_shape=(4, _M, _H))
    for index in ((), np.s_[4:8, :], np.s_[0:4, :, :]):
        np.testing.assert_array_equal(file.array[index], file.values[index])
    with pytest.raises(TypeError, match="not callable"):
        file.array[1:4, :]  # A chunk is cut.


def test_damage_is_found_anywhere_in_an_array_without_experts():
    file = File(_random(_M, _H), "MH")
    file.values[3, 5] += 1
    with pytest.raises(ValueError, match="theta.w is not what was saved"):
        file.array[0:1, :]


def test_damage_is_found_in_large_experts():
    """Which are hashed part by part."""
    file = File(_random(2, 3, 300_000), "EMH", chunk_shape=(1, 3, 300_000))
    file.values[1, 2, -1] += 1
    np.testing.assert_array_equal(file.array[0:1, 2:], file.values[0:1, 2:])
    with pytest.raises(ValueError, match=r"experts \[1\]"):
        file.array[:, 0:1]


@pytest.mark.parametrize("code", ["NOT_FOUND", "DATA_LOSS", "PERMISSION_DENIED", "theta"])
def test_a_cut_or_missing_file_is_damage_but_a_refused_permission_is_not(code):
    def failing(index, values):
        raise OSError(f'{code}: Error reading "a/b" [tensorstore_spec=...')

    class DamageError(ValueError):
        """Made by `damaged`."""

    array = in_memory.array(_random(2, 3), "EM")
    view = computed_view(failing, array.shape, array.dtype)
    bad = checked_array.CheckedArray("w", array.spec, lambda: view, None, DamageError)
    is_damage = code in ("NOT_FOUND", "DATA_LOSS")
    with pytest.raises(DamageError if is_damage else OSError, match=f'^{code}: .* reading "a/b"'):
        bad[()]


def test_experts_that_the_files_store_together_are_read_once():
    """A part of two chunks, and then others of its experts."""
    file = File(_random(_H, _E, _M), "HEM", chunk_shape=(_H, 3, _M))
    np.testing.assert_array_equal(file.array[:1, 1:4], file.values[:1, 1:4])
    np.testing.assert_array_equal(file.array[2:, 5:6, 1:2], file.values[2:, 5:6, 1:2])
    assert sorted(index[1].start for index in file.reads) == [0, 3]


def test_a_scalar_is_an_array_of_one_element():
    file = File(np.array(5, np.int32), "")
    assert np.asarray(file.array) == 5
    file = File(np.array(5, np.int32), "")
    file.values = np.array(6, np.int32)
    with pytest.raises(ValueError, match="theta.w is not what was saved"):
        np.asarray(file.array)


def test_a_part_reads_and_checks_only_its_range():
    file = File(_random(_H, _E, _M), "HEM", chunk_shape=(_H, 1, _M))
    part = file.array.indexed(np.s_[:, 2:4])
    assert (part.shape, part.num_bytes, file.reads) == ((_H, 2, _M), 4 * _H * 2 * _M, [])
    file.values[0, 3, 0] += 1
    np.testing.assert_array_equal(part[1:2, :1], file.values[1:2, 2:3])
    with pytest.raises(ValueError, match=r"in experts \[3\]"):
        np.asarray(part)
    assert {index[1].start for index in file.reads} == {2, 3}


@pytest.mark.parametrize(
    ("expression", "dims"),
    [
        (tensorstore.d[1][3:6], "EHM"),
        (tensorstore.d[2][tensorstore.newaxis], "EH_M"),
        (2, "HM"),
        (tensorstore.d[2][[3, 0, 0]], "EHM"),
        (np.s_[:, 5, 1:], "EM"),
    ],
)
def test_indexed_arrays_have_their_shapes(expression, dims):
    file = File(_random(_E, _H, _M), "EHM")
    want = tensorstore.array(file.values)[expression].read().result()
    found = file.array.indexed(expression, dims)
    assert (found.shape, found.spec.dims) == (want.shape, dims)
    np.testing.assert_array_equal(np.asarray(found), want)


@pytest.mark.parametrize("index", [(), np.s_[1:3, 4:7], np.s_[6:8, :], np.s_[3:7, 5:9]])
def test_padding_is_zeros(index):
    file = File(_random(5, 6), "EM", has_fingerprints=False)
    padded = np.pad(file.values, [(0, 3), (0, 3)])
    np.testing.assert_array_equal(file.array.read_padded(index, (8, 9)), padded[index])


def test_a_mean_is_computed_in_float64_from_checked_parts():
    files = [File(np.full((4, 3), value, "bfloat16"), "EM") for value in (256, 1, 1)]
    files[1].values[2, 0] = 2
    mean = checked_array.mean([file.array for file in files])
    assert mean.dtype == "bfloat16" and mean.shape == (4, 3)
    # 258 / 3 = 86. A sum in bfloat16, which lacks 257, would stay at 256.
    np.testing.assert_array_equal(mean[0:2, :], np.full((2, 3), 86, "bfloat16"))
    with pytest.raises(ValueError, match=r"in experts \[2\]"):
        mean[1:3, :]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_is_refused_by_name(bad):
    """Only where the part that is read has such numbers; damage is reported as damage."""
    values = _random(_E, _M, _H)
    values[2, 1, :3] = bad
    file = File(values, "EMH")
    np.testing.assert_array_equal(file.array[3:, :], values[3:])
    with pytest.raises(ValueError, match="^the weights: theta.w has 3 numbers that are not finite"):
        file.array[1:3, :]

    file = File(values, "EMH")
    file.values = values * 2
    with pytest.raises(ValueError, match="theta.w is not what was saved, in experts"):
        file.array[1:3, :]

    # Other arrays, such as the slots of an optimizer, are not weights.
    slot = in_memory.array(values, "EMH", "slots.theta.w.m")
    np.testing.assert_array_equal(slot[2:3, :], values[2:3])


def test_chunks_are_computed_one_at_a_time_and_views_of_views_do_not_wait_for_each_other():
    """Also where there are more views than threads for TensorStore's own work."""
    lock = threading.Lock()
    running = 0
    most = 0

    def read(index, values):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        with lock:
            running -= 1
        values[...] = index[0].start

    view = computed_view(read, (6, 5), np.float32, (1, 5))
    for _ in range(40):
        inner = view

        def outer(index, values, inner=inner):
            values[...] = inner[index].read().result()

        view = computed_view(outer, (6, 5), np.float32, (1, 5))
    values = tensorstore.stack([view, view]).read().result()
    np.testing.assert_array_equal(values, np.tile(np.arange(6)[:, None], (2, 1, 5)))
    assert most == 1


def test_several_views_of_an_expert_read_it_once():
    """All blocks of a stack, each of which needs the expert whole, are read together."""
    file = File(_random(3, 2, _M), "REM", chunk_shape=(3, 1, _M))
    read = file._read
    file._read = lambda index, values: time.sleep(0.2) or read(index, values)
    blocks = tensorstore.stack([file.array.checked[r] for r in (2, 0, 1)])
    np.testing.assert_array_equal(blocks.read().result(), file.values[[2, 0, 1]])
    assert len(file.reads) == 2
