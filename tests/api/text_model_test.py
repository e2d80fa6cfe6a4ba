"""Models that decode lines: accepted input, and mistakes that are refused in one line."""

import pathlib

import pytest

from lingvo_gshard.api import loading
from lingvo_gshard.api.text_model import TextModel
from lingvo_gshard.decoding.translator import Translator
from tests.decoding.reverser import Letters, Reverser


@pytest.fixture
def model():
    return TextModel(Translator(Reverser(2, (4, 8)), Letters(), Letters()), "RUN")


def test_a_str_is_one_line_and_a_list_is_many(model):
    assert model.translate("abc") == "cba"
    assert model.translate(["abc", "de", "f"]) == ["cba", "ed", "f"]
    assert model.translate(line for line in ("ab", "")) == ["ba", ""]
    assert model.translate([]) == []


def test_the_best_results_have_scores(model):
    (first,) = model.nbest("abc")
    assert [hypothesis.text for hypothesis in first] == ["cba", "aaa"]
    assert first[0].score > first[1].score


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["a", 3], "line 2: expected a str, got int 3"),
        (b"abc", "lines: expected a str or a list of them, got b'abc'"),
        (7, "lines: expected a str or a list of them, got 7"),
    ],
)
def test_other_lines_are_refused_by_their_number(model, lines, message):
    with pytest.raises(ValueError, match=message):
        model.translate(lines)


def test_unsupported_tasks_are_refused(model):
    with pytest.raises(
        ValueError, match="reverser translates lines: use gshard translate, not gen"
    ):
        model.generate("abc")
    with pytest.raises(ValueError, match="dee: the model was trained on de. Did you mean de?"):
        model.translate("abc", source_lang="dee")
    with pytest.raises(ValueError, match="target_lang fr: the model translates into English"):
        model.translate("abc", target_lang="fr")
    assert repr(model) == "<reverser of RUN, which translates lines>"


def test_a_folder_without_a_run_or_bundle_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a bundle, with bundle.json, or a run, with experiment"):
        loading.load(tmp_path)
    with pytest.raises(ValueError, match="platform='gpu': expected one of auto, cpu, cuda, tpu"):
        loading.load(pathlib.Path("/none"), platform="gpu")


def test_a_bundle_takes_no_settings(tmp_path):
    (tmp_path / "bundle.json").touch()
    with pytest.raises(ValueError, match="is a bundle, whose .* decode.beam_size=1 needs a run"):
        loading.load(tmp_path, settings={"decode.beam_size": 1})
