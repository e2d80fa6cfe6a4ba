import io

import pytest
import sentencepiece

from data_prep import vocabulary
from data_prep.config import BuildConfig
from lingvo_gshard.input import example_codec
from lingvo_gshard.input.bpe_tokenizer import load_pair
from lingvo_gshard.input.tokenizer import Tokenizer
from tests.decoding import vocabularies


@pytest.fixture(scope="module")
def tokenizer(data_dir):
    return load_pair(data_dir)[0]


def test_round_trip_ends_with_eos(tokenizer):
    for text in ("ba kelimo tra", "ქართული ✓ 漢字", "a"):
        ids = tokenizer.encode(text)
        assert ids[-1] == 2
        assert not {0, 1, 2, 3} & set(ids[:-1])
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("") == [2]
    assert tokenizer.vocab_size == 420


def test_decode_stops_at_eos_and_ignores_special_ids(tokenizer):
    ids = tokenizer.encode("ba ke")[:-1]
    more = tokenizer.encode("li")
    assert tokenizer.decode([example_codec.BOS_ID, *ids, example_codec.EOS_ID, *more]) == "ba ke"
    assert tokenizer.decode([*ids, example_codec.PAD_ID, example_codec.PAD_ID]) == "ba ke"
    assert tokenizer.decode([example_codec.EOS_ID]) == ""
    assert tokenizer.decode([*ids, example_codec.UNK_ID]).strip() != "ba ke"


def test_other_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"none.model: there is no such vocabulary"):
        Tokenizer(tmp_path / "none.model")
    (tmp_path / "bad.model").write_bytes(b"not a model")
    with pytest.raises(ValueError, match=r"bad.model is not a SentencePiece model"):
        Tokenizer(tmp_path / "bad.model")


def test_a_model_with_other_special_ids_is_refused(tmp_path):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["ein Haus", "zwei Hunde"]),
        model_writer=model,
        vocab_size=300,
        hard_vocab_limit=False,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    path = tmp_path / "default.model"
    path.write_bytes(model.getvalue())
    with pytest.raises(ValueError, match=r"pad, bos, eos, unk \(-1, 1, 2, 0\), expected \(0, 1, 2"):
        Tokenizer(path)


@pytest.mark.parametrize("symbols", [(), ("<2de>", "<2fr>")])
def test_text_that_is_spelled_like_a_token_stays_text(tmp_path, symbols):
    tokenizer = vocabularies.train(tmp_path / "x.model", symbols=symbols)
    text = "ba <s> </s> <unk> <pad> <0x41> ke <2fr> li <2de><2fr>"
    ids = tokenizer.encode(f"<2de> {text}")
    assert ids[-1] == 2
    assert tokenizer.decode(ids) == f"<2de> {text}"
    assert tokenizer.encode_all([f"<2de> {text}", "mo"]) == [ids, tokenizer.encode("mo")]

    # Only the target's token at the beginning, if there are targets, and no special ids but EOS.
    special = {0, 1, 2, 3, *range(4, 4 + len(symbols))}
    found = [token for token in ids if token in special]
    assert found == ([4, 2] if symbols else [2])


def test_the_model_of_a_vocabulary_records_its_form(tmp_path):
    config = BuildConfig(source_vocab_size=300, target_vocab_size=300)
    forms = {}
    for side in (vocabulary.Side.SOURCE, vocabulary.Side.TARGET):
        vocabulary.train(side, ["ba ke li mo"] * 9, config, tmp_path / f"{side}.model")
        forms[side] = Tokenizer(tmp_path / f"{side}.model").normalize("x² \u200be\u0301")
    assert list(forms.values()) == ["x2 é", "x² é"]
    # An old vocabulary, from the time when all of them were in NFKC.
    assert vocabularies.train(tmp_path / "old.model").normalize("x²") == "x2"
