"""Complete, interrupted and damaged checkpoints, and checkpoints of another model."""

import json
import pathlib
import resource
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
import tensorstore

from lingvo_gshard.checkpoints import stored
from lingvo_gshard.checkpoints.checkpoints import Checkpoints, Contents, SaveError
from lingvo_gshard.checkpoints.stored import DamagedCheckpointError
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.spmd import specs
from lingvo_gshard.spmd.padded import PaddedArray
from lingvo_gshard.train.config import train_params
from tests.checkpoints import in_memory
from xla_spmd.mesh import Mesh

_SPEC = NestedMap(
    step=TensorSpec((), "int32", ""),
    layers=[
        NestedMap(w=TensorSpec((8, 640), "float32", "EM")),
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


def _open(folder, num_partitions=4, **settings):
    """Opens the checkpoints of a folder for saving."""
    parts = Partitioning.from_dict(Mesh.flat(num_partitions), {"E": "d"})
    p = Params()
    p.Define("dim", 3, "")
    p.Define("train", train_params().Set(**settings), "")
    return Checkpoints(folder, Contents(p, parts, _SPEC))


@pytest.mark.parametrize("expert_letter", ["E", "V"])
def test_uneven_arrays_are_saved_and_restored_unchanged(tmp_path, expert_letter):
    """7 rows over 8, 4 and 2 devices, with a fingerprint for each row or for all of them."""
    spec = NestedMap(w=TensorSpec((7, 5), "float32", expert_letter + "M"))
    values = np.arange(35, dtype=np.float32).reshape(7, 5)

    def shardings(num_partitions):
        parts = Partitioning.from_dict(Mesh.flat(num_partitions), {expert_letter: "d"})
        return parts, specs.shardings(parts, spec, specs.device_mesh(parts))

    # A saved array whose values are in memory.
    saved_array = in_memory.array(values, spec.w.dims, "w")
    parts, eight = shardings(8)
    state = spec.Pack(stored.placed({"w": saved_array}, {"w": eight.w}).values())
    assert isinstance(state.w, PaddedArray) and state.w.padded.shape == (8, 5)
    np.testing.assert_array_equal(state.w, values)

    p = Params()
    p.Define("train", train_params(), "")
    with Checkpoints(tmp_path, Contents(p, parts, spec)) as saved:
        saved.save(1, state, {})
        saved.wait()
        for num_partitions in (1, 2, 4, 8):
            restored = saved.restore(1, spec, shardings(num_partitions)[1]).state.w
            assert (restored.shape, restored.dtype) == ((7, 5), np.float32)
            np.testing.assert_array_equal(restored, values)
        np.testing.assert_array_equal(saved.arrays(1)["w"][2:7, :3], values[2:7, :3])


def _restore_newest(saved, num_partitions):
    shardings = _shardings(num_partitions)
    return saved.newest(lambda step: saved.restore(step, _SPEC, shardings))


def _same(a, b):
    for (path, x), y in zip(a.FlattenItems(), b.Flatten(), strict=True):
        assert x.dtype == y.dtype, path
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=path)


def test_saved_state_is_restored_on_any_number_of_devices(tmp_path):
    with _open(tmp_path) as saved:
        saved.save(7, _state(7), {"index": 70, "names": ["a"]})
    for num_partitions in (1, 2, 8):
        with _open(tmp_path) as saved:
            restored = saved.restore(7, _SPEC, _shardings(num_partitions))
        state = restored.state
        _same(state, _state(7))
        assert restored.input_state == {"index": 70, "names": ["a"]}
        assert len(state.layers[0].w.addressable_shards) == num_partitions
        assert state.layers[0].w.addressable_shards[0].data.shape == (8 // num_partitions, 640)


def test_a_folders_name_is_not_a_pattern(tmp_path):
    """As patterns, they would match no file, or the neighbour's files."""
    neighbour = tmp_path / "runs of 2026b, 1/run1"
    folder = tmp_path / "runs of 2026[abc],?*/run[1]"
    _saved(neighbour, (1,))
    (neighbour / "checkpoints/2.orbax-checkpoint-tmp").mkdir()
    _saved(folder, (2, 5))
    (folder / "checkpoints/7").mkdir()  # A killed save leaves such a folder.

    with _open(folder, keep_checkpoint_max=1) as saved:
        assert saved.steps() == [2, 5]
        assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["2", "5"]
        saved.save(9, _state(9), {"index": 9})
        saved.wait()
        assert saved.steps() == [9]
        _same(saved.restore(9, _SPEC, _shardings(2)).state, _state(9))

    left = sorted(path.name for path in (neighbour / "checkpoints").iterdir())
    assert left == ["1", "2.orbax-checkpoint-tmp"]


def test_the_age_of_a_checkpoint_does_not_come_from_its_files(tmp_path):
    """A copy, for example from a bucket, has new times."""
    _saved(tmp_path, (1, 2, 3))
    for step in (1, 2, 3):
        about = tmp_path / "checkpoints" / str(step) / "_CHECKPOINT_METADATA"
        fields = json.loads(about.read_text())
        fields["commit_timestamp_nsecs"] -= int((3 - step) * 3 * 3600e9)
        about.write_text(json.dumps(fields))
    with _open(tmp_path, keep_checkpoint_max=1, keep_checkpoint_every_n_hours=2.0) as saved:
        saved.save(4, _state(4), {})
    assert saved.steps() == [1, 2, 3, 4]


def test_incomplete_checkpoints_are_ignored(tmp_path):
    _saved(tmp_path, (1, 2, 3))
    folder = tmp_path / "checkpoints"
    # Kills during a save and a deletion leave such folders.
    (folder / "2").rename(folder / "2.orbax-checkpoint-tmp")
    (folder / "3/commit_success.txt").unlink()
    with Checkpoints(tmp_path) as reader:
        assert reader.steps() == [1] and len(list(folder.iterdir())) == 3
    with _open(tmp_path) as saved:
        assert [path.name for path in folder.iterdir()] == ["1"]
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


def _cut(file):
    file.write_bytes(file.read_bytes()[:100])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: _flip_a_bit(_largest_file(folder)), r"layers\[0\].w is not what was saved"),
        (
            lambda folder: _cut(_largest_file(folder)),
            r'reading "layers\[0\].w/.*Requested byte range',
        ),
        (lambda folder: shutil.rmtree(folder / "state"), "state"),
        (lambda folder: (folder / "about/metadata").write_text("{"), "Expecting property name"),
        (lambda folder: (folder / "about/metadata").unlink(), "No such file .*about/metadata"),
        (
            lambda folder: (folder / "input_state/metadata").write_text('{"index": 5}'),
            "about/metadata or input_state/metadata was changed",
        ),
    ],
)
def test_damage_is_reported_in_one_line_and_skipped(tmp_path, capfd, damage, message):
    _saved(tmp_path, (3, 4))
    damage(tmp_path / "checkpoints/4")
    with Checkpoints(tmp_path) as reader:
        with pytest.raises(DamagedCheckpointError, match=message) as error:
            reader.restore(4, _SPEC, _shardings(4))
        assert "\n" not in str(error.value) and "4: the checkpoint is damaged: " in str(error.value)
        assert capfd.readouterr().err == ""
        restored = _restore_newest(reader, 4)
    assert restored.step == 3 and restored.input_state == {"index": 3}


def test_an_unreadable_file_is_not_damage(tmp_path, monkeypatch):
    """If a reader lacks a permission or memory, no checkpoint is moved away."""
    _saved(tmp_path, (3, 4))
    for error in (
        PermissionError(13, "Permission denied", "4/about"),
        ValueError('PERMISSION_DENIED: Error reading local file "d/0"'),
    ):

        def failing(*_, error=error, **__):
            raise RuntimeError("Encountered error while reading") from error

        monkeypatch.setattr(tensorstore, "open", failing)
        with pytest.raises(RuntimeError, match="Encountered"), _open(tmp_path) as saved:
            _restore_newest(saved, 1)
        assert saved.steps() == [3, 4]


def test_a_lost_digest_is_damage(tmp_path):
    """One changed letter of its key is enough."""
    _saved(tmp_path, (3, 6))
    path = tmp_path / "checkpoints/6/about/metadata"
    path.write_text(path.read_text().replace('"digest"', '"digess"'))
    assert _newest(tmp_path).step == 3


def test_weights_that_are_not_finite_are_refused_by_name_and_kept(tmp_path):
    """The checkpoint is not damaged, so it stays; an optimizer's slots are not weights."""
    of_weights = NestedMap(
        v=TensorSpec((3,), "float32", "_"), w=TensorSpec((8, 3), "float32", "EM")
    )
    spec = NestedMap(theta=of_weights, slots=NestedMap(theta=of_weights))
    parts = Partitioning.from_dict(Mesh.flat(4), {"E": "d"})
    shardings = specs.shardings(parts, spec, specs.device_mesh(parts))
    p = Params()
    p.Define("train", train_params(), "")

    def saved_state(step, bad):
        state = {path: np.ones(leaf.shape, np.float32) for path, leaf in spec.FlattenItems()}
        state["slots.theta.v"][0] = np.nan
        state["theta.w"][[0, 7], 1] = bad
        placed = zip(state.values(), shardings.Flatten(), strict=True)
        saved.save(step, spec.Pack(jax.device_put(*pair) for pair in placed), {})
        saved.wait()

    with Checkpoints(tmp_path, Contents(p, parts, spec)) as saved:
        saved_state(1, 2.0)
        saved_state(2, np.inf)
        message = r"/2: theta\.w has 2 numbers that are not finite \(NaN or infinite\)\.$"
        with pytest.raises(ValueError, match=message):
            saved.newest(lambda step: saved.restore(step, spec, shardings))
        assert saved.steps() == [1, 2] and not (tmp_path / "damaged_checkpoints").exists()
        restored = saved.restore(1, spec, shardings).state
        assert np.isnan(np.asarray(restored.slots.theta.v)[0])


def _with_first_layer(spec):
    return NestedMap(_SPEC, layers=[NestedMap(w=spec), _SPEC.layers[1]])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            _with_first_layer(TensorSpec((8, 641), "float32", "EM")),
            r"layers\[0\].w is float32\[8, 640\], expected float32\[8, 641\]",
        ),
        (
            _with_first_layer(TensorSpec((8, 640), "bfloat16", "EM")),
            r"layers\[0\].w is float32\[8, 640\], expected bfloat16\[8, 640\]",
        ),
        (
            NestedMap(_SPEC, bias=TensorSpec((2,), "float32", "M")),
            r"bias is absent, expected float32\[2\]",
        ),
        (
            NestedMap(step=_SPEC.step, layers=_SPEC.layers[:1]),
            r"layers\[1\].w is bfloat16\[5, 3\], expected absent",
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


def _saved(folder, steps):
    """Saves checkpoints of these steps in a folder."""
    with _open(folder) as saved:
        for step in steps:
            saved.save(step, _state(step), {"index": step})


def _newest(folder):
    with _open(folder) as saved:
        return _restore_newest(saved, 2)


def test_a_damaged_newest_checkpoint_is_reported_skipped_and_kept(tmp_path, caplog):
    _saved(tmp_path, (3, 6, 9))
    for step in (6, 9):
        _flip_a_bit(_largest_file(tmp_path / f"checkpoints/{step}"))
    with Checkpoints(tmp_path) as reader:  # Reading alone moves nothing.
        assert _restore_newest(reader, 1).step == 3
        assert reader.steps() == [3, 6, 9]
    restored = _newest(tmp_path)
    assert restored.step == 3 and restored.input_state == {"index": 3}
    _same(restored.state, _state(3))
    assert "checkpoints/9: the checkpoint is damaged: layers[0].w is not what was" in caplog.text
    assert sorted(path.name for path in (tmp_path / "damaged_checkpoints").iterdir()) == ["6", "9"]

    _saved(tmp_path, (6,))  # It is trained again, and damaged again.
    _flip_a_bit(_largest_file(tmp_path / "checkpoints/6"))
    assert _newest(tmp_path).step == 3
    kept = sorted(path.name for path in (tmp_path / "damaged_checkpoints").iterdir())
    assert kept == ["6", "6.1", "9"]


def test_a_damaged_state_is_freed_before_the_previous_one_is_read(tmp_path):
    _saved(tmp_path, (3, 6))
    _flip_a_bit(_largest_file(tmp_path / "checkpoints/6"))
    held = []

    def read(step):
        held.append(sum(array.nbytes for array in jax.live_arrays()))
        return saved.restore(step, _SPEC, _shardings(2))

    with Checkpoints(tmp_path) as saved:
        assert saved.newest(read).step == 3
    assert len(held) == 2 and held[1] - held[0] < 1000


def test_training_does_not_restart_if_all_checkpoints_are_damaged(tmp_path):
    _saved(tmp_path, (3,))
    _flip_a_bit(_largest_file(tmp_path / "checkpoints/3"))
    with pytest.raises(DamagedCheckpointError, match="no undamaged checkpoint is left.*/3: "):
        _newest(tmp_path)
    with pytest.raises(DamagedCheckpointError, match="Damaged ones are in .*damaged_checkpoints"):
        _newest(tmp_path)


def test_changed_bytes_never_change_the_restored_state(tmp_path):
    """Each file of the newest checkpoint is cut, overwritten, extended, or has a bit flipped."""
    num_noticed = 0
    _saved(tmp_path / "whole", (3, 6))
    files = [p for p in (tmp_path / "whole/checkpoints/6").rglob("*") if p.is_file()]
    assert len(files) > 8
    rng = np.random.default_rng(5)
    for number, file in enumerate(files):
        run = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", run)
        damaged = run / file.relative_to(tmp_path / "whole")
        data = bytearray(damaged.read_bytes())
        place = int(rng.integers(max(len(data), 1)))
        match number % 4:
            case 0 if data:
                data[place] ^= 1 << int(rng.integers(8))
            case 1 if data:
                data = data[:place]
            case 2:
                data[place : place + 8] = rng.bytes(8)
            case _:
                data += b"more"
        damaged.write_bytes(data)
        restored = _newest(run)
        assert restored.input_state == {"index": restored.step}, damaged
        _same(restored.state, _state(restored.step))
        num_noticed += restored.step == 3
    assert num_noticed >= 4


def fill_disk(folder):
    """Limits the size of files, in place of the disk's."""
    with _open(pathlib.Path(folder)) as saved:
        saved.save(3, _state(3), {"index": 3})
        saved.wait()
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
        with pytest.raises(SaveError, match="step 6 could not be written; the last .* step 3"):
            saved.save(6, _state(6), {})
            saved.wait()


@pytest.mark.slow
def test_a_full_disk_is_reported_and_loses_nothing(tmp_path):
    """Orbax continues to write other files after the first failure, until the process ends.

    It reports errors through a pipe, which the limit does not affect.
    """
    program = (
        "import sys; from tests.checkpoints import checkpoints_test as t; t.fill_disk(sys.argv[1])"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert _newest(tmp_path).step == 3
    _saved(tmp_path, (6,))
    _same(_newest(tmp_path).state, _state(6))
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["3", "6"]  # The next save deletes the rest of a failed one.


def test_the_state_may_be_written_over_while_it_is_saved(tmp_path):
    """The next call donates the state's arrays."""
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    with _open(tmp_path) as saved:
        for step in (1, 2):
            state = _state(step)
            saved.save(step, state, {})
            state.Transform(add)
        for step in (1, 2):
            saved.wait()
            _same(saved.restore(step, _SPEC, _shardings(4)).state, _state(step))


def test_a_checkpoint_describes_its_model(tmp_path):
    _saved(tmp_path, (3,))
    about = json.loads((tmp_path / "checkpoints/3/about/metadata").read_text())
    assert about["params"].startswith("dim : 3\ntrain.")
    assert about["mesh"] == [["d"], [4], [0, 1, 2, 3]]
    assert about["arrays"]["layers[0].w"] == "float32|8,640|EM" and about["table"] == {"E": "d"}
    assert len(about["fingerprints"]["layers[0].w"]) == 8 and about["num_processes"] == 1


def test_a_changed_expert_is_named(tmp_path, monkeypatch):
    """The error happens between the files and the devices."""
    _saved(tmp_path, (3,))
    placed = stored.placed

    def swapping(arrays, shardings):
        state = placed(arrays, shardings)
        w, order = state["layers[0].w"], np.array([0, 1, 6, 3, 4, 5, 2, 7])
        return {**state, "layers[0].w": jax.device_put(np.asarray(w)[order], w.sharding)}

    monkeypatch.setattr(stored, "placed", swapping)
    with (
        Checkpoints(tmp_path) as saved,
        pytest.raises(DamagedCheckpointError, match=r"layers\[0\].w is not .* experts \[2, 6\]"),
    ):
        saved.restore(3, _SPEC, _shardings(8))


def test_a_folder_that_is_not_a_checkpoint_is_kept(tmp_path):
    _saved(tmp_path, (1,))
    (tmp_path / "checkpoints/1").rename(tmp_path / "checkpoints/1_good")
    (tmp_path / "checkpoints/2.tar").touch()
    with _open(tmp_path) as saved:
        assert not saved.steps()
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["1_good", "2.tar"]


def test_a_checkpoint_that_training_deletes_while_it_is_read_is_not_damaged(tmp_path, caplog):
    """The next checkpoint is read, not the previous one."""
    _saved(tmp_path, (3, 6))

    def read(step):
        if step == 6:
            (tmp_path / "checkpoints/6").rename(tmp_path / "checkpoints/9")
            raise DamagedCheckpointError("no such file")
        return step

    with Checkpoints(tmp_path) as saved:
        assert saved.newest(read) == 9
    assert not caplog.messages


def test_processes_learn_of_damage_that_one_of_them_finds_at_once(tmp_path, monkeypatch):
    _saved(tmp_path, (3,))
    (tmp_path / "checkpoints/3/about/metadata").write_text("{")
    told = []
    monkeypatch.setattr(
        stored.processes, "largest", lambda found: told.append(found) or np.array(found)
    )
    with Checkpoints(tmp_path) as saved, pytest.raises(DamagedCheckpointError):
        saved.arrays(3)
    assert told == [[1]]
