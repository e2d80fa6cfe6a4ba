"""Mistakes that are reported before the devices start."""

import pytest

from lingvo_gshard.input.base_input import DataFacts
from lingvo_gshard.runs import launch as launches
from lingvo_gshard.runs import opening
from lingvo_gshard.runs.launch import Launch
from tests.decoding import vocabularies

_TARGETS = ("<2de>", "<2fr>")


def _no_devices(model):
    raise AssertionError(f"The devices start for {model}.")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run without weights, whose data translates German into English and back."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    folder.parent.mkdir(exist_ok=True)
    tokenizer = vocabularies.train(folder.parent / "x.model", symbols=_TARGETS)
    content = (folder.parent / "x.model").read_bytes()
    facts = DataFacts(tokenizer.vocab_size, tokenizer.vocab_size, ("de", "en-de", "en-fr"))
    launch = Launch("toy.MoE8E4L", (), "/data", facts)
    launches.record(launch, str(folder), vocabularies=(content, content))
    return folder


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("decode.num_best=9", "num_best must be 1 to beam_size 4, got 9"),
        ("decode.top_p=0.5", "top_p must be None without a temperature"),
        ("decode.max_target_len=0", "max_steps must be at least 1, got 0"),
        ("decode.beam_size=1 decode.temperature=1 decode.top_k=10000", "at most the vocabulary"),
    ],
)
def test_a_search_that_cannot_be(run_dir, settings, message):
    opened = opening.to_decode(run_dir, _no_devices, settings=settings.split())
    with pytest.raises(ValueError, match=message), opened:
        pass


@pytest.mark.parametrize(
    ("target", "source", "message"),
    [
        ("dee", None, "target_lang dee: expected one of de, fr. Did you mean de?"),
        (None, None, "target_lang is missing: expected one of de, fr"),
        ("de", "xx", "--source_lang=xx: the model was trained on de, en"),
    ],
)
def test_a_language_that_the_model_does_not_know(run_dir, target, source, message):
    opened = opening.to_decode(
        run_dir, _no_devices, source_lang=source, check=lambda known: known.beginning(target)
    )
    with pytest.raises(ValueError, match=message), opened:
        pass


def test_a_program_that_is_for_other_models(run_dir):
    opened = opening.to_decode(run_dir, _no_devices, "generate")
    with pytest.raises(ValueError, match="translates lines: use gshard translate, not generate"):
        with opened:
            pass
