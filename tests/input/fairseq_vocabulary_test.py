"""The oracle is Hugging Face: hugging_face/tokenizers.py and added_tokens.py."""

import json
import pathlib
import zipfile

import pytest
from sentencepiece import sentencepiece_model_pb2

from lingvo_gshard.input import fairseq_vocabulary
from lingvo_gshard.input.bpe_tokenizer import load_pair
from lingvo_gshard.input.tokenizer import Tokenizer
from tests.input.hugging_face import lines

_GOLDENS = pathlib.Path(__file__).parent / "hugging_face" / "tokenizers.zip"
_ADDED = _GOLDENS.with_name("added_tokens.zip")
_CONFIG = "tokenizer_config.json"
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

    # The comparison is meaningful: many lines have longer pieces, and some have an unknown one.
    num_unknown = sum(3 in ids for ids in golden["sources"])
    assert 50 < num_unknown < 900


def test_the_table_has_their_size_and_text_comes_back(imported):
    golden, tokenizer = imported
    assert tokenizer.vocab_size == golden["files"]["config.json"]["vocab_size"]

    # A line without text that the model's own rules replace, or for which it lacks a piece.
    line = next(line for line in lines.lines() if tokenizer.decode(tokenizer.encode(line)) == line)
    code, token = next(iter(tokenizer.languages.items()))
    assert len(line) > 10
    assert tokenizer.decode([token, *tokenizer.encode(line)]) == line
    assert max(tokenizer.encode(f"{code} <mask> <s>")) < token  # Text never becomes a token.
    assert tokenizer.encode_all([line, "a"]) == [tokenizer.encode(line), tokenizer.encode("a")]


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
    for wrong in (rows - 3, rows + 10**6):
        config.write_text(json.dumps({"vocab_size": wrong}))
        with pytest.raises(ValueError, match=f"has vocab_size {wrong}, but the tokenizer has"):
            fairseq_vocabulary.read(nllb)
    config.write_text(json.dumps({"vocab_size": rows}))

    # A model with fewer pieces than the languages' ids imply.
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
    """Returns a vocabulary that is already imported."""
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


# --- tokens that a user added ---


def write_added(path, name):
    """Writes the folder of a tokenizer with added tokens, and returns its golden."""
    with zipfile.ZipFile(_ADDED) as file:
        golden = json.loads(file.read(f"{name}.json"))
    _, model = _golden(name)
    path.mkdir()
    (path / "sentencepiece.bpe.model").write_bytes(model)
    for file_name, content in golden["files"].items():
        (path / file_name).write_text(json.dumps(content))
    return golden


@pytest.mark.parametrize("name", ["nllb_bpe", "m2m_100"])
def test_added_tokens_have_their_ids_wherever_they_occur(tmp_path, name):
    golden = write_added(tmp_path / "theirs", name)
    model = fairseq_vocabulary.read(tmp_path / "theirs")
    tokenizer = _tokenizer(tmp_path / "ours.model", model)
    theirs = fairseq_vocabulary.rows(tokenizer.vocab_size)
    assert theirs[tokenizer.added["Quux"]] == golden["lines"][0]["ids"][-2]

    num_texts = 0
    for line in golden["lines"]:
        # The last of NLLB's languages has a name that is not a code.
        ours = [tokenizer.languages[line["language"]], *tokenizer.encode(line["line"])]
        assert theirs[ours].tolist() == line["ids"], line
        if 3 not in line["ids"]:  # They drop unknown pieces, and we mark them.
            assert tokenizer.decode(ours) == line["text"]
            num_texts += 1
    assert num_texts >= 5
    lines_together = tokenizer.encode_all([line["line"] for line in golden["lines"]])
    assert lines_together == [tokenizer.encode(line["line"]) for line in golden["lines"]]


def _change(folder, file, change):
    path = folder / file
    content = json.loads(path.read_text()) if path.exists() else {}
    change(content)
    path.write_text(json.dumps(content))


def _token(content, token_id):
    return content["added_tokens_decoder"][str(token_id)]


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (
            _CONFIG,
            lambda x: x.update(legacy_behaviour=True),
            "legacy_behaviour is True; expected F",
        ),
        (_CONFIG, lambda x: x.update(tokenizer_class="T5Tokenizer"), "tokenizer_class is 'T5Tok"),
        (_CONFIG, lambda x: x.update(eos_token="</x>"), "eos_token is '</x>'; expected '</s>'"),
        (_CONFIG, lambda x: x.update(sp_model_kwargs={"alpha": 1}), "sp_model_kwargs is {'alpha'"),
        (_CONFIG, lambda x: _token(x, 1704).update(content="Quuz"), "token 1704 is 'Quux'"),
        (_CONFIG, lambda x: _token(x, 1704).update(lstrip=True), "lstrip is True for 'Quux'"),
        (_CONFIG, lambda x: _token(x, 1704).update(special="no"), "special is 'no' for 'Quux'"),
        (_CONFIG, lambda x: _token(x, 1709).update(content="two words"), "'two words'"),
        (_CONFIG, lambda x: _token(x, 3).update(content="x"), "token 3 is 'x', but piece 3 is "),
        (_CONFIG, lambda x: x["added_tokens_decoder"].pop("1704"), "lacks token 1704, 'Quux'"),
        ("special_tokens_map.json", lambda x: x.update(pad_token="</s>"), "pad_token is '</s>'"),
        (
            "special_tokens_map.json",
            lambda x: x["additional_special_tokens"].pop(),
            "list different",
        ),
        ("added_tokens.json", lambda x: x.update(Quux=1705), "token 1705 is 'Quux'"),
        ("added_tokens.json", lambda x: x.update(Quux="1704"), "an id is '1704'"),
        ("tokenizer.json", lambda x: x.update(model={"vocab": {"Quux": 7}}), "piece 7 is 'Quux'"),
    ],
)
def test_a_tokenizer_that_gives_text_other_ids_is_refused(tmp_path, file, change, message):
    write_added(tmp_path / "theirs", "nllb_bpe")
    _change(tmp_path / "theirs", file, change)
    with pytest.raises(ValueError, match=message):
        fairseq_vocabulary.read(tmp_path / "theirs")
