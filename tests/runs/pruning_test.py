"""Runs with fewer experts: weights, against NumPy's; logits; continuing after a kill; errors.

E experts, K remaining experts, M model.
"""

import dataclasses
import json
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard import registry
from lingvo_gshard.checkpoints.checkpoints import Checkpoints
from lingvo_gshard.core.base_layer import gaussian
from lingvo_gshard.layers import routing
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.feed_forward import FeedForwardLayer
from lingvo_gshard.runs import kept_experts, pruning
from lingvo_gshard.runs import launch as launches
from lingvo_gshard.runs.prune_request import Request
from lingvo_gshard.runs.run import open_run
from lingvo_gshard.sharding.layout import TensorSpec
from params.toy import MoE8E12L
from tests.checkpoints import in_memory
from tests.hugging_face import export_model, runs
from tests.layers import building
from tests.model import renamed

_E = 8
_SIDES = ("encoder", "decoder")
# Two blocks of two layers, with all possible weights of experts; or two layers.
_LOOP = [
    f"task.{side}.{setting}"
    for side in _SIDES
    for setting in ("layers_as=LOOP", "moe.num_experts=8", "moe.biases=True", "moe.gated=True")
]
_UNROLLED = [
    f"task.{side}.{setting}"
    for side in _SIDES
    for setting in ("layers_as=UNROLLED", "num_layers=2", "moe.num_experts=8")
]
# Only a few weights have slots, so that writing a run is quick.
_FROZEN = r"train.frozen=theta\.(?!decoder.*\.wo).*"
_LAYERS = ("encoder_1", "encoder_3", "decoder_1", "decoder_3")
_HALF = Request(("de", "fr"), 0.5)


def _with_idle_experts(theta):
    """Sets gates that never choose experts 0, 2, 5 and 7.

    Their logits are 0. Experts 1 and 3 have the logits x and -x, and experts 4 and 6 have y and -y.
    So the two highest logits are above 0.
    """
    for path, wg in theta.FlattenItems():
        if path.endswith(".wg"):
            wg[..., [0, 2, 5, 7]] = 0
            wg[..., 3] = -wg[..., 1]
            wg[..., 6] = -wg[..., 4]


def _written(folder, settings, change):
    launch = export_model.LAUNCH.changed([*settings, _FROZEN])
    theta = runs.random_theta(launch, seed=2)
    change(theta)
    return runs.write(folder, launch, theta)


@pytest.fixture(scope="module")
def loop_run(tmp_path_factory):
    """A run whose stacks are loops. Each test writes its loads."""
    return _written(tmp_path_factory.mktemp("loop") / "run", _LOOP, lambda theta: None)


@pytest.fixture(scope="module")
def unrolled_run(tmp_path_factory):
    """A run with idle experts, whose layers are unrolled. Each test writes its loads."""
    return _written(tmp_path_factory.mktemp("unrolled") / "run", _UNROLLED, _with_idle_experts)


@pytest.fixture
def empty_run(tmp_path):
    """A run without weights, for errors that do not need them."""
    launch = export_model.LAUNCH.changed(_UNROLLED)
    launches.record(launch, str(tmp_path / "run"))
    return _opened(tmp_path / "run")


def _opened(logdir):
    return open_run(launches.recorded(str(logdir)), str(logdir), 1)


def _write_loads(run, by_language):
    """Writes evaluations with {language: {layer: loads}}."""
    lines = [{"name": "dev", "step": 0, "nll": 1.0}]
    for language, loads in by_language.items():
        metrics = {f"load_E_{layer}": list(load) for layer, load in loads.items()}
        lines.append({"name": f"dev_{language}", "step": 0, "nll": 1.0, **metrics})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    pathlib.Path(run.logdir, "eval_metrics.jsonl").write_text(text)


def _random_loads(seed=0):
    """Loads of three languages, with a mean of 1 in each layer."""
    rng = np.random.default_rng(seed)
    by_language = {}
    for language in ("de", "fr", "ja"):
        loads = rng.dirichlet(np.ones(_E), len(_LAYERS)) * _E
        by_language[language] = dict(zip(_LAYERS, loads.tolist(), strict=True))
    return by_language


def _theta(logdir):
    with Checkpoints(logdir) as saved:
        arrays = saved.arrays(0)
        return {path: np.asarray(x) for path, x in arrays.items() if path.startswith("theta.")}


def _kept(loads, layer, count):
    """Returns the experts with the largest loads over German and French, by a literal loop."""
    total = np.add(loads["de"][layer], loads["fr"][layer])
    ids = []
    for _ in range(count):
        best = max((i for i in range(_E) if i not in ids), key=lambda i: (total[i], -i))
        ids.append(best)
    return sorted(ids)


def _gathered(theta, loads, count, is_loop):
    """Returns the weights with fewer experts: a loop over paths and layers, with NumPy's take."""
    pruned = {}
    for path, array in theta.items():
        pruned[path] = array
        if ".feed_forward.w" not in path:
            continue
        axis = {"wg": -1}.get(path.rpartition(".")[2], 0)
        stack = path.split(".")[1]
        if is_loop and "block[1]" in path:
            blocks = [
                np.take(array[r], _kept(loads, f"{stack}_{2 * r + 1}", count), axis)
                for r in range(2)
            ]
            pruned[path] = np.stack(blocks)
        for i in (1, 3):
            if f"layers[{i}]" in path:
                pruned[path] = np.take(array, _kept(loads, f"{stack}_{i}", count), axis)
    return pruned


@pytest.mark.slow
@pytest.mark.parametrize("name", ["loop_run", "unrolled_run"])
def test_the_weights_of_kept_experts_are_kept(request, tmp_path, name):
    run = request.getfixturevalue(name)
    loads = _random_loads()
    _write_loads(run, loads)
    done = pruning.prune(run, tmp_path / "new", Request(("de", "fr"), 0.3))

    # 2.4 is rounded up.
    want = _gathered(_theta(run.logdir), loads, 3, name == "loop_run")
    got = _theta(tmp_path / "new")
    assert got.keys() == want.keys()
    for path, array in want.items():
        np.testing.assert_array_equal(got[path], array, err_msg=path)
    assert sum(array.size for array in got.values()) == done.num_weights < done.num_weights_before

    # It is restored on devices, which checks all fingerprints, and has a record of the pruning.
    launch = launches.recorded(str(tmp_path / "new"))
    if name == "loop_run":
        assert _opened(tmp_path / "new").estimator.restore().step == 0
    record = launches.recorded_pruning(str(tmp_path / "new"))
    layers = _LAYERS if name == "loop_run" else ("encoder_1", "decoder_1")
    assert record.experts == {layer: tuple(_kept(loads, layer, 3)) for layer in layers}
    assert (record.source, record.languages) == (run.logdir, ("de", "fr"))
    launches.record(launch, str(tmp_path / "new"))  # As when it is trained.
    assert launches.recorded_pruning(str(tmp_path / "new")) == record
    assert launches.recorded_pruning(run.logdir) is None


def _logits(run):
    """Returns the logits of all tokens, computed eagerly, and the load of each layer's experts."""
    task = run.params.task.Instantiate(building.Unannotated())
    theta = _theta(run.logdir)
    values = [theta[f"theta.{path}"] for path, _ in task.weight_specs.FlattenItems()]
    features = export_model.batch()
    logits, reports = task.FProp(
        task.weight_specs.Pack(map(tf.constant, values)),
        features.Transform(tf.constant),
        Context(Mode.EVAL),
    )
    loads = {
        layer: routing.statistics(vars(report.routing))["load_E"].numpy().tolist()
        for layer, report in reports.items()
        if report.routing is not None
    }
    return logits.numpy()[features.target_segment_ids > 0], loads


@pytest.mark.slow
def test_experts_that_no_token_chooses_are_not_missed(unrolled_run, tmp_path):
    wanted, loads = _logits(unrolled_run)
    _write_loads(unrolled_run, {"de": loads})
    done = pruning.prune(unrolled_run, tmp_path / "new", Request(("de",), 0.5))
    assert [experts.share for experts in done.kept.values()] == pytest.approx([1, 1])
    found, _ = _logits(_opened(tmp_path / "new"))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert wanted.std() > 0.1

    # Without the experts that tokens choose, the logits differ.
    _write_loads(unrolled_run, {"de": {layer: [*range(_E)] for layer in loads}})
    pruning.prune(unrolled_run, tmp_path / "other", Request(("de",), 0.5))
    other, _ = _logits(_opened(tmp_path / "other"))
    assert np.abs(other - wanted).max() > 0.01


class _WithGate(FeedForwardLayer):
    """A dense layer with a matrix that has a router's name, but is not a router."""

    def __init__(self, params, *args):
        super().__init__(params, *args)
        m, h = self.p.dim, self.p.hidden_dim
        self.CreateVariable("wg", gaussian((m, h), "MH", fan_in=m))

    def FProp(self, theta, x, context):
        gate = tf.sigmoid(tf.einsum("BLM,MH->BLM", x, theta.wg))
        return gate * super().FProp(theta, x, context)


@registry.register
class OtherNames(MoE8E12L):
    """The model of LAUNCH, whose experts and routers have names that are drawn at random."""

    def Task(self):
        p = super().Task()
        for stack in (p.encoder, p.decoder):
            stack.dense.cls = _WithGate
            stack.moe = renamed.with_class(stack.moe)
        return p


@pytest.mark.slow
def test_names_of_weights_do_not_change_the_result(tmp_path):
    """The router is found by its declaration, and a dense layer's `wg` is left alone."""
    launch = dataclasses.replace(export_model.LAUNCH, model="pruning_test.OtherNames")
    launch = launch.changed([*_UNROLLED, _FROZEN])
    run = runs.write(tmp_path / "run", launch, runs.random_theta(launch, seed=2))
    loads = _random_loads()
    _write_loads(run, loads)
    done = pruning.prune(run, tmp_path / "new", Request(("de", "fr"), 0.5, is_merged=True))
    assert set(done.kept) == {"encoder_1", "decoder_1"}

    before, after = _theta(run.logdir), _theta(tmp_path / "new")
    for side in _SIDES:
        dense = f"theta.{side}.layers[0].feed_forward.wg"
        np.testing.assert_array_equal(after[dense], before[dense])
        layer = run.params.task.Instantiate(building.Unannotated())
        names = getattr(layer, side).layers[1].feed_forward.names
        router = f"theta.{side}.layers[1].feed_forward.{names['wg']}"
        ids = list(done.kept[f"{side}_1"].ids)
        assert ids == _kept(loads, f"{side}_1", 4)
        np.testing.assert_array_equal(after[router], before[router][:, ids])
        experts = f"theta.{side}.layers[1].feed_forward.{names['wi']}"
        assert after[experts].shape == (4, *before[experts].shape[1:])


@pytest.mark.slow
def test_dropped_experts_are_merged(loop_run, tmp_path):
    loads = _random_loads(seed=1)
    _write_loads(loop_run, loads)
    done = pruning.prune(loop_run, tmp_path / "new", Request(("de", "fr"), 0.25, is_merged=True))
    assert launches.recorded_pruning(str(tmp_path / "new")).is_merged

    before = _theta(loop_run.logdir)
    after = _theta(tmp_path / "new")
    for layer, experts in done.kept.items():
        stack, number = layer.split("_")
        block = int(number) // 2
        path = f"theta.{stack}.block[1].feed_forward"
        ids = _kept(loads, layer, 2)
        assert experts.ids == tuple(ids)
        wg_ME = before[f"{path}.wg"][block]
        np.testing.assert_array_equal(after[f"{path}.wg"][block], wg_ME[:, ids])

        # Each expert is merged into the one whose gate has the smallest angle with its own.
        share_E = np.add(loads["de"][layer], loads["fr"][layer])
        members = {i: [] for i in ids}
        for expert in range(_E):
            cosines = [wg_ME[:, i] @ wg_ME[:, expert] / np.linalg.norm(wg_ME[:, i]) for i in ids]
            members[expert if expert in ids else ids[int(np.argmax(cosines))]].append(expert)
        for name in ("wi", "wi_gate", "wo", "wi_bias"):
            experts_of_block = before[f"{path}.{name}"][block]
            for k, group in enumerate(members.values()):
                mean = np.average(experts_of_block[group], axis=0, weights=share_E[group])
                merged = after[f"{path}.{name}"][block, k]
                np.testing.assert_allclose(merged, mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dims", ["EHM", "REHM", "M_", "RM_", "_", "R_"])
def test_parts_are_parts_of_the_whole(dims):
    """Arrays of experts, of gates, and of some gatings' biases, in one layer or in two."""
    sizes = {"R": 2, "E": 8, "H": 3, "M": 4, "_": 8}
    shape = tuple(sizes[letter] for letter in dims)
    axis = dims.index("E" if "E" in dims else "_")
    values = np.random.default_rng(0).random(shape).astype("float32")
    old = in_memory.array(values, dims, "w")

    rng = np.random.default_rng(1)
    of_blocks = [kept_experts.busiest(rng.random(8), 5) for _ in range(1 + ("R" in dims))]
    if "R" in dims:
        blocks = zip(values, of_blocks, strict=True)
        want = np.stack([np.take(block, kept.ids, axis - 1) for block, kept in blocks])
    else:
        want = np.take(values, of_blocks[0].ids, axis)

    got = pruning._pruned_array(old, TensorSpec(want.shape, "float32", dims), of_blocks)
    np.testing.assert_array_equal(np.asarray(got), want)
    index = tuple(slice(size // 2, size) for size in want.shape)
    np.testing.assert_array_equal(got[index], want[index])


def _flip_a_bit(logdir, path, expert):
    """Changes an expert's weight in a checkpoint's files; returns a function to undo it."""
    found = _theta(logdir)[path][expert].tobytes()[:64]
    for file in pathlib.Path(logdir, "checkpoints/0/state").rglob("*"):
        content = file.read_bytes() if file.is_file() else b""
        if found in content:
            changed = bytearray(content)
            changed[content.index(found)] ^= 1
            file.write_bytes(changed)
            return lambda: file.write_bytes(content)
    raise AssertionError(f"no file has expert {expert} of {path}")


@pytest.mark.slow
def test_a_damaged_expert_is_named_and_nothing_is_left(unrolled_run, tmp_path, request):
    """The array's experts are read part by part, and checked at the end."""
    _write_loads(unrolled_run, {"de": {layer: [*range(_E)] for layer in _LAYERS}})
    path = "theta.decoder.layers[1].feed_forward.wo"
    request.addfinalizer(_flip_a_bit(unrolled_run.logdir, path, 6))
    message = (
        r"run/checkpoints/0: the checkpoint is damaged: .*decoder\.layers\[1\]\.feed_forward\.wo is"
        r" not what was saved, in experts \[2\] of the remaining ones\.$"
    )
    with pytest.raises(ValueError, match=message):
        pruning.prune(unrolled_run, tmp_path / "new", Request(("de",), 0.5))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(("de", "xx"), 0.5), r"languages=de,xx: no loads of xx in .*; it has the loads of"),
        (Request((), 0.5), r"languages=: no loads of none in .* of de, fr, ja\.$"),
    ],
)
def test_invalid_requests_are_refused(empty_run, tmp_path, request_, message):
    _write_loads(empty_run, _random_loads())
    with pytest.raises(ValueError, match=message):
        pruning.prune(empty_run, tmp_path / "new", request_)
    assert not (tmp_path / "new").exists()


def test_runs_that_cannot_be_pruned_are_refused(empty_run, unrolled_run, tmp_path):
    new = tmp_path / "new"
    with pytest.raises(ValueError, match=r"run has no loads of experts by language: evaluate it"):
        pruning.prune(empty_run, new, _HALF)
    _write_loads(empty_run, _random_loads())
    with pytest.raises(ValueError, match=r"run: there is no checkpoint; train first\.$"):
        pruning.prune(empty_run, new, _HALF)

    # The evaluations are another model's, or of only some layers.
    _write_loads(unrolled_run, {"de": {"encoder_1": [1.0] * 4}, "fr": {}})
    with pytest.raises(ValueError, match=r"de has the loads of [04] experts of \w+_1, which has 8"):
        pruning.prune(unrolled_run, new, Request(("de",), 0.5))
    with pytest.raises(ValueError, match=r"no loads of fr in"):
        pruning.prune(unrolled_run, new, _HALF)

    dense = runs.launch_of("toy.Dense4L", 29, "task.product_dtype=float32")
    launches.record(dense, str(tmp_path / "dense"))
    with pytest.raises(ValueError, match=r"dense: toy.Dense4L has no experts to prune\.$"):
        pruning.prune(_opened(tmp_path / "dense"), new, _HALF)
    assert not new.exists()


def test_a_folder_that_exists_is_not_written_to(empty_run, tmp_path):
    _write_loads(empty_run, _random_loads())
    (tmp_path / "new").mkdir()
    (tmp_path / "new/mine.txt").write_text("kept")
    (tmp_path / "file").write_text("kept")
    for name in ("new", "file", "run"):
        with pytest.raises(ValueError, match=f"{name} exists already: choose a new folder"):
            pruning.prune(empty_run, tmp_path / name, _HALF)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["mine.txt"]
