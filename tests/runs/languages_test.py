"""A new language for a pretrained model: data, fine-tuning, and translations by pairs."""

import numpy as np
import pytest

from bench import import_model
from data_prep import tsv
from data_prep.config import BuildConfig
from data_prep.tsv import Pair
from lingvo_gshard.checkpoints.checkpoints import Checkpoints
from lingvo_gshard.evaluation import decode_split
from lingvo_gshard.hugging_face import importing
from lingvo_gshard.input.batches import TranslationInput
from lingvo_gshard.input.tokenizer import Tokenizer
from lingvo_gshard.runs import launch as launches
from lingvo_gshard.runs import modes
from lingvo_gshard.runs.run import open_run
from tests.data_prep import prepared
from tests.input import fairseq_vocabulary_test

_SIZES = {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": 1706}
_ROWS = {"batch_size": 8, "source_len": 32, "target_len": 32}
_SETTINGS = [
    *(f"input.{name}={value}" for name, value in _ROWS.items()),
    *(f"eval_input.{name}={value}" for name, value in _ROWS.items()),
    "task.encoder.moe.group_size=32",
    "task.decoder.moe.group_size=32",
    "decode.batch_size=4",
    "decode.max_source_len=32",
    "decode.max_target_len=8",
]
_TUNED = [
    "train.max_steps=2",
    "train.iterations_per_loop=2",
    r"train.frozen=theta\.encoder\..*",
    r'train.warm_start_rules=((r"theta\.target_embedding\..*", "BY_PIECE"), (r"theta.*", "SAME"))',
    'train.warm_start_pieces=(("nds_Latn", "deu_Latn nld_Latn"),)',
    # The table has one more row than the pretrained model's.
    "task.source_vocab_size=None",
    "task.target_vocab_size=None",
]


def _theta(logdir):
    with Checkpoints(str(logdir)) as saved:
        arrays = saved.arrays(saved.latest())
        return {path: array[()] for path, array in arrays.items() if path.startswith("theta.")}


def _data(folder):
    """Prepares pairs of German and of Low German, for which the vocabulary gets a token."""
    train = [Pair(f"de Satz {i} hier", f"sentence {i} here") for i in range(60)]
    tsv.write(folder / "text" / "train" / "nds-en.tsv.gz", train)
    tsv.write(folder / "text" / "train" / "de-en.tsv.gz", train[:40])
    tsv.write(folder / "text" / "dev" / "nds-en.tsv.gz", [Pair("een Huus", "a house")] * 3)
    config = BuildConfig(
        vocabulary=str(folder / "pretrained" / "vocab" / "source.model"),
        directions="many_to_many",
        new_languages=("nds_Latn",),
        language_tokens={"nds": "nds_Latn"},
    )
    return prepared.build(folder / "text", folder / "data", config)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_pretrained_model_learns_a_new_language(tmp_path, capsys):
    fairseq_vocabulary_test.write_folder(tmp_path / "theirs", "nllb_bpe")
    import_model.write(tmp_path / "theirs", num_experts=2, num_parts=1, **_SIZES)
    importing.import_folder(tmp_path / "theirs", tmp_path / "pretrained")
    data = _data(tmp_path)
    assert data.target_vocabulary.size == _SIZES["vocab_size"] + 1

    before = launches.recorded(str(tmp_path / "pretrained"))
    launch = launches.Launch(
        before.model,
        before.overrides,
        str(tmp_path / "data"),
        TranslationInput.Facts(str(tmp_path / "data")),
    ).changed([*_SETTINGS, *_TUNED, f"train.warm_start_from={tmp_path / 'pretrained'}"])
    run = open_run(launch, str(tmp_path / "tuned"), 2)
    modes.train(run)
    assert "restored 1707 of 1707 pieces" in capsys.readouterr().out

    # Frozen weights equal the pretrained ones; the new language starts at the mean of two.
    pretrained = _theta(tmp_path / "pretrained")
    tuned = _theta(tmp_path / "tuned")
    changed = set()
    for path, weight in pretrained.items():
        if weight.shape != tuned[path].shape or np.abs(weight - tuned[path]).max() > 0:
            changed.add(path.split(".")[1])
    assert changed == {"target_embedding", "decoder"}

    tokenizer = Tokenizer(tmp_path / "tuned" / "vocab" / "target.model")
    rows = tokenizer.languages
    table = pretrained["theta.target_embedding.table"]
    mean = (table[rows["deu_Latn"]] + table[rows["nld_Latn"]]) / 2
    assert rows["nds_Latn"] == 1706
    moved = np.abs(tuned["theta.target_embedding.table"][1706] - mean).max()
    assert 0 < moved < np.abs(mean - table[rows["deu_Latn"]]).max()

    # One batch decodes both directions.
    decode_split.decode_split(run, "dev")
    folder = tmp_path / "tuned" / "decode_dev"
    assert (folder / "nds.source.txt").read_text() == "een Huus\n" * 3
    assert (folder / "en-nds.source.txt").read_text() == "a house\n" * 3
    assert len((folder / "en-nds.txt").read_text().splitlines()) == 3
