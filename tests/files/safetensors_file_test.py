"""Safetensors files; tests/checkpoints/exported_test.py compares them with the library's own."""

import hashlib
import json
import weakref

import ml_dtypes
import numpy as np
import pytest

from lingvo_gshard.files import safetensors_file


def _arrays():
    return {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.array([True, False, True]),
        "c": np.arange(4).astype(ml_dtypes.bfloat16),
        "scalar": np.float32(2.5),
        "empty": np.zeros((0, 3), np.int32),
    }


def test_written_arrays_are_read_back(tmp_path):
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


def test_one_array_at_a_time_is_in_memory(tmp_path):
    made = []

    class Array(np.ndarray):
        """An array to which weak references are possible."""

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


def test_spans_read_any_rows_and_check_digests(tmp_path):
    path = tmp_path / "w.safetensors"
    safetensors_file.write(path, _arrays(), {})
    spans = safetensors_file.read(path).spans
    assert spans.keys() == _arrays().keys()
    for name, array in _arrays().items():
        assert (spans[name].dtype, spans[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(spans[name].read(), array)
        spans[name].check()
    np.testing.assert_array_equal(spans["b"].read(1, 2), _arrays()["b"][1:])

    content = bytearray(path.read_bytes())
    content[spans["b"].offset + 5] ^= 4
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"w\.safetensors is damaged: the tensor at byte \d+ does"):
        spans["b"].check()
    path.write_bytes(content[: spans["b"].offset + 8])
    with pytest.raises(ValueError, match=r"w\.safetensors is damaged: it ends too early\.$"):
        spans["b"].read()


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, r"an array of \[2\] at 0 to 4"),
        ({"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}, "it has .* should have"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}, r"an array of \[1\] at -4 to 0"),
        ({"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}, "F99"),
    ],
)
def test_arrays_outside_of_the_file_are_refused(tmp_path, entry, message):
    header = json.dumps({"a": entry}).encode()
    path = tmp_path / "w.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ValueError, match=f"or a damaged one .*{message}"):
        safetensors_file.read(path)


@pytest.mark.parametrize(
    ("length", "header", "message"),
    [
        (2**62, b"{}", "a header of 4611686018427387904 bytes"),
        (900_000, b"[" * 900_000, "it is nested too deeply"),
    ],
)
def test_headers_are_bounded(tmp_path, length, header, message):
    path = tmp_path / "w.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match=message):
        safetensors_file.read(path)


def test_arrays_may_keep_their_order(tmp_path):
    path = tmp_path / "w.safetensors"
    arrays = {name: np.ones(2, np.float32) for name in "cab"}
    safetensors_file.write(path, arrays, {}, in_order=True)
    offsets = {name: span.offset for name, span in safetensors_file.read(path).spans.items()}
    assert sorted(offsets, key=offsets.__getitem__) == ["c", "a", "b"]
