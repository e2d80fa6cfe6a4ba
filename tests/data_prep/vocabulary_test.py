import collections
import dataclasses
import random

import pytest
import sentencepiece

from data_prep import vocabulary
from lingvo_gshard.input import packing

_SYLLABLES = ("ba", "ke", "li", "mo", "nu", "tra", "ste", "kon", "wor", "vim")


def _config(**changes):
    config = vocabulary.VocabularyConfig(
        size=400, model_type="bpe", character_coverage=1.0, max_sentences=1000, temperature=5.0
    )
    return dataclasses.replace(config, **changes)


def _sentences(count):
    rng = random.Random(3)
    return [" ".join("".join(rng.choices(_SYLLABLES, k=3)) for _ in range(6)) for _ in range(count)]


def test_quotas_by_hand():
    # 32 ** (1/5) = 2, 1 ** (1/5) = 1, and 243 ** (1/5) = 3: shares 2/6, 1/6 and 3/6 of 240.
    assert vocabulary.quotas([32, 1, 243], _config(max_sentences=240)) == [80, 40, 120]
    # T=1 is proportional, and the budget is never more than there is.
    assert vocabulary.quotas([30, 10, 0], _config(temperature=1.0)) == [30, 10, 0]


def test_draw_repeats_evenly():
    counts = collections.Counter(vocabulary.draw(["a", "b", "c"], 8, random.Random(1)))
    assert sum(counts.values()) == 8
    assert set(counts.values()) == {2, 3}
    assert vocabulary.draw([], 5, random.Random(1)) == []


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_models_are_reproducible_with_our_special_ids(tmp_path, model_type):
    paths = [tmp_path / "1.model", tmp_path / "2.model"]
    for path in paths:
        size = vocabulary.train("source", _sentences(400), _config(model_type=model_type), path)
        assert size == 400
    assert paths[0].read_bytes() == paths[1].read_bytes()
    model = sentencepiece.SentencePieceProcessor(model_file=str(paths[0]))
    found = (model.pad_id(), model.bos_id(), model.eos_id(), model.unk_id())
    assert found == (0, 1, 2, 3)
    assert found == (packing.PAD_ID, packing.BOS_ID, packing.EOS_ID, packing.UNK_ID)
    # Nothing in the training text is like this, yet it survives, in bytes.
    assert model.decode(model.encode("ქართული")) == "ქართული"


def test_a_small_text_gives_a_small_vocabulary(tmp_path):
    size = vocabulary.train("source", ["ein Haus"] * 5, _config(size=5000), tmp_path / "m")
    assert 264 < size < 300


def test_impossible_sizes_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"source vocabulary size 12: expected at least 261"):
        vocabulary.train("source", ["x"], _config(size=12), tmp_path / "m")
    many = ["".join(chr(0x4E00 + 7 * i) for i in range(300))] * 3
    with pytest.raises(ValueError, match=r"the target vocabulary of 300 pieces cannot be trained"):
        vocabulary.train("target", many, _config(size=300), tmp_path / "m")
