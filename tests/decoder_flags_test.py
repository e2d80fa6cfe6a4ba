"""Flags that name a model; translate_test, serve_test and export_bundle_test have the programs."""

import types

import pytest
from absl import flags
from absl.testing import flagsaver

from lingvo_gshard import decoder_flags
from lingvo_gshard.decoding import reading

_LANGUAGES = ("de", "fr")


@pytest.fixture(autouse=True)
def _flags_are_parsed():
    flags.FLAGS.mark_as_parsed()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "give either --logdir or --bundle; see --help"),
        ({"logdir": "a", "bundle": "b"}, "give either --logdir or --bundle; see --help"),
        ({"bundle": "b", "average_checkpoints": 2}, "--average_checkpoints needs --logdir"),
        ({"bundle": "b", "batch_size": 2}, "--batch_size needs --logdir"),
        ({"bundle": "b", "weights": "INT8"}, "--weights needs --logdir"),
        ({"bundle": "b", "attention": True}, "--attention needs --logdir; a bundle has it if it"),
    ],
)
def test_flags_that_do_not_name_one_model_are_refused(given, message):
    with flagsaver.flagsaver(**given), pytest.raises(ValueError, match=message):
        decoder_flags.check()


@pytest.mark.parametrize(
    "given",
    [
        {"bundle": "b", "beam_size": 2},
        {"logdir": "a", "average_checkpoints": 2, "batch_size": 2, "attention": True},
        {"logdir": "a", "weights": "BFLOAT16"},
    ],
)
def test_valid_flags_are_accepted(given):
    with flagsaver.flagsaver(**given):
        decoder_flags.check()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"beam_size": 2}, "b: its beam is fixed and gives 2 translations of a line; export it"),
        ({"nbest": 3}, "b: its beam is fixed and gives 2 translations of a line; export it"),
        ({"source_lang": "dee"}, r"model was trained on de, fr\. Did you mean de\?$"),
        ({"source_lang": "xx"}, r"--source_lang=xx: the model was trained on de, fr\.$"),
    ],
)
def test_an_unsuitable_bundle_is_refused_before_devices_start(monkeypatch, given, message):
    monkeypatch.setattr(decoder_flags, "_start_devices", None)
    spec = types.SimpleNamespace(
        num_best=2,
        source_languages=_LANGUAGES,
        reading=types.SimpleNamespace(kind="parallel", noun="translation"),
        kind="parallel",
    )
    with flagsaver.flagsaver(bundle="b", **given), pytest.raises(ValueError, match=message):
        decoder_flags.from_bundle(spec)


def test_a_variety_of_english_is_a_source_language():
    reading.check_language("en-GB", ("de", "en-GB"), "parallel")
    with pytest.raises(ValueError, match=r"the model was trained on de, en-GB\. Did you mean"):
        reading.check_language("en-US", ("de", "en-GB"), "parallel")


def test_a_model_without_languages_is_reported():
    with pytest.raises(ValueError, match="--source_lang=de: the model names no languages"):
        reading.check_language("de", (), "parallel")
