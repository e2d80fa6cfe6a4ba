"""A folder is taken apart: each field of its files, and each tensor, is changed by itself.

Each change must change the imported run, be refused, or be named as not used. The goldens of the
other tests show that fields with an effect have the same one in transformers.
"""

import json
import re

import numpy as np
import pytest

from lingvo_gshard.files import safetensors_file
from lingvo_gshard.hugging_face import importing
from lingvo_gshard.hugging_face.folder import Folder
from lingvo_gshard.hugging_face.names import Family
from lingvo_gshard.model import placement
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.runs import launch as launches
from tests.hugging_face import folders
from tools import fuzz

_FILES = (
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
)
# The new value of each field, if it does not have it already.
_OTHERS = (7, "x", [9])
_REFUSED = "refused"
_CHANGED = "changed"
_NAMED = "named"


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    path = tmp_path_factory.mktemp("apart") / "theirs"
    folders.write(path)
    return path


class _Importer:
    """Imports a folder without writing a run, and builds each model once."""

    def __init__(self, folder):
        self._folder = folder
        self._built = {}
        self.unchanged = self.read()

    def read(self):
        """Returns the imported settings and weights, and the lines that name the rest."""
        source = importing.read(self._folder)
        params = launches.experiment_params(source.launch())
        if source.settings not in self._built:
            model = TaskModel(params, placement.partitioning(params, 1))
            self._built[source.settings] = model.state_spec.theta
        files = Folder(self._folder, source.config, self._built[source.settings])
        arrays = {path: np.asarray(x).tobytes() for path, x in files.arrays.items()}
        imported = (source.settings, source.decode_settings, source.vocabulary.model, arrays)
        return imported, importing.not_used(source, files)


@pytest.fixture(scope="module")
def importer(theirs):
    return _Importer(theirs)


def _outcome(importer, before, file, name):
    try:
        after, not_used = importer.read()
    except ValueError as error:
        assert str(importer._folder) in str(error) and "\n" not in str(error), error
        return _REFUSED
    if after != before:
        return _CHANGED
    named = [line for line in not_used if line.startswith(file) and name in line]
    assert named, (file, name, not_used)
    return _NAMED


# One file stands for the others among the quick tests.
@pytest.mark.slow
@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, marks=[] if file == "special_tokens_map.json" else pytest.mark.slow)
        for file in _FILES
    ],
)
def test_every_field_is_followed_or_refused_or_named(theirs, importer, file):
    path = theirs / file
    text = path.read_text()
    fields = json.loads(text)
    before, _ = importer.unchanged
    outcomes = {}
    try:
        for name in [*fields, "of_nobody"]:
            outcomes[name] = set()
            for value in _OTHERS:
                if value != fields.get(name):
                    path.write_text(json.dumps(fields | {name: value}))
                    outcomes[name].add(_outcome(importer, before, file, name))
    finally:
        path.write_text(text)

    assert outcomes["of_nobody"] == {_NAMED}
    expected = {
        "config.json": {"d_model": {_REFUSED}, "dropout": {_REFUSED}, "torch_dtype": {_NAMED}},
        "generation_config.json": {
            "num_beams": {_CHANGED, _REFUSED},
            "eos_token_id": {_REFUSED},
            "repetition_penalty": {_NAMED},
        },
        "special_tokens_map.json": {"eos_token": {_REFUSED}},
        "tokenizer_config.json": {"legacy_behaviour": {_REFUSED}, "src_lang": {_NAMED}},
    }
    assert outcomes | expected[file] == outcomes


@pytest.mark.slow
def test_every_kind_of_tensor_is_followed_or_refused_or_named(theirs, importer):
    """The first of each kind: logits_test.py compares the models with all of their layers."""
    path = theirs / "model.safetensors"
    content = path.read_bytes()
    tensors = {name: np.array(x) for name, x in safetensors_file.read(path).arrays.items()}
    before, _ = importer.unchanged
    outcomes = {}
    try:
        first_names = {re.sub(r"\d+", "", name): name for name in reversed(tensors)}
        for name in first_names.values():
            other = tensors[name].copy()
            other.flat[-1] += 1
            safetensors_file.write(path, tensors | {name: other}, {"format": "pt"})
            outcomes[name] = _outcome(importer, before, "tensors", name)
    finally:
        path.write_bytes(content)

    assert outcomes.pop("model.encoder.embed_positions.weights") == _NAMED
    assert set(outcomes.values()) == {_CHANGED} and len(outcomes) > 40


@pytest.mark.parametrize("flag", ["content", "lstrip", "normalized", "rstrip", "special"])
@pytest.mark.parametrize("token_id", ["0", pytest.param("1520", marks=pytest.mark.slow), "1704"])
def test_every_flag_of_a_token_is_refused_or_named(theirs, importer, token_id, flag):
    """The tokens are <s>, a language, and a word that a user added."""
    path = theirs / "tokenizer_config.json"
    text = path.read_text()
    fields = json.loads(text)
    token = fields["added_tokens_decoder"][token_id]
    token[flag] = "x" if flag == "content" else not token[flag]
    before, not_used = importer.unchanged
    assert f"{flag} of {token['content']}" not in str(not_used)
    try:
        path.write_text(json.dumps(fields))
        outcome = _outcome(importer, before, path.name, f"{flag} of {token['content']}")
    finally:
        path.write_text(text)
    is_followed_there = flag in ("content", "special") or (token_id == "1704" and "strip" in flag)
    assert outcome == (_REFUSED if is_followed_there else _NAMED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "num_parts"),
    [pytest.param(Family.M2M_100, 1, marks=pytest.mark.exhaustive), (Family.NLLB_MOE, 2)],
)
def test_no_change_is_accepted_silently(tmp_path, family, num_parts):
    folders.write(tmp_path / "theirs", family, num_parts)
    (kind, *_) = fuzz.kinds(model_dir=tmp_path / "theirs")
    counts = fuzz.outcomes(kind, 60, seed=5)
    assert {*counts} <= {"refused", "other", "named"}, counts
    assert min(counts["refused"], counts["other"], counts["named"]) > 2
