"""Weights in one file: there and back, damaged, and another program's."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lingvo_gshard.core import safetensors_file
from lingvo_gshard.train import weights_file


def _random(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def test_weights_go_through_one_file(tmp_path):
    weights = {"theta.b": _random(2, 3), "theta.a": np.array(7, np.int32)}
    weights_file.write(tmp_path / "w.safetensors", weights, step=5)
    back = weights_file.read(tmp_path / "w.safetensors")
    assert back.keys() == weights.keys()
    for name, array in weights.items():
        assert back[name].dtype == array.dtype
        np.testing.assert_array_equal(back[name], array)
    assert weights_file.summary(back).splitlines() == [
        "theta.a        int32[]",
        "theta.b  float32[2, 3]",
        "2 tensors, 7 weights",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "int8", "bool"])
def test_the_safetensors_library_agrees(tmp_path, dtype):
    """It reads what is written here, and the other way round."""
    weights = {"a": np.array(3, np.int32), "b": _random(3, 5).astype(dtype), "c": _random(0, 2)}
    weights_file.write(tmp_path / "ours", weights, step=5)
    metadata = safetensors_file.read(tmp_path / "ours").metadata
    save_file(weights, tmp_path / "theirs", metadata)
    for back in (load_file(tmp_path / "ours"), weights_file.read(tmp_path / "theirs")):
        assert back.keys() == weights.keys()
        for name, array in weights.items():
            assert back[name].dtype == array.dtype and back[name].shape == array.shape
            np.testing.assert_array_equal(back[name], array)


def test_a_damaged_or_foreign_file_is_refused(tmp_path):
    path = tmp_path / "w.safetensors"
    with pytest.raises(FileNotFoundError, match="w.safetensors: there is no such file"):
        weights_file.read(path)
    weights_file.write(path, {"theta.b": _random(20, 30)}, step=5)
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    with pytest.raises(ValueError, match="not a safetensors file of weights, or a damaged"):
        weights_file.read(path)
    path.write_bytes(whole[:-40] + bytes([whole[-40] ^ 1]) + whole[-39:])
    with pytest.raises(ValueError, match="damaged: theta.b is not what was written"):
        weights_file.read(path)
    path.write_bytes(b"PK\x03\x04 no weights at all")
    with pytest.raises(ValueError, match="not a safetensors file of weights"):
        weights_file.read(path)
    save_file({"bert.pooler": _random(3)}, path)
    with pytest.raises(ValueError, match="another program's file: .* it holds bert.pooler"):
        weights_file.read(path)
