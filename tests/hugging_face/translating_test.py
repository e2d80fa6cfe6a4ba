"""A folder with a tokenizer becomes a run that translates from and into its languages."""

import json

import numpy as np
import pytest

from bench import import_model
from lingvo_gshard.checkpoints.checkpoints import Checkpoints
from lingvo_gshard.hugging_face import exporting, importing
from lingvo_gshard.runs import launch as launches
from lingvo_gshard.runs.run import open_run
from tests.input import fairseq_vocabulary_test

_SIZES = {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}


def _write(folder, vocab_size):
    fairseq_vocabulary_test.write_folder(folder, "nllb_bpe")
    import_model.write(folder, num_experts=2, num_parts=2, vocab_size=vocab_size, **_SIZES)


def test_a_tokenizer_of_another_size_is_refused(tmp_path):
    _write(tmp_path / "theirs", vocab_size=1500)
    with pytest.raises(ValueError, match="vocab_size 1500, but the tokenizer has .* another size"):
        importing.import_folder(tmp_path / "theirs", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_translates_between_its_languages(tmp_path):
    _write(tmp_path / "theirs", vocab_size=1706)
    done = importing.import_folder(tmp_path / "theirs", tmp_path / "run")
    assert done.has_vocabulary

    launch = launches.recorded(str(tmp_path / "run")).changed(
        ["decode.max_target_len=7", "decode.max_source_len=16", "decode.batch_size=4"]
    )
    assert len(launch.facts.language_tokens) == 202
    lines = ["deu_Latn fra_Latn Guten Morgen.", "fra_Latn zul_Latn Bonjour.", "deu_Latn eng_Latn "]
    found = []
    for num_partitions in (1, 2):
        decoder = open_run(launch, str(tmp_path / "run"), num_partitions).text_decoder()
        assert decoder.spec.sources == launch.facts.language_tokens
        found.append(list(decoder.decode(lines)))
    for one, two in zip(*found, strict=True):
        assert [best.text for best in one] == [best.text for best in two]
        assert one[0].score == pytest.approx(two[0].score, abs=1e-4)
    assert found[0][0][0].num_tokens == 7 and found[0][2][0].num_tokens == 0

    with pytest.raises(ValueError, match="target_lang fra: expected one of .* 182 more"):
        decoder.decode_together(["deu_Latn fra Guten Morgen."])

    # The tokenizer is exported as well, and imported again it is the same vocabulary.
    exporting.export_folder(open_run(launch, str(tmp_path / "run"), 1), tmp_path / "out")
    again = importing.import_folder(tmp_path / "out", tmp_path / "again")
    assert again.has_vocabulary
    for side in ("source", "target"):
        model = (tmp_path / f"again/vocab/{side}.model").read_bytes()
        assert model == (tmp_path / f"run/vocab/{side}.model").read_bytes()


@pytest.mark.slow
def test_positions_from_0_leave_the_tokenizer_its_ids(tmp_path):
    """In transformers, the id of padding decides where positions begin; here it is -1."""
    _write(tmp_path / "theirs", vocab_size=1706)
    settings = ["task.embedding.first_position=0"]
    importing.import_folder(tmp_path / "theirs", tmp_path / "run", settings)
    run = open_run(launches.recorded(str(tmp_path / "run")), str(tmp_path / "run"), 1)
    exporting.export_folder(run, tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["pad_token_id"], config["bos_token_id"]) == (-1, 0)
    generation = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert generation["pad_token_id"] == 1  # NllbTokenizer's.

    importing.import_folder(tmp_path / "out", tmp_path / "again")
    tables = []
    for name in ("run", "again"):
        with Checkpoints(str(tmp_path / name)) as saved:
            tables.append(np.asarray(saved.arrays(0)["theta.target_embedding.table"]))
    np.testing.assert_array_equal(*tables)
