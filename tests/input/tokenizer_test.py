import io

import pytest
import sentencepiece

from lingvo_gshard.input import example_codec
from lingvo_gshard.input.tokenizer import Tokenizer, load_pair


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
