"""The file of the whole paper: its parts equal the library's, and it trains and translates.

The letters are the file's: G groups, S tokens of a group, E experts, C capacity, M model, H hidden,
N heads, K size of a head, B batch, T source length, L target length, V vocabulary, k beam.
"""

import functools
import importlib.util
import re
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import random
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.moe import MoELayer
from lingvo_gshard.optim.adafactor import Adafactor
from tests.docs import scripts
from tests.layers import building
from tests.model import small_task

_PATH = scripts.ROOT / "examples/gshard_in_one_file.py"
_SPEC = importlib.util.spec_from_file_location("gshard_in_one_file", _PATH)
onefile = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(onefile)

B = 8
T = 6
L = 7
V = 40
SIZES = {"M": 8, "H": 10, "N": 2, "K": 3, "E": 8, "V": V}
# The letters of each weight, by the name of its layer's weight in the library.
_ATTENTION = {"wq": "wq_MNK", "wk": "wk_MNK", "wv": "wv_MNK", "wo": "wo_NKM"}
_NORM = {"scale": "scale_M", "bias": "bias_M"}
_DENSE = {"wi": "wi_MH", "wo": "wo_HM"}
_EXPERTS = {"wg": "wg_ME", "wi": "wi_EMH", "wo": "wo_EHM"}
_SLOW = pytest.mark.slow
_RARE = [pytest.mark.slow, pytest.mark.exhaustive]


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(onefile, "SIZES", SIZES)
    monkeypatch.setattr(onefile, "B", B)


@pytest.fixture
def eager(monkeypatch):
    """Annotations need a traced function; without them, all parts can be computed eagerly."""
    monkeypatch.setattr(onefile, "split", lambda x, dim, count: tf.convert_to_tensor(x))
    monkeypatch.setattr(onefile, "replicate", tf.convert_to_tensor)


def _task_params():
    p = small_task.task_params(dropout=0.0)
    p.Set(source_vocab_size=V, target_vocab_size=V, dim=SIZES["M"], label_smoothing=0.0)
    for stack in (p.encoder, p.decoder):
        stack.dense.hidden_dim = SIZES["H"]
        stack.layer.attention.Set(num_heads=SIZES["N"], head_dim=SIZES["K"])
        stack.moe.Set(hidden_dim=SIZES["H"], num_experts=SIZES["E"])
    return p


def _named(weights, names):
    return {new: weights[old] for old, new in names.items()}


def _stack_as_in_the_file(stack, embedding):
    layers = []
    for layer in stack.layers:
        names = _EXPERTS if "wg" in layer.feed_forward else _DENSE
        parts = NestedMap(
            own=NestedMap(
                **_named(layer.self_norm, _NORM), **_named(layer.self_attention, _ATTENTION)
            ),
            feed_forward=NestedMap(
                **_named(layer.feed_forward_norm, _NORM), **_named(layer.feed_forward, names)
            ),
        )
        if "source_norm" in layer:
            parts.source = NestedMap(
                **_named(layer.source_norm, _NORM), **_named(layer.source_attention, _ATTENTION)
            )
        layers.append(parts)
    return NestedMap(layers=layers, embedding_VM=embedding.table, **_named(stack.norm, _NORM))


def _as_in_the_file(theta):
    """The library's tree of weights, gradients or the like, as the file has it."""
    decoder = _stack_as_in_the_file(theta.decoder, theta.target_embedding)
    decoder.softmax_MV = theta.softmax
    encoder = _stack_as_in_the_file(theta.encoder, theta.source_embedding)
    return NestedMap(encoder=encoder, decoder=decoder)


def _batch(seed):
    """Pairs of different lengths; sources end with EOS, and targets also begin with BOS."""
    rng = np.random.default_rng(seed)
    source_BT = np.full((B, T), onefile.PAD, np.int32)
    target_BL = np.full((B, L + 1), onefile.PAD, np.int32)
    for source_T, target_L in zip(source_BT, target_BL, strict=True):
        source = [*rng.integers(4, V, rng.integers(1, T)), onefile.EOS]
        target = [onefile.BOS, *rng.integers(4, V, rng.integers(1, L)), onefile.EOS]
        source_T[: len(source)] = source
        target_L[: len(target)] = target
    return NestedMap(source_BT=source_BT, target_BL=target_BL)


def _as_in_the_library(batch):
    """The features and labels of the same pairs, one in each row."""

    def side(name, ids):
        return {
            f"{name}_ids": ids,
            f"{name}_segment_ids": (ids != onefile.PAD).astype(np.int32),
            f"{name}_positions": np.tile(np.arange(ids.shape[1], dtype=np.int32), (B, 1)),
        }

    labels = batch.target_BL[:, 1:]
    weights = (labels != onefile.PAD).astype(np.float32)
    features = NestedMap(
        **side("source", batch.source_BT), **side("target", batch.target_BL[:, :-1])
    )
    return features, NestedMap(target_labels=labels, target_weights=weights)


def test_the_layer_equals_the_library_s(eager, monkeypatch):
    """In training, so that experts overflow and second experts are asked for at random."""
    size = 16
    layer = (
        MoELayer.Params()
        .Set(dim=SIZES["M"], hidden_dim=SIZES["H"], num_experts=4, group_size=size)
        .Instantiate(building.Unannotated())
    )
    theta = building.random_theta(layer).Transform(tf.constant)
    rng = np.random.default_rng(2)
    x_GSM = tf.constant(rng.standard_normal((3, size, SIZES["M"])), tf.float32)
    valid_GS = tf.constant(rng.uniform(size=(3, size)) < 0.9, tf.float32)
    context = Context(Mode.TRAIN, tf.constant([7, 8]))
    want_GSM, routing = layer.FProp(theta, x_GSM, valid_GS, context)
    assert routing.overflow > 0
    assert 0.1 < routing.second_dispatched < 0.9

    def uniform(shape, seed, alg):
        assert shape == [3, size, 1] and seed == [7, 8] and alg == "threefry"
        return random.random_uniform((3, size), context.seed_for(""))[..., None]

    monkeypatch.setattr(onefile.tf.random, "stateless_uniform", uniform)
    weights = NestedMap(_named(theta, _EXPERTS))
    got_GSM, balance = onefile.moe(weights, x_GSM, valid_GS, seed=[7, 8])
    np.testing.assert_allclose(got_GSM, want_GSM, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(balance, routing.balance_loss, rtol=1e-5)


def test_logits_and_loss_equal_the_library_s(eager):
    task = _task_params().Instantiate(building.Unannotated())
    theta = building.random_theta(task).Transform(tf.constant)
    batch = _batch(0)
    features, labels = (tree.Transform(tf.constant) for tree in _as_in_the_library(batch))
    want_BLV, _ = task.FProp(theta, features, Context(Mode.EVAL))
    want, terms = task.Loss(theta, features, labels, Context(Mode.EVAL))

    weights = _as_in_the_file(theta)
    source, _ = onefile.encode(weights, tf.constant(batch.source_BT))
    inputs_BL = tf.constant(batch.target_BL[:, :-1])
    x_BLM, *_ = onefile.stack(weights.decoder, inputs_BL, range(L), np.tri(L)[None], source)
    got_BLV = x_BLM @ weights.decoder.softmax_MV
    is_token = labels.target_weights.numpy() > 0
    np.testing.assert_allclose(got_BLV[is_token], want_BLV[is_token], rtol=1e-5, atol=1e-5)

    assert terms.aux_loss > 0
    got = onefile.loss_of(weights, batch.Transform(tf.constant))
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.slow
def test_steps_of_adafactor_equal_the_library_s():
    task = _task_params().Instantiate(building.Unannotated())
    p = Adafactor.Params()
    p.schedule.Set(multiplier=1.0, decay_start=1000, ramp_up_steps=100)
    optimizer = p.Instantiate()
    want = building.random_theta(task).Transform(tf.constant)
    want_slots = optimizer.slot_specs(task.weight_specs).Transform(lambda s: tf.zeros(s.shape))

    got = _as_in_the_file(want)
    names = got.Pack(name for name, _ in got.FlattenItems())
    slots = names.Transform(
        lambda name, x: onefile.means(tf.zeros_like(x), name.rpartition("_")[2]), got
    )
    for step in range(3):
        gradients = building.random_theta(task, seed=10 + step)
        gradients.source_embedding.table[5] = 0.0  # A piece that no text has.
        gradients.target_embedding.table *= 1e-6
        gradients.target_embedding.table[5] = 0.0
        gradients = gradients.Transform(tf.constant)
        want, want_slots = optimizer.update(
            want, want_slots, gradients, tf.constant(step), weight_specs=task.weight_specs
        )
        updated = names.Transform(
            lambda name, x, gradient, own, step=step: onefile.adafactor(
                step + 1, name, x, gradient, *own
            ),
            got,
            _as_in_the_file(gradients),
            slots,
        )
        got = updated.Transform(lambda leaf: leaf[0])
        slots = updated.Transform(lambda leaf: leaf[1:])
        building.assert_close(got, _as_in_the_file(want), rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def stepped():
    """Number of devices -> the compiled step and its results after one step, computed once."""

    @functools.cache
    def computed(num_devices):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(onefile, "SIZES", SIZES)
            patch.setattr(onefile, "D", num_devices)
            state = onefile.new_state(np.random.default_rng(0))
            step = onefile.compiled(onefile.train_step, ("state",), state=state, batch=_batch(0))
            return step, step(state, _batch(0)).Transform(np.asarray)

    return computed


@pytest.mark.parametrize(
    "num_devices", [pytest.param(4, marks=_SLOW), *(pytest.param(n, marks=_RARE) for n in (2, 8))]
)
def test_partitioned_training_equals_unpartitioned(stepped, num_devices):
    _, want = stepped(1)
    _, got = stepped(num_devices)
    np.testing.assert_allclose(got.loss, want.loss, rtol=1e-5)
    building.assert_close(got.state, want.state, rtol=1e-3)


def _theta_of_texts(task):
    """Random weights that make EOS probable, but not PAD and BOS, which the file never writes."""
    theta = building.random_theta(task)
    theta.decoder.norm.scale[:] = 1.0
    theta.decoder.norm.bias[:] = 1.0
    theta.softmax[:, : onefile.EOS] = -10.0
    theta.softmax[:, onefile.EOS] += 0.3
    return theta


def _translated(num_devices, k):
    task = _task_params().Instantiate(building.Unannotated())
    weights = _as_in_the_file(_theta_of_texts(task))
    batch = NestedMap(source_BT=_batch(1).source_BT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onefile, "D", num_devices)
        search = functools.partial(onefile.flat_beam_search, k=k, L=L)
        search.__name__ = "search"
        return np.asarray(
            onefile.compiled(search, theta=weights, batch=batch)(weights, batch).ids_BL
        )


@pytest.mark.parametrize(
    "num_devices",
    [pytest.param(4, marks=_SLOW), *(pytest.param(n, marks=_RARE) for n in (1, 2, 8))],
)
def test_translations_equal_the_library_s(num_devices):
    k = 3
    got_BL = _translated(num_devices, k)

    decode = small_task.Experiment.params().decode
    decode.Set(beam_size=k, num_best=1, max_target_len=L)
    features, _ = _as_in_the_library(_batch(1))
    features = NestedMap({name: x for name, x in features.items() if "source" in name})
    task = _task_params().Instantiate(building.Unannotated())
    theta = _theta_of_texts(task)
    search = building.compile_fn(
        lambda theta, features: task.Predict(theta, features, decode),
        1,
        theta=building.theta_specs(task),
        features=features.Transform(
            lambda x: onefile.gshard.TensorSpec(x.shape, x.dtype.name, "BL")
        ),
    )
    want = search(theta, features).Transform(np.asarray)

    lengths = set()
    for got_L, ids, length in zip(got_BL, want.ids[:, 0], want.lengths[:, 0], strict=True):
        tokens = ids[: length - 1]
        assert ids[length - 1] == onefile.EOS
        assert got_L.tolist() == [onefile.BOS, *tokens, *[onefile.PAD] * (L - length)]
        lengths.add(length)
    assert len(lengths) > 1


def test_made_up_pairs_and_files_of_pairs(tmp_path):
    rng = np.random.default_rng(0)
    pairs = onefile.read_pairs(None, rng)
    for source, target in pairs:
        digits = source.split()
        words = target.split()
        assert len(digits) == len(words)
        assert (digits[0] == "7") == (words[-1] == "seven")

    path = tmp_path / "pairs.tsv"
    path.write_text('Zwei Hunde.\tTwo dogs.\nEin "#Rad".\tA wheel.\n', encoding="utf-8")
    want = [["Zwei Hunde.", "Two dogs."], ['Ein "#Rad".', "A wheel."]]
    assert onefile.read_pairs(str(path), rng).tolist() == want

    path.write_text("Zwei Hunde.\tTwo dogs.\nEin Rad.\n", encoding="utf-8")
    with pytest.raises(ValueError, match="row 2"):
        onefile.read_pairs(str(path), rng)


def test_pieces_begin_and_end_and_can_be_read_again(monkeypatch):
    monkeypatch.setattr(onefile, "SIZES", {"V": 4000})
    texts = ["Zwei Hunde.", "Ein Rad."] * 50 + ["Ein Ruß."]
    ids_NL, tokenizer = onefile.tokenized(texts)
    assert ids_NL.shape == (101, onefile.L + 1)
    assert (ids_NL[:, 0] == onefile.BOS).all()
    for text, ids in zip(texts, ids_NL, strict=True):
        assert (ids == onefile.EOS).sum() == 1
        assert tokenizer.decode(ids[ids > onefile.EOS].tolist()) == text


def test_it_has_350_lines():
    lines = _PATH.read_text().splitlines()
    assert len(lines) <= 350
    assert max(map(len, lines)) <= 100


def _run(folder, *flags):
    """Runs the file as a reader does; returns the losses and (reference, translation) pairs."""
    result = subprocess.run(
        [sys.executable, _PATH, *flags],
        cwd=folder,
        env={**scripts.os.environ, "PYTHONPATH": str(scripts.ROOT)},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    losses = re.findall(r"^step +\d+  loss ([\d.]+)$", result.stdout, re.MULTILINE)
    translated = re.findall(r"^reference: +(.*)\ntranslation: *(.*)$", result.stdout, re.MULTILINE)
    return [float(loss) for loss in losses], translated


@pytest.mark.slow
@pytest.mark.exhaustive
def test_it_learns_its_own_language(tmp_path):
    losses, translated = _run(tmp_path)
    assert losses[-1] < 0.1 * losses[0]
    right = []
    for reference, translation in translated:
        words = zip(reference.split(), translation.split(), strict=False)
        right += [word == ours for word, ours in words]
    assert len(translated) == 8 and np.mean(right) > 0.7


@pytest.mark.exhaustive
@pytest.mark.slow
def test_it_reads_a_file(tmp_path):
    lines = [f"der {n} Hund\tthe {n} dog\n" for n in range(1000)]
    (tmp_path / "pairs.tsv").write_text("".join(lines), encoding="utf-8")
    losses, translated = _run(tmp_path, "--tsv=pairs.tsv", "--steps=41", "--devices=2")
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert len(translated) == 8
