"""Safetensors files; tests/checkpoints/exported_test.py compares them with the library's own."""

import hashlib
import json
import weakref

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from lingvo_gshard.files import safetensors_file


def _arrays():
    return {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.array([True, False, True]),
        "c": np.arange(4).astype(ml_dtypes.bfloat16),
        "scalar": np.float32(2.5),
        "empty": np.zeros((0, 3), np.int32),
    }


def test_what_was_written_is_read_back(tmp_path):
    path = tmp_path / "w.safetensors"
    safetensors_file.write(path, _arrays(), {"step": "5"})
    contents = safetensors_file.read(path)
    assert contents.arrays.keys() == _arrays().keys()
    for name, array in _arrays().items():
        assert contents.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(contents.arrays[name], array)
        assert contents.arrays[name].ctypes.data % array.dtype.itemsize == 0
    digests = json.loads(contents.metadata.pop("sha256"))
    assert contents.metadata == {"step": "5"}
    assert digests["b"] == hashlib.sha256(_arrays()["b"].tobytes()).hexdigest()
    assert digests["b"] == safetensors_file.sha256(contents.arrays["b"])


def test_the_library_reads_the_same(tmp_path):
    path = tmp_path / "w.safetensors"
    safetensors_file.write(path, _arrays(), {})
    for name, array in load_file(path).items():
        assert array.dtype == _arrays()[name].dtype
        np.testing.assert_array_equal(array, _arrays()[name])


def test_one_array_at_a_time_is_in_memory(tmp_path):
    made = []

    class Array(np.ndarray):
        """An array that can be referred to weakly."""

    class Lazy:
        shape, dtype = (1000,), np.dtype("float32")

        def __array__(self, dtype=None, copy=None):
            assert all(earlier() is None for earlier in made)
            array = np.ones(self.shape, self.dtype).view(Array)
            made.append(weakref.ref(array))
            return array

    path = tmp_path / "w.safetensors"
    safetensors_file.write(path, {name: Lazy() for name in "abc"}, {})
    assert safetensors_file.read(path).arrays.keys() == {"a", "b", "c"}
    assert len(made) == 3


def test_a_failing_write_leaves_the_file(tmp_path):
    path = tmp_path / "w.safetensors"
    safetensors_file.write(path, _arrays(), {})
    content = path.read_bytes()

    class Failing:
        shape, dtype = (3,), np.dtype("float32")

        def __array__(self, dtype=None, copy=None):
            raise OSError("lost")

    with pytest.raises(OSError, match="lost"):
        safetensors_file.write(path, {"a": np.ones(2), "b": Failing()}, {})
    assert path.read_bytes() == content
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("length", [0, 5, 60, -1])
def test_a_file_that_was_cut_short_is_refused(tmp_path, length):
    path = tmp_path / "w.safetensors"
    safetensors_file.write(path, {"a": np.ones(4, np.float32)}, {})
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match="not a safetensors file of weights, or a damaged one"):
        safetensors_file.read(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="w.safetensors is missing"):
        safetensors_file.read(tmp_path / "w.safetensors")
