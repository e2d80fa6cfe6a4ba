"""SavedModels have a bundle's translations, in a program with only TensorFlow."""

import functools
import importlib.util
import json
import math
import os
import subprocess
import sys
import types

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard import registry
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.decoding.bundle import Decoder
from lingvo_gshard.decoding.bundle_spec import DecoderSpec
from lingvo_gshard.decoding.languages import Languages
from lingvo_gshard.decoding.translator import Translator
from lingvo_gshard.input import sentences
from lingvo_gshard.input.manifest import Kind
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.runs import saved_model, saved_model_request
from lingvo_gshard.train.programs import Programs
from tests.decoding import vocabularies
from tests.layers import building
from tests.spmd import functions

# A line that is split between sentences, one as long as its row, and a word that is cut.
_LONG = "Ba ke li mo. " * 9 + "Mo li, ba ke."
_LINES = [
    "ba ke li",
    "",
    "  \t ",
    "a line,\u00a0of words",
    _LONG,
    "mo" * 60,
    "ﬁ\u200b é 語😀",
    "ke",
]

# The library and JAX cannot be imported here.
_PROGRAM = """
import json, sys

class Blocker:
    def find_spec(self, name, *args):
        if name.split(".")[0] in ("lingvo_gshard", "jax", "jaxlib"):
            raise ImportError(name)

sys.meta_path.insert(0, Blocker())
import tensorflow as tf
import tensorflow_text

folder, request = sys.argv[1], json.loads(sys.argv[2])
loaded = tf.saved_model.load(folder)
serve = loaded.signatures["serving_default"]
answers = []
for inputs in request:
    tensors = {name: tf.constant(value, tf.string) for name, value in inputs.items()}
    try:
        results = serve(**tensors).items()
        answer = {}
        for name, value in results:
            array = value.numpy()
            is_text = value.dtype == tf.string
            answer[name] = [text.decode() for text in array.flat] if is_text else array.tolist()
        answers.append(answer)
    except tf.errors.InvalidArgumentError as error:
        answers.append(str(error))

# Were the weights constants, another value would change nothing.
softmax = loaded.theta["softmax"]
softmax.assign(tf.zeros_like(softmax))
inputs = {name: tf.constant(v) for name, v in request[0].items()}
scores = loaded.translate(**inputs)["scores"].numpy().tolist()

softmax.assign(tf.fill(softmax.shape, float("nan")))
try:
    problem = str(loaded.translate(**inputs))
except tf.errors.InvalidArgumentError as error:
    problem = error.message
print(json.dumps([len(loaded.theta), scores, answers, problem]))
"""


def _served(folder, request, cwd):
    """Loads a SavedModel in a process without this library; returns its results.

    These are the number of variables, the first input's scores if all pieces are equally likely,
    the signature's result for each input, and its error if a weight is not finite.
    """
    env = {name: value for name, value in os.environ.items() if name != "TF_XLA_FLAGS"}
    command = [sys.executable, "-I", "-c", _PROGRAM, str(folder), json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _vocabularies(folder):
    return folder / "source.model", folder / "target.model"


def _decoder(folder, targets, num_best):
    """Returns a decoder on two devices with random weights, its settings, and its tokenizers."""
    symbols = [f"<2{code}>" for code in targets]
    source = vocabularies.train(folder / "source.model", symbols=symbols)
    target = vocabularies.train(folder / "target.model", ["the quick brown fox", "jumps over it"])

    params = registry.get_params("toy.MoE8E4L")
    params.task.Set(
        source_vocab_size=source.vocab_size, target_vocab_size=target.vocab_size, dim=16
    )
    for stack in (params.task.encoder, params.task.decoder):
        stack.num_layers = 2
    params.decode.Set(
        batch_size=2, beam_size=3, num_best=num_best, max_source_len=24, max_target_len=8
    )
    partitioning = functions.partitioning(2)
    lengths = sentences.lengths(params.decode.max_source_len, "decode.max_source_len")
    spec = DecoderSpec("toy.MoE8E4L", ("de",), 2, lengths, num_best, 2, targets=targets)
    theta = building.random_theta(TaskModel(params, partitioning).task)
    decoder = Decoder(spec, theta, Programs(TaskModel(params, partitioning)).decoder)
    return decoder, params, (source, target)


def _check(answer, expected, num_best):
    best = [translations[0] for translations in expected]
    assert answer["translations"] == [translation.text for translation in best]
    assert answer["scores"] == pytest.approx([t.score for t in best], abs=1e-5)
    assert answer["finishes"] == [t.finish.value for t in best]
    assert (set(answer) == {"translations", "scores", "finishes"}) == (num_best == 1)
    if num_best == 1:
        return

    finishes = iter(answer["nbest_finishes"])
    texts = iter(answer["nbest_translations"])
    rows = zip(expected, answer["nbest_scores"], answer["nbest_num_tokens"], strict=True)
    for translations, scores, counts in rows:
        missing = num_best - len(translations)
        assert counts == [t.num_tokens for t in translations] + [0] * missing
        assert scores == pytest.approx([t.score for t in translations] + [0] * missing, abs=1e-5)
        assert [next(texts) for _ in scores] == [t.text for t in translations] + [""] * missing
        wanted = [t.finish.value for t in translations] + ["stop"] * missing
        assert [next(finishes) for _ in scores] == wanted


def test_no_text_is_in_an_n_best_list_twice():
    """As in the Translator, the following hypotheses move up, and missing ones have 0 tokens."""
    found = saved_model._Found(
        text=tf.constant([["b", "b", "a", "b"], ["x", "y", "", ""], ["", "q", "", "q"]]),
        num_tokens=tf.constant([[4, 3, 2, 5], [2, 3, 0, 0], [1, 2, 0, 3]]),
        scores=tf.constant([[-1.0, -2, -3, -4], [-1, -2, 0, 0], [-1, -2, 0, -4]]),
        is_cut=tf.constant([[False, True, True, True], [False, True, False, False], [True] * 4]),
    )
    distinct = saved_model._distinct(found)
    want = [[b"b", b"a", b"", b""], [b"x", b"y", b"", b""], [b"", b"q", b"", b""]]
    assert distinct.text.numpy().tolist() == want
    assert distinct.num_tokens.numpy().tolist() == [[4, 2, 0, 0], [2, 3, 0, 0], [1, 2, 0, 0]]
    assert distinct.scores.numpy().tolist() == [[-1, -3, 0, 0], [-1, -2, 0, 0], [-1, -2, 0, 0]]
    finishes = [[b"stop", b"length", *[b"stop"] * 2]] * 2 + [[b"length"] * 2 + [b"stop"] * 2]
    assert distinct.finishes.numpy().tolist() == finishes


@pytest.mark.slow
def test_tensorflow_alone_gives_the_translations_of_the_translator(tmp_path):
    decoder, params, tokenizers = _decoder(tmp_path, (), num_best=2)
    folder = tmp_path / "served" / "1"
    saved_model.save(folder, decoder, params, _vocabularies(tmp_path))
    assert not {path.name for path in folder.iterdir()} - saved_model_request._ENTRIES
    assert [path.name for path in folder.parent.iterdir()] == ["1"]

    # Calls without lines, with fewer lines than a batch, and with lines of all lengths.
    request = [{"text": _LINES}, {"text": []}, {"text": _LINES[:1]}]
    num_variables, uniform_scores, answers, problem = _served(folder, request, tmp_path)
    assert "line 1 has no translation" in problem and "not finite (NaN or infinite)" in problem
    expected = list(Translator(decoder, *tokenizers).decode(_LINES))
    texts = {translation.text for translations in expected for translation in translations}
    assert len(texts) > 5
    assert num_variables == len(decoder.theta.Flatten())
    # If all pieces are equally likely, the best hypothesis is the shortest, EOS of length 1.
    uniform = -math.log(tokenizers[1].vocab_size)
    assert uniform_scores[0] == pytest.approx(uniform, abs=1e-5) and uniform_scores[1] == 0.0
    for answer, count in zip(answers, (len(_LINES), 0, 1), strict=True):
        _check(answer, expected[:count], 2)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_each_line_may_have_its_own_target(tmp_path):
    decoder, params, tokenizers = _decoder(tmp_path, ("de", "fr"), num_best=1)
    folder = tmp_path / "model"
    saved_model.save(folder, decoder, params, _vocabularies(tmp_path))

    # Text that looks like a target's token is translated as text.
    all_lines = [*_LINES, "ke <2fr> li", "<2de> ba"]
    targets = ["de", "fr"] * (len(all_lines) // 2)
    wrong = {"text": ["ba"], "target_lang": ["sw"]}
    request = [{"text": all_lines, "target_lang": targets}, wrong]
    _, _, (answer, refused), _ = _served(folder, request, tmp_path)
    lines = [f"<2{code}> {line}" for code, line in zip(targets, all_lines, strict=True)]
    _check(answer, list(Translator(decoder, *tokenizers).decode(lines)), 1)
    assert "target_lang: expected one of de, fr" in refused and "sw" in refused


def test_a_foreign_folder_and_a_failed_export_change_nothing(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    spec = types.SimpleNamespace(kind=Kind.PARALLEL, sources=(), weights="float32")
    decoder = Decoder(spec, None, None)
    with pytest.raises(ValueError, match="holds notes.txt, which is not part of a SavedModel"):
        saved_model.save(folder, decoder, None, (folder, folder))

    with pytest.raises(ValueError, match=r"TensorFlow takes \* and \[ in .* for a pattern"):
        saved_model.save(tmp_path / "a[b]*" / "1", decoder, None, (folder, folder))

    # The other process fails after the weights are written.
    def fail(function, partial, *_):
        assert (partial / "weights.safetensors").exists()
        raise ChildProcessError("write: killed")

    monkeypatch.setattr(saved_model.tracer, "run", fail)
    small, params, _ = _decoder(tmp_path, (), num_best=1)
    with pytest.raises(ChildProcessError):
        saved_model.save(tmp_path / "new", small, params, (folder, folder))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "model",
        "source.model",
        "target.model",
    ]
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_weights_in_fewer_bits_are_refused(tmp_path):
    spec = types.SimpleNamespace(kind=Kind.PARALLEL, sources=(), weights="int8")
    with pytest.raises(ValueError, match="the weights are int8, and a SavedModel needs float32"):
        saved_model.save(tmp_path, Decoder(spec, None, None), None, (tmp_path, tmp_path))


def test_without_tensorflow_text_it_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"^--export_saved_model needs tensorflow-text.*\]'`.*it\.$"
    ):
        saved_model_request.check_installed()


def test_tokens_of_languages_are_refused():
    known = Languages(Kind.PARALLEL, (), sources=("deu_Latn",), targets=("fra_Latn",))
    with pytest.raises(ValueError, match="vocabulary has tokens of languages, .* a bundle"):
        saved_model_request.check_languages(known)


def test_the_sums_name_a_damaged_file(tmp_path, monkeypatch):
    def trace(function, folder, *_):
        (folder / "variables").mkdir()
        (folder / "saved_model.pb").write_bytes(b"graph")
        (folder / "variables/variables.index").write_bytes(b"index")

    monkeypatch.setattr(saved_model.tracer, "run", trace)
    spec = types.SimpleNamespace(kind=Kind.PARALLEL, sources=(), weights="float32")
    decoder = Decoder(spec, NestedMap(w=np.ones(2, np.float32)), None)
    for _ in range(2):  # It also replaces an earlier one.
        saved_model.save(tmp_path / "1", decoder, None, (tmp_path, tmp_path))

    command = ["sha256sum", "--check", "--quiet", saved_model.SUMS]
    check = functools.partial(subprocess.run, command, cwd=tmp_path / "1", capture_output=True)
    assert check().returncode == 0 and check().stdout == b""
    (tmp_path / "1/saved_model.pb").write_bytes(b"grapf")
    assert check().returncode == 1 and check().stdout == b"saved_model.pb: FAILED\n"
