"""Checkpoints that are written part by part: they are like others, and continue after a kill."""

import dataclasses
import json

import numpy as np
import pytest

from lingvo_gshard.checkpoints import checked_array, streamed
from lingvo_gshard.checkpoints.checked_array import CheckedArray, computed_view
from lingvo_gshard.checkpoints.checkpoints import Checkpoints, Contents
from lingvo_gshard.checkpoints.fingerprints import fingerprint
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.layout import TensorSpec
from lingvo_gshard.spmd import specs
from tests.spmd import functions

_SPEC = NestedMap(
    step=TensorSpec((), "int32", ""),
    theta=NestedMap(
        table=TensorSpec((11, 4), "float32", "VM"),
        wi=TensorSpec((2, 8, 4, 6), "float32", "REMH"),
        wo=TensorSpec((6, 8), "bfloat16", "HE"),
        zero=TensorSpec((3,), "float32", "M"),
    ),
)


def _values():
    rng = np.random.default_rng(3)
    values = _SPEC.Transform(lambda s: np.asarray(9 * rng.random(s.shape)).astype(s.dtype))
    values.theta.zero[:] = 0
    return dict(values.FlattenItems())


def _arrays(reads=None, fail_at=None, error=KeyboardInterrupt):
    arrays = {}
    for path, value in _values().items():

        def read(index, part, path=path, value=value):
            if path == fail_at:
                raise error("stopped")
            if reads is not None:
                reads.append((path, value[index].nbytes))
            part[...] = value[index]

        spec = dict(_SPEC.FlattenItems())[path]
        view = computed_view(read, spec.shape, spec.dtype, checked_array.part_shape(spec))
        arrays[path] = CheckedArray(path, spec, lambda view=view: view)
    return arrays


def _contents(num_partitions=1):
    return Contents(Params(), functions.partitioning(num_partitions), _SPEC)


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(checked_array, "PART_BYTES", 64)


@pytest.mark.parametrize("num_partitions", [1, 8])
def test_it_is_restored_on_any_number_of_devices(tmp_path, small_parts, num_partitions):
    reads = []
    done = streamed.write(tmp_path, 3, _contents(), _arrays(reads), "source")
    assert (done.num_arrays, done.num_continued) == (5, 0)
    assert max(size for _, size in reads) <= 64
    assert sum(path == "theta.wi" for path, _ in reads) == 2 * 8 * 2

    partitioning = functions.partitioning(num_partitions)
    shardings = specs.shardings(partitioning, _SPEC, specs.device_mesh(partitioning))
    with Checkpoints(tmp_path) as saved:
        assert saved.steps() == [3]
        restored = saved.restore(3, _SPEC, shardings)
        arrays = saved.arrays(3)
    assert restored.input_state == {}
    for (path, value), array in zip(_values().items(), restored.state.Flatten(), strict=True):
        np.testing.assert_array_equal(np.asarray(array), value, err_msg=path)
        assert arrays[path].fingerprints == fingerprint(array, arrays[path].spec.dims)


def test_an_interrupted_write_continues_from_the_same_source_only(tmp_path, small_parts):
    with pytest.raises(KeyboardInterrupt):
        streamed.write(tmp_path, 0, _contents(), _arrays(fail_at="theta.zero"), "a")
    partial = tmp_path / "checkpoints/0.import"
    lines = [json.loads(line) for line in (partial / "journal.jsonl").read_text().splitlines()]
    complete = {line["array"] for line in lines[1:]}
    assert complete and "theta.zero" not in complete

    # Reading checkpoints and training ignore it.
    with Checkpoints(tmp_path, _contents()) as saved:
        assert saved.steps() == []

    reads = []
    done = streamed.write(tmp_path, 0, _contents(), _arrays(reads), "a")
    assert done.num_continued == len(complete)
    assert not complete & {path for path, _ in reads}
    with Checkpoints(tmp_path) as saved:
        for path, array in saved.arrays(0).items():
            np.testing.assert_array_equal(np.asarray(array), _values()[path])


def test_a_different_source_starts_over(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        streamed.write(tmp_path, 0, _contents(), _arrays(fail_at="theta.zero"), "a")
    assert streamed.write(tmp_path, 0, _contents(), _arrays(), "b").num_continued == 0


def test_refused_arrays_leave_nothing_behind(tmp_path):
    with pytest.raises(ValueError, match="stopped"):
        streamed.write(tmp_path, 0, _contents(), _arrays(fail_at="theta.wi", error=ValueError), "a")
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_checkpoint_is_not_written_over(tmp_path):
    streamed.write(tmp_path, 0, _contents(), _arrays(), "a")
    with pytest.raises(ValueError, match="checkpoints/0: there is such a checkpoint already"):
        streamed.write(tmp_path, 0, _contents(), _arrays(), "a")


@pytest.mark.slow
def test_arrays_with_fingerprints_are_checked_once_they_are_written(tmp_path, small_parts):
    streamed.write(tmp_path / "a", 0, _contents(), _arrays(), "a")
    with Checkpoints(tmp_path / "a") as saved:
        arrays = saved.arrays(0)

    # Each part is read once, although checking an expert needs all of it.
    reads = []
    wi = arrays["theta.wi"]

    def read(index, part):
        reads.append(index)
        part[...] = wi.read_padded(index, wi.shape)

    view = computed_view(read, wi.shape, wi.dtype, checked_array.part_shape(wi.spec))
    arrays["theta.wi"] = dataclasses.replace(wi, open=lambda: view)
    streamed.write(tmp_path / "b", 0, _contents(), arrays, "a")
    assert len(reads) == 2 * 8 * 2

    wrong = [*wi.fingerprints]
    wrong[3] = wrong[4]
    arrays["theta.wi"] = dataclasses.replace(wi, fingerprints=wrong)
    with pytest.raises(ValueError, match=r"theta.wi is not what was saved, in experts \[3\]"):
        streamed.write(tmp_path / "c", 0, _contents(), arrays, "a")
    assert list((tmp_path / "c/checkpoints").iterdir()) == []


def test_a_first_state_has_the_weights_and_their_averages():
    theta = {path: x for path, x in _arrays().items() if path.startswith("theta.")}
    spec = NestedMap(_SPEC, ema=_SPEC.theta)
    first = streamed.first_state(spec, theta)
    for path, value in _values().items():
        np.testing.assert_array_equal(
            np.asarray(first[path]), 0 * value if path == "step" else value
        )
        if path.startswith("theta."):
            average = first[path.replace("theta.", "ema.")]
            np.testing.assert_array_equal(np.asarray(average), value)
    del theta["theta.wo"]
    with pytest.raises(KeyError, match=r"\.wo"):
        streamed.first_state(spec, theta)


def test_a_bucket_without_a_disk_is_refused():
    with pytest.raises(ValueError, match=r"gs://bucket/run/checkpoints: .* which needs a disk"):
        streamed.write("gs://bucket/run", 0, _contents(), _arrays(), "a")
