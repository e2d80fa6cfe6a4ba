"""The oracle is transformers: export_tokenizers.py and load_tokenizers.py made the golden."""

import hashlib
import json
import pathlib
import zipfile

import pytest

from lingvo_gshard.hugging_face import tokenizer_files
from lingvo_gshard.input import fairseq_vocabulary
from lingvo_gshard.input.tokenizer import Tokenizer
from tests.hugging_face import export_tokenizers
from tests.input import fairseq_vocabulary_test

_GOLDEN = pathlib.Path(__file__).with_name("exported_tokenizers.zip")


@pytest.fixture(scope="module")
def golden():
    with zipfile.ZipFile(_GOLDEN) as file:
        return json.loads(file.read("golden.json"))


def _digests(files):
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


@pytest.mark.parametrize("name", export_tokenizers.PUBLISHED)
def test_a_vocabulary_that_was_imported_gets_its_files_back(tmp_path, golden, name):
    """With the files of these digests, a thousand lines had the ids of the published tokenizer."""
    files = export_tokenizers.published(tmp_path, name)
    assert _digests(files) == golden["digests"][name]

    # Imported again, they are the same vocabulary byte by byte.
    export_tokenizers.write(tmp_path / "again", files)
    model = (tmp_path / "ours.model").read_bytes()
    config = {"vocab_size": Tokenizer(tmp_path / "ours.model").vocab_size}
    (tmp_path / "again/config.json").write_text(json.dumps(config))
    assert fairseq_vocabulary.read(tmp_path / "again") == model


@pytest.fixture
def own(tmp_path):
    """Returns the vocabularies of a run of ours."""
    paths = (tmp_path / "source.model", tmp_path / "target.model")
    with zipfile.ZipFile(_GOLDEN) as file:
        for path in paths:
            path.write_bytes(file.read(path.name))
    return paths


def test_a_run_of_ours_has_a_model_for_each_side(golden, own):
    files = tokenizer_files.files(own, export_tokenizers.SIZE, export_tokenizers.OUR_ROWS)
    assert _digests(files) == golden["digests"]["two_sides"]

    source, target = map(Tokenizer, own)
    text = export_tokenizers.own_lines()
    assert source.pieces(golden["sources"][0][:1]) == ["<2de>"]
    for line, ids, target_ids, decoded in zip(
        text, golden["sources"], golden["targets"], golden["decoded"], strict=True
    ):
        assert source.encode(source.normalize(line)) == ids
        assert target.encode(target.normalize(line)) == target_ids
        assert target.decode(target_ids) == decoded


def test_new_languages_are_tokens_of_nllb_alone(tmp_path):
    for name, language in (("nllb_bpe", "nds_Latn"), ("m2m_100", "__nds__")):
        (tmp_path / name).mkdir()
        folder = tmp_path / name / "theirs"
        fairseq_vocabulary_test.write_folder(folder, name)
        path = tmp_path / name / "ours.model"
        path.write_bytes(fairseq_vocabulary.read(folder, [language]))
        size = Tokenizer(path).vocab_size
        if name == "m2m_100":
            message = "M2M100Tokenizer has 100 languages of its own: others, such as __af__, "
            with pytest.raises(ValueError, match=message):
                tokenizer_files.files((path, path), size, export_tokenizers.THEIR_ROWS)
            continue
        files = tokenizer_files.files((path, path), size, export_tokenizers.THEIR_ROWS)
        tokens = json.loads(files["tokenizer_config.json"])["added_tokens_decoder"]
        # The unused rows before it are tokens, too, so that the ids are consecutive.
        assert tokens[str(size - 1)]["content"] == "nds_Latn"
        assert max(map(int, tokens)) == size - 1 and str(size - 2) in tokens


def test_unsupported_vocabularies_are_refused(own, tmp_path):
    with pytest.raises(ValueError, match="the vocabularies have 1000 pieces, and the table 999"):
        tokenizer_files.files(own, 999, export_tokenizers.OUR_ROWS)
    fairseq_vocabulary_test.write_folder(tmp_path / "theirs", "nllb_bpe")
    models = []
    for new in ([], ["nds_Latn"]):
        models.append(tmp_path / f"{len(new)}.model")
        models[-1].write_bytes(fairseq_vocabulary.read(tmp_path / "theirs", new))
    with pytest.raises(ValueError, match="both sides have tokens of languages, and not one voc"):
        tokenizer_files.files(tuple(models), 2000, export_tokenizers.THEIR_ROWS)


@pytest.mark.parametrize("name", ["nllb_bpe", "m2m_100"])
def test_added_tokens_and_languages_of_any_name_come_back(tmp_path, name, monkeypatch):
    # The tokenizer's code has all languages, and the test's vocabulary only a few.
    monkeypatch.setattr(tokenizer_files, "M2M_LANGUAGES", ["de", "en", "fr", "zh", "sw"])
    fairseq_vocabulary_test.write_added(tmp_path / "theirs", name)
    path = tmp_path / "ours.model"
    path.write_bytes(fairseq_vocabulary.read(tmp_path / "theirs"))
    size = Tokenizer(path).vocab_size
    files = tokenizer_files.files((path, path), size, export_tokenizers.THEIR_ROWS)
    export_tokenizers.write(tmp_path / "again", files)
    (tmp_path / "again/config.json").write_text(json.dumps({"vocab_size": size}))
    assert sorted(Tokenizer(path).added) == ["...", "<tag>", "Qu", "Quux", "red fox", "\ufb05"]
    again = tmp_path / "again.model"
    again.write_bytes(fairseq_vocabulary.read(tmp_path / "again"))

    # The files differ only in the order of records.
    assert Tokenizer(again).languages == Tokenizer(path).languages
    assert Tokenizer(again).added == Tokenizer(path).added
    ids = range(size)
    assert Tokenizer(again).pieces(ids) == Tokenizer(path).pieces(ids)
