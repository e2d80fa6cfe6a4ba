"""The oracle is Hugging Face's: hugging_face/tokenizers.py."""

import json
import pathlib
import zipfile

import numpy as np
import pytest
from sentencepiece import sentencepiece_model_pb2

from lingvo_gshard.input import fairseq_vocabulary
from lingvo_gshard.input.tokenizer import Tokenizer, load_pair
from tests.input.hugging_face import lines

_GOLDENS = pathlib.Path(__file__).parent / "hugging_face" / "tokenizers.zip"
_NAMES = ("nllb_bpe", "nllb_unigram", "m2m_100")


def _golden(name):
    with zipfile.ZipFile(_GOLDENS) as file:
        golden = json.loads(file.read(f"{name}.json"))
        return golden, file.read(f"{golden['model']}.model")


def write_folder(path, name):
    """Writes a tokenizer's folder, and returns its golden."""
    golden, model = _golden(name)
    path.mkdir()
    (path / "sentencepiece.bpe.model").write_bytes(model)
    for file, content in golden["files"].items():
        (path / file).write_text(json.dumps(content))
    return golden


def _tokenizer(path, model):
    path.write_bytes(model)
    return Tokenizer(path)


@pytest.fixture(scope="module", params=_NAMES)
def imported(request, tmp_path_factory):
    """Returns a golden and the tokenizer of its folder."""
    path = tmp_path_factory.mktemp("imported")
    golden = write_folder(path / "theirs", request.param)
    return golden, _tokenizer(path / "ours.model", fairseq_vocabulary.read(path / "theirs"))


@pytest.fixture
def nllb(tmp_path):
    """Returns a folder that a test may damage."""
    write_folder(tmp_path / "theirs", "nllb_bpe")
    return tmp_path / "theirs"


def test_a_thousand_lines_in_twenty_scripts_have_their_ids(imported):
    golden, tokenizer = imported
    text = lines.lines()
    assert len(text) == 1000 and len(lines.SCRIPTS) == 20
    theirs = fairseq_vocabulary.rows(tokenizer.vocab_size)

    for line, pair, ids in zip(text, golden["pairs"], golden["sources"], strict=True):
        ours = [tokenizer.languages[pair[0]], *tokenizer.encode(tokenizer.normalize(line))]
        assert theirs[ours].tolist() == ids, line
    targets = zip(text[::10], golden["pairs"][::10], golden["targets"], strict=True)
    for line, pair, ids in targets:
        ours = [tokenizer.languages[pair[1]], *tokenizer.encode(line)]
        assert theirs[ours].tolist() == ids, line

    # The lines are worth comparing: many have pieces of several characters, some an unknown one.
    num_unknown = sum(3 in ids for ids in golden["sources"])
    assert 50 < num_unknown < 900


def test_the_table_has_their_size_and_text_comes_back(imported):
    golden, tokenizer = imported
    assert tokenizer.vocab_size == golden["files"]["config.json"]["vocab_size"]

    # A line without what the model's own rules replace, or what it has no piece for.
    line = next(line for line in lines.lines() if tokenizer.decode(tokenizer.encode(line)) == line)
    code, token = next(iter(tokenizer.languages.items()))
    assert len(line) > 10
    assert tokenizer.decode([token, *tokenizer.encode(line)]) == line
    assert max(tokenizer.encode(f"{code} <mask> <s>")) < token  # No text is a token.
    assert tokenizer.encode_all([line, "a"]) == [tokenizer.encode(line), tokenizer.encode("a")]


def test_zero_and_one_are_swapped():
    assert fairseq_vocabulary.rows(6).tolist() == [1, 0, 2, 3, 4, 5]
    both = fairseq_vocabulary.rows(6)[fairseq_vocabulary.rows(6)]
    assert np.array_equal(both, np.arange(6))


def test_text_is_not_normalized_before_the_model(imported, data_dir):
    _, tokenizer = imported
    line = "\ufb01n\u200b \uff21"
    assert tokenizer.normalize(line) == line
    assert load_pair(data_dir)[0].normalize(line) == "fin A"


def test_without_ids_languages_follow_the_pieces_and_mask_comes_last(nllb):
    with_ids = fairseq_vocabulary.read(nllb)
    config = json.loads((nllb / "tokenizer_config.json").read_text())
    del config["added_tokens_decoder"]
    (nllb / "tokenizer_config.json").write_text(json.dumps(config))
    assert fairseq_vocabulary.read(nllb) == with_ids


def test_new_languages_have_rows_at_the_end_of_the_table(nllb, tmp_path):
    before = fairseq_vocabulary.read(nllb)
    size = _tokenizer(tmp_path / "before.model", before).vocab_size
    after = fairseq_vocabulary.added(before, ["nds_Latn", "gsw_Latn"])
    tokenizer = _tokenizer(tmp_path / "after.model", after)
    assert tokenizer.vocab_size == size + 2
    assert tokenizer.languages["nds_Latn"] == size
    assert tokenizer.languages["gsw_Latn"] == size + 1
    assert after == fairseq_vocabulary.read(nllb, ["nds_Latn", "gsw_Latn"])

    with pytest.raises(ValueError, match="new language deu_Latn: the vocabulary has it already"):
        fairseq_vocabulary.added(before, ["deu_Latn"])
    with pytest.raises(ValueError, match="new language 'nds': expected a token such as nds_Latn"):
        fairseq_vocabulary.added(before, ["nds"])


def test_new_languages_need_a_vocabulary_with_languages(data_dir):
    model = pathlib.Path(data_dir, "vocab", "source.model").read_bytes()
    with pytest.raises(ValueError, match="nds_Latn: the vocabulary has no tokens of languages"):
        fairseq_vocabulary.added(model, ["nds_Latn"])


def test_a_folder_that_is_wrong_is_refused(nllb, tmp_path):
    config = nllb / "config.json"
    rows = json.loads(config.read_text())["vocab_size"]
    for wrong in (rows - 3, rows + 90):
        config.write_text(json.dumps({"vocab_size": wrong}))
        with pytest.raises(ValueError, match=f"has vocab_size {wrong}, but the tokenizer has"):
            fairseq_vocabulary.read(nllb)
    config.write_text(json.dumps({"vocab_size": rows}))

    # A model that is shorter than the languages' ids tell.
    model = nllb / "sentencepiece.bpe.model"
    content = model.read_bytes()
    shorter = sentencepiece_model_pb2.ModelProto.FromString(content)
    del shorter.pieces[-5:]
    model.write_bytes(shorter.SerializeToString())
    with pytest.raises(ValueError, match="the tokenizer is of another size"):
        fairseq_vocabulary.read(nllb)

    model.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"bpe.model is not a SentencePiece model"):
        fairseq_vocabulary.read(nllb)
    model.write_bytes(_imported_already(tmp_path))
    with pytest.raises(ValueError, match="begins with pieces <pad>, <s>, </s>, expected <unk>, "):
        fairseq_vocabulary.read(nllb)
    model.unlink()
    with pytest.raises(ValueError, match=r"no sentencepiece.bpe.model"):
        fairseq_vocabulary.read(nllb)


def _imported_already(tmp_path):
    """Returns a vocabulary that is imported already."""
    write_folder(tmp_path / "again", "nllb_bpe")
    return fairseq_vocabulary.read(tmp_path / "again")


def test_a_folder_without_languages_is_refused(nllb):
    (nllb / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ValueError, match="no file lists the tokens of languages; expected one of"):
        fairseq_vocabulary.read(nllb)
    (nllb / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config.json is not JSON"):
        fairseq_vocabulary.read(nllb)


def test_a_damaged_list_of_pieces_is_refused(tmp_path):
    write_folder(tmp_path / "m2m", "m2m_100")
    path = tmp_path / "m2m" / "vocab.json"
    ids = json.loads(path.read_text())
    path.write_text(json.dumps(ids | {"more": 3}))
    with pytest.raises(ValueError, match=r"vocab.json: expected pieces with the ids 0, 1, 2"):
        fairseq_vocabulary.read(tmp_path / "m2m")
    ids["<s>"], ids["<pad>"] = ids["<pad>"], ids["<s>"]
    path.write_text(json.dumps(ids))
    with pytest.raises(ValueError, match="begins with pieces <pad>, <s>, </s>, <unk>, expected"):
        fairseq_vocabulary.read(tmp_path / "m2m")
