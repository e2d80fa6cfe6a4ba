"""The model in the estimator: exact resume, other numbers of devices, evaluation, prediction."""

import json
import pathlib
import shutil
import subprocess
import sys

import pytest
import tensorflow as tf

from lingvo_gshard.checkpoints.checkpoints import Checkpoints
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.runs import run
from lingvo_gshard.spmd import specs
from tests.layers import building
from tests.model import small_task
from tests.spmd import functions


class _Experiment(small_task.Experiment):
    ITERATIONS_PER_LOOP = 2
    SAVE_CHECKPOINTS_STEPS = 100


def _params():
    p = _Experiment.params()
    p.task.encoder.num_layers = 1  # Dense, which makes it quick to compile.
    p.task.decoder.moe.group_size = 14
    p.decode.batch_size = small_task.B
    return p


class _Batches:
    """An input whose batch i is a function of i."""

    def __init__(self, count=None):
        self._index = 0
        self._count = count

    @property
    def specs(self):
        return small_task.batch_specs()

    def __iter__(self):
        return self

    def __next__(self):
        if self._index == self._count:
            raise StopIteration
        self._index += 1
        return small_task.random_batch(self._index)

    def get_state(self):
        return {"index": self._index}

    def set_state(self, state):
        self._index = state["index"]


def _translate(p):
    """Translates a batch in eager mode."""
    model = TaskModel(p, functions.partitioning(1))
    theta = building.random_theta(model.task).Transform(tf.constant)
    model.task.Predict(theta, small_task.source_batch(0), p.decode)


def test_a_minimum_length_above_the_maximum_is_refused():
    p = _params()
    p.decode.Set(min_target_len=9, max_target_len=8)
    with pytest.raises(ValueError, match="min_target_len must be 1 to max_target_len 8, got 9"):
        _translate(p)


def test_a_seed_of_more_than_31_bits_is_refused():
    p = _params()
    p.decode.seed = 2**31
    with pytest.raises(ValueError, match=r"decode.seed must be from 0 to 2\*\*31 - 1, got 2147"):
        _translate(p)


def _train(estimator, max_steps):
    return estimator.train(lambda _: _Batches(), max_steps=max_steps)


def _state(folder, step, num_partitions=2):
    parts = functions.partitioning(num_partitions)
    spec = TaskModel(_params(), parts).state_spec
    shardings = specs.shardings(parts, spec, specs.device_mesh(parts))
    with Checkpoints(str(folder)) as saved:
        return saved.restore(step, spec, shardings).state


def _losses(folder):
    """The mean loss of each call of the program, by its last step."""
    lines = (folder / "train_metrics.jsonl").read_text().splitlines()
    return {line["step"]: line["metrics"]["loss"] for line in map(json.loads, lines)}


@pytest.fixture(scope="module")
def runs_on_two(tmp_path_factory):
    """Folders of three runs: 4 steps at once, 2 steps resumed for 2 more, and 2 steps only."""
    folder = tmp_path_factory.mktemp("runs")
    at_once = folder / "at_once"
    resumed = folder / "resumed"
    stopped = folder / "stopped"

    estimator = run.make_estimator(_params(), str(resumed), 2)
    _train(estimator, 2)
    shutil.copytree(resumed, stopped)
    _train(estimator, 4)

    # The same compiled program again, from the start.
    estimator.model_dir = str(at_once)
    _train(estimator, 4)
    return at_once, resumed, stopped


@pytest.mark.slow
def test_resumed_run_equals_uninterrupted_run(runs_on_two):
    at_once, resumed, _ = runs_on_two
    got = _state(resumed, 4)
    want = _state(at_once, 4)
    building.assert_close(got, want, rtol=0, atol=0)
    assert _losses(resumed) == _losses(at_once)
    assert int(got.step) == 4


@pytest.mark.slow
def test_checkpoint_resumes_on_other_number_of_devices(runs_on_two):
    at_once, _, stopped = runs_on_two
    estimator = run.make_estimator(_params(), str(stopped), 4)
    _train(estimator, 4)
    assert _losses(stopped)[4] == pytest.approx(_losses(at_once)[4], rel=1e-5)
    got = _state(stopped, 4, num_partitions=4)
    want = _state(at_once, 4)
    assert got.theta.decoder.layers[1].feed_forward.wi.addressable_shards[0].data.shape[0] == 2
    building.assert_close(got.theta, want.theta, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_predictions_end_and_are_in_the_vocabulary(runs_on_two):
    p = _params()
    p.decode.Set(beam_size=2, num_best=2, max_target_len=5)
    estimator = run.make_estimator(p, str(runs_on_two[0]), 2)

    class Sources(_Batches):
        @property
        def specs(self):
            return NestedMap(features=_sources(super().specs.features))

        def __next__(self):
            return NestedMap(features=_sources(super().__next__().features))

    rows = list(estimator.predict(lambda _: Sources(1)))
    assert len(rows) == small_task.B
    for row in rows:
        assert row["ids"].shape == (2, 5) and row["scores"][0] >= row["scores"][1]
        for ids, length in zip(row["ids"], row["lengths"], strict=True):
            assert ids.max() < small_task.TARGET_VOCAB and not ids[length:].any()
            assert length == 0 or 2 not in ids[: length - 1]


def _sources(features):
    return NestedMap({k: v for k, v in features.items() if k.startswith("source")})


def test_a_model_and_its_state_spec_need_no_tensorflow():
    """A wrong setting is refused, and a model's size known, before seconds of imports."""
    program = """if True:
        import sys
        from lingvo_gshard import registry
        from lingvo_gshard.model import placement
        from lingvo_gshard.model.task_model import TaskModel

        params = registry.get_params("toy.MoE8E4L")
        params.task.Set(source_vocab_size=40, target_vocab_size=20)
        model = TaskModel(params, placement.partitioning(params, 4))

        spec = model.state_spec
        assert spec.theta.softmax.shape == (128, 20), spec.theta.softmax
        assert len(spec.slots.Flatten()) >= len(spec.theta.Flatten())
        loaded = {"tensorflow", "jax", "grain"} & sys.modules.keys()
        assert not loaded, loaded
    """
    root = pathlib.Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], check=True, cwd=root)
