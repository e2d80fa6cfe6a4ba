"""Whole, cut short, damaged, and another model's checkpoints."""

import jax
import numpy as np
import pytest

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.partitioning import Partitioning, TensorSpec
from lingvo_gshard.spmd import specs
from lingvo_gshard.train.checkpoints import About, Checkpoints
from lingvo_gshard.train.retention import Retention

_SPEC = NestedMap(
    step=TensorSpec((), "int32", ""),
    layers=[
        NestedMap(w=TensorSpec((8, 3), "float32", "EM")),
        NestedMap(w=TensorSpec((5, 3), "bfloat16", "HM")),
    ],
)


def _shardings(num_partitions):
    parts = Partitioning.from_dict(Mesh.flat(num_partitions), {"E": "d"})
    return specs.shardings(parts, _SPEC, specs.device_mesh(parts))


def _state(step, num_partitions=4):
    rng = np.random.default_rng(step)
    placed = zip(_SPEC.Flatten(), _shardings(num_partitions).Flatten(), strict=True)
    return _SPEC.Pack(
        jax.device_put((9 * rng.random(spec.shape)).astype(spec.dtype), sharding)
        for spec, sharding in placed
    )


def _open(folder, num_partitions=4, **retention):
    """The checkpoints of a folder, to save in."""
    parts = Partitioning.from_dict(Mesh.flat(num_partitions), {"E": "d"})
    return Checkpoints(folder, About("task.dim : 3", parts, _SPEC), Retention(**retention))


def _same(a, b):
    for (path, x), y in zip(a.FlattenItems(), b.Flatten(), strict=True):
        assert x.dtype == y.dtype, path
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=path)


def test_restores_what_was_saved_on_any_number_of_devices(tmp_path):
    with _open(tmp_path) as saved:
        saved.save(7, _state(7), {"index": 70, "names": ["a"]})
    for num_partitions in (1, 2, 8):
        with _open(tmp_path) as saved:
            restored = saved.restore(7, _SPEC, _shardings(num_partitions))
        state = restored.state
        _same(state, _state(7))
        assert restored.input_state == {"index": 70, "names": ["a"]}
        assert len(state.layers[0].w.addressable_shards) == num_partitions
        assert state.layers[0].w.addressable_shards[0].data.shape == (8 // num_partitions, 3)


def test_keeps_the_newest(tmp_path):
    with _open(tmp_path, keep_max=2) as saved:
        assert saved.latest() is None
        for step in (3, 5, 12, 100):
            saved.save(step, _state(step), {})
        saved.wait()
        assert saved.steps() == [12, 100] and saved.latest() == 100


def test_a_checkpoint_cut_short_is_no_checkpoint(tmp_path):
    with _open(tmp_path) as saved:
        saved.save(1, _state(1), {})
        saved.save(2, _state(2), {})
    (tmp_path / "checkpoints/2/digests.json").unlink()
    with _open(tmp_path) as saved:
        assert saved.steps() == [1]
        with pytest.raises(ValueError, match="checkpoints/2: no whole checkpoint"):
            saved.restore(2, _SPEC, _shardings(1))
        saved.save(2, _state(20), {"again": 1})
        saved.wait()
        restored = saved.restore(2, _SPEC, _shardings(1))
    assert restored.input_state == {"again": 1}
    _same(restored.state, _state(20))


def _largest_file(folder):
    files = [file for file in (folder / "state").rglob("*") if file.is_file()]
    return max(files, key=lambda file: file.stat().st_size)


def _flip_a_bit(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: _flip_a_bit(_largest_file(folder)), "damaged: state/.* was changed"),
        (lambda folder: _largest_file(folder).unlink(), "damaged: state/.* is missing"),
        (lambda folder: (folder / "state/more").touch(), "damaged: state/more was changed"),
        (lambda folder: (folder / "digests.json").write_text("{"), "digests.json is no list"),
    ],
)
def test_damage_is_found(tmp_path, damage, message):
    with _open(tmp_path) as saved:
        saved.save(4, _state(4), {})
        saved.wait()
        damage(tmp_path / "checkpoints/4")
        with pytest.raises(ValueError, match=message):
            saved.restore(4, _SPEC, _shardings(1))


def _with_first_layer(spec):
    return NestedMap(_SPEC, layers=[NestedMap(w=spec), _SPEC.layers[1]])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            _with_first_layer(TensorSpec((8, 4), "float32", "EM")),
            r"layers\[0\].w is float32\[8, 3\] in the checkpoint, float32\[8, 4\] in the model",
        ),
        (
            _with_first_layer(TensorSpec((8, 3), "bfloat16", "EM")),
            r"layers\[0\].w is float32\[8, 3\] in the checkpoint, bfloat16\[8, 3\]",
        ),
        (
            NestedMap(_SPEC, bias=TensorSpec((2,), "float32", "M")),
            r"bias is absent in the checkpoint, float32\[2\] in the model",
        ),
        (
            NestedMap(step=_SPEC.step, layers=_SPEC.layers[:1]),
            r"layers\[1\].w is bfloat16\[5, 3\] in the checkpoint, absent in the model",
        ),
    ],
)
def test_another_models_checkpoint_names_the_weight(tmp_path, spec, message):
    parts = Partitioning.from_dict(Mesh.flat(2), {"E": "d"})
    with _open(tmp_path) as saved:
        saved.save(4, _state(4), {})
        saved.wait()
        with pytest.raises(ValueError, match=message):
            saved.restore(4, spec, specs.shardings(parts, spec, specs.device_mesh(parts)))
