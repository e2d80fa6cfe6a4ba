"""Exported weights: their files and index, partial reading, and damage."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from lingvo_gshard.checkpoints import checked_array, exported
from lingvo_gshard.checkpoints.warm_start import Rule, WarmStart
from lingvo_gshard.files import safetensors_file
from lingvo_gshard.sharding.layout import TensorSpec
from tests.checkpoints import in_memory

_SPECS = {
    "theta.gate": TensorSpec((4, 8), "float32", "M_"),
    "theta.layers[1].wi": TensorSpec((8, 4, 6), "float32", "EMH"),
    "theta.layers[1]": TensorSpec((3, 2, 8), "bfloat16", "RME"),
    "theta.scale": TensorSpec((), "float32", ""),
    "theta.wide": TensorSpec((2, 100), "int8", "MV"),
}
_PART_BYTES = 256


def _values(seed=0):
    rng = np.random.default_rng(seed)
    return {n: np.asarray(99 * rng.random(s.shape)).astype(s.dtype) for n, s in _SPECS.items()}


def _saved(values):
    """Returns the arrays as if they were a checkpoint's."""

    def failing(reason):
        return ValueError(f"damaged: {reason}")

    arrays = {}
    for name, spec in _SPECS.items():
        array = in_memory.array(values[name], spec.dims, name)
        saved = in_memory.saved_fingerprint(values[name], spec.dims)
        arrays[name] = dataclasses.replace(array, fingerprints=saved, damaged=failing)
    return arrays


def _write(folder, part_bytes=_PART_BYTES, seed=0, step=5):
    return exported.write(folder / "w.safetensors", _saved(_values(seed)), step, part_bytes)


def _read(path):
    return {name: array[()] for name, array in exported.read(path).items()}


def _same(found, values):
    assert found.keys() == values.keys()
    for name, array in values.items():
        assert found[name].dtype == array.dtype, name
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def _names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_small_export_is_one_file(tmp_path):
    path = _write(tmp_path, part_bytes=10**4)
    assert path == tmp_path / "w.safetensors" and _names(tmp_path) == ["w.safetensors"]
    _same(_read(path), _values())
    _same(load_file(path), _values())


def test_parts_have_an_index_that_the_safetensors_library_can_follow(tmp_path):
    path = _write(tmp_path)
    index = json.loads(path.read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"w-0000{i}-of-0000{len(files)}.safetensors" for i in range(1, len(files) + 1)]
    assert _names(tmp_path) == sorted([*files, "w.safetensors.index.json"])
    parts = {file: load_file(tmp_path / file) for file in files}
    for arrays in parts.values():
        assert 0 < sum(array.nbytes for array in arrays.values()) <= _PART_BYTES
    entries = {name: parts[file][name] for name, file in index["weight_map"].items()}
    assert len(entries) == sum(map(len, parts.values()))
    values = _values()
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in values.values())
    # Arrays are cut along the experts' dim; small arrays are whole.
    np.testing.assert_array_equal(
        entries["theta.layers[1].wi[0:2]"], values["theta.layers[1].wi"][:2]
    )
    np.testing.assert_array_equal(entries["theta.gate"], values["theta.gate"])
    _same(_read(path), values)


def test_an_array_that_is_larger_than_a_part_is_cut_along_its_experts_or_its_longest_dim(tmp_path):
    weight_map = json.loads(_write(tmp_path, 48).read_text())["weight_map"]
    assert {"theta.layers[1][:,:,0:4]", "theta.layers[1][:,:,4:8]"} <= weight_map.keys()
    assert {"theta.wide[:,0:20]", "theta.wide[:,80:100]", "theta.scale"} <= weight_map.keys()
    assert "theta.layers[1].wi[0:1]" in weight_map  # A single expert is not cut.
    _same(_read(tmp_path / "w.safetensors.index.json"), _values())


@pytest.mark.parametrize("before", [48, _PART_BYTES, 10**4])
@pytest.mark.parametrize("after", [_PART_BYTES, 10**4])
def test_a_new_export_replaces_the_old_one(tmp_path, before, after):
    _write(tmp_path, before, seed=1)
    path = _write(tmp_path, after)
    _same(_read(path), _values())
    held = {"w.safetensors"}
    if path.name.endswith(".json"):
        held = {path.name, *json.loads(path.read_text())["weight_map"].values()}
    assert set(_names(tmp_path)) == held


def test_a_files_name_is_not_a_pattern(tmp_path):
    """Only its own old files are deleted, and all of them."""
    neighbour = tmp_path / "w1-00001-of-00009.safetensors"
    neighbour.touch()
    path = tmp_path / "w[1]*.safetensors"
    exported.write(path, _saved(_values(1)), 5, part_bytes=_PART_BYTES)
    exported.write(path, _saved(_values(2)), 6, part_bytes=10**4)
    assert _names(tmp_path) == [neighbour.name, path.name]
    _same(_read(path), _values(2))


def test_parts_are_read_from_the_files_that_hold_them(tmp_path, monkeypatch):
    path = _write(tmp_path)
    read, opened = safetensors_file.read, []
    monkeypatch.setattr(safetensors_file, "read", lambda p: opened.append(p.name) or read(p))
    wi = exported.read(path)["theta.layers[1].wi"]
    assert opened == []
    found = wi[slice(3, 5), slice(1, 4), slice(2)]
    np.testing.assert_array_equal(found, _values()["theta.layers[1].wi"][3:5, 1:, :2])
    files = json.loads(path.read_text())["weight_map"]
    held = [files["theta.layers[1].wi[2:4]"], files["theta.layers[1].wi[4:6]"]]
    assert sorted(opened) == sorted(held)


def test_ranges_may_be_in_any_order(tmp_path):
    path = _write(tmp_path)
    index = json.loads(path.read_text())
    index["weight_map"] = dict(reversed(index["weight_map"].items()))
    path.write_text(json.dumps(index))
    _same(_read(path), _values())


def _change(path, find, place):
    """Flips a bit of the byte that is `place` bytes after the start of `find`."""
    data = bytearray(path.read_bytes())
    data[data.index(find) + place] ^= 1
    path.write_bytes(data)


def _file_of(path, entry):
    return path.parent / json.loads(path.read_text())["weight_map"][entry]


def test_a_changed_bit_is_found_in_parts_of_an_entry_too(tmp_path):
    path = _write(tmp_path, 10**4)
    wi = _values()["theta.layers[1].wi"]
    _change(path, wi[5].tobytes(), 7)
    arrays = exported.read(path)
    for index in ((), (slice(4, 7),), (slice(4, 7), slice(0, 1))):
        with pytest.raises(ValueError, match=r"damaged: theta.layers\[1\].wi .* experts \[5\]"):
            arrays["theta.layers[1].wi"][index]
    np.testing.assert_array_equal(arrays["theta.layers[1].wi"][(slice(0, 5),)], wi[:5])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path, file: file.unlink(), r"w-0000\d-of-.* is missing"),
        (
            lambda path, file: file.write_bytes(file.read_bytes()[:-9]),
            r"w-0000\d-of-.* or a damaged",
        ),
        (
            lambda path, file: save_file({"a": np.zeros(2)}, file, {"export": _export_of(path)}),
            r"w-0000\d-of-.* is damaged: it lacks theta.layers\[1\].wi\[2:4\]",
        ),
        (
            lambda path, file: file.write_bytes(_other(path.parent).read_bytes()),
            r"w-0000\d-of-.* is a part of another export than .*json; export again",
        ),
        (lambda path, file: path.write_text("{"), r"index.json is damaged: it does not describe"),
        (lambda path, file: path.write_text("[]"), r"index.json is damaged: it does not describe"),
        (
            lambda path, file: path.write_text(re.sub(r".*wi\[2:4\].*\n", "", path.read_text())),
            r"index.json is damaged: .*it is not what was written",
        ),
        (
            lambda path, file: path.write_text(path.read_text().replace('"theta.gate"', '"x"')),
            r"index.json is damaged: ",
        ),
        (lambda path, file: path.unlink(), r"No such file or directory: .*index.json"),
    ],
)
def test_parts_that_are_missing_damaged_or_foreign_are_named(tmp_path, damage, message):
    path = _write(tmp_path)
    damage(path, _file_of(path, "theta.layers[1].wi[2:4]"))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        _read(path)


def _export_of(path):
    return json.loads(path.read_text())["metadata"]["export"]


def _other(folder):
    """Returns another export's file with the same entry."""
    (folder / "other").mkdir()
    return _file_of(_write(folder / "other", seed=1), "theta.layers[1].wi[2:4]")


def test_a_single_part_is_not_an_export(tmp_path):
    path = _write(tmp_path)
    with pytest.raises(ValueError, match=r"only a part of an export; give its index, \*.index"):
        exported.read(_file_of(path, "theta.gate"))


def test_an_interrupted_export_does_not_look_complete(tmp_path, monkeypatch):
    path = _write(tmp_path, seed=1)
    write, count = safetensors_file.write, iter(range(2))

    def failing(*args):
        if next(count, None) is None:
            raise KeyboardInterrupt
        write(*args)

    monkeypatch.setattr(safetensors_file, "write", failing)
    with pytest.raises(KeyboardInterrupt):
        _write(tmp_path)
    assert not path.exists() and len(_names(tmp_path)) == 2
    for name in _names(tmp_path):
        with pytest.raises(ValueError, match="only a part of an export"):
            exported.read(tmp_path / name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "int8", "bool"])
def test_the_safetensors_library_agrees(tmp_path, dtype):
    """It reads our files, and we read its files."""
    values = np.arange(15).reshape(3, 5).astype(dtype)
    weights = {"a": np.array(3, np.int32), "b": values, "c": np.zeros((0, 2), np.float32)}
    safetensors_file.write(tmp_path / "ours", weights, {"step": "5"})
    metadata = safetensors_file.read(tmp_path / "ours").metadata
    save_file(weights, tmp_path / "theirs", metadata)
    for back in (load_file(tmp_path / "ours"), safetensors_file.read(tmp_path / "theirs").arrays):
        _same(back, weights)


def test_a_damaged_or_foreign_file_is_refused(tmp_path):
    path = tmp_path / "w.safetensors"
    with pytest.raises(ValueError, match="w.safetensors is missing"):
        exported.read(path)
    mean = {n: checked_array.mean([array] * 2) for n, array in _saved(_values()).items()}
    exported.write(path, mean, 5)
    _same(_read(path), _values())
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    with pytest.raises(ValueError, match="not a safetensors file of weights, or a damaged"):
        exported.read(path)
    path.write_bytes(whole[:-40] + bytes([whole[-40] ^ 1]) + whole[-39:])
    with pytest.raises(ValueError, match=r"damaged: theta.wide is not what was written"):
        _read(path)
    path.write_bytes(b"PK\x03\x04 no weights at all")
    with pytest.raises(ValueError, match="not a safetensors file of weights"):
        exported.read(path)
    save_file({"bert.pooler": np.zeros(3)}, path)
    with pytest.raises(ValueError, match="another program's file: .* it holds bert.pooler"):
        exported.read(path)


def test_a_run_begins_from_parts_as_from_one_file(tmp_path):
    values, rules = _values(), ((r"theta\.layers.*wi", Rule.COPY_EXPERTS), ("theta.*", Rule.SAME))
    mesh = Mesh(jax.devices(), ("d",))
    split = NamedSharding(mesh, PartitionSpec("d"))
    for part_bytes in (_PART_BYTES, 10**4):
        start = WarmStart(str(_write(tmp_path, part_bytes)), rules)
        new = jax.device_put(jnp.zeros((16, 4, 6)), split)
        found, _ = start.first_value("theta.layers[1].wi", "EMH", start.arrays(), new)
        assert found.sharding == split
        np.testing.assert_array_equal(found, np.tile(values["theta.layers[1].wi"], (2, 1, 1)))


def test_in_a_bucket_the_old_parts_are_gone_before_a_new_one_is_written(tmp_path, monkeypatch):
    _write(tmp_path, seed=1)
    found = []
    monkeypatch.setattr(exported.storage, "publish", lambda _: found.append(_names(tmp_path)))
    _write(tmp_path)
    assert found[0] == [] and len(found[-1]) > 1
