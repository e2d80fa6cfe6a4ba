"""A model of pairs without English is trained, evaluated and decoded by direction."""

import pytest

from data_prep import tsv
from data_prep.config import BuildConfig
from data_prep.tsv import Pair
from lingvo_gshard.evaluation import decode_split
from lingvo_gshard.input import example_codec
from lingvo_gshard.input.batches import TranslationInput
from lingvo_gshard.runs import launch as launches
from lingvo_gshard.runs import modes
from lingvo_gshard.runs.run import open_run
from lingvo_gshard.train.summaries import EVAL_METRICS, read_lines
from tests.data_prep import prepared

_ROWS = {"batch_size": 8, "source_len": 16, "target_len": 16}
_SETTINGS = [
    *(f"input.{name}={value}" for name, value in _ROWS.items()),
    *(f"eval_input.{name}={value}" for name, value in _ROWS.items()),
    "task.encoder.moe.group_size=32",
    "task.decoder.moe.group_size=32",
    "train.max_steps=2",
    "train.iterations_per_loop=2",
    "decode.batch_size=4",
    "decode.max_source_len=16",
    "decode.max_target_len=8",
]


def _data(folder):
    """Prepares German with French, French with English, and German with English to test."""
    german = [f"das ist Satz {number} hier" for number in range(60)]
    french = [f"voici la phrase {number} ici" for number in range(60)]
    english = [f"this is sentence {number} here" for number in range(60)]
    tsv.write(folder / "text/train/de-fr.tsv.gz", map(Pair, german[:50], french[:50]))
    tsv.write(folder / "text/train/fr-en.tsv.gz", map(Pair, french[:50], english[:50]))
    tsv.write(folder / "text/dev/de-fr.tsv.gz", map(Pair, german[50:53], french[50:53]))
    tsv.write(folder / "text/test/de-en.tsv.gz", map(Pair, german[55:57], english[55:57]))
    tsv.write(folder / "text/test/de-fr.tsv.gz", map(Pair, german[57:], french[57:]))
    config = BuildConfig(source_vocab_size=400, target_vocab_size=400, directions="many_to_many")
    prepared.build(folder / "text", folder / "data", config)
    return str(folder / "data")


@pytest.mark.slow
def test_it_is_evaluated_and_decoded_by_direction(tmp_path, capsys):
    data = _data(tmp_path)
    facts = TranslationInput.Facts(data)
    launch = launches.Launch("toy.MoE8E4L", (), data, facts).changed(_SETTINGS)
    run = open_run(launch, str(tmp_path / "run"), 2)
    modes.train(run)
    modes.evaluate(run, "dev")
    names = {line["name"] for line in read_lines(tmp_path / "run" / EVAL_METRICS)}
    assert {"dev_de-fr", "dev_fr-de"} <= names

    decode_split.decode_split(run, "test")
    folder = tmp_path / "run/decode_test"
    assert (folder / "fr-de.source.txt").read_text().startswith("<2de> voici la phrase 57")
    assert (folder / "de-fr.source.txt").read_text().startswith("<2fr> das ist Satz 57")
    # No training text has this pair, but both of its languages.
    assert (folder / "en-de.reference.txt").read_text().startswith("das ist Satz 55")
    scored = capsys.readouterr().out
    assert all(code in scored for code in ("de-fr", "fr-de", "en-de"))
    assert set(example_codec.source_languages(facts.languages)) == {"de", "en", "fr"}
