import pytest

from data_prep import corpus, tsv


def test_finds_a_split_corpus(tmp_path):
    for split, names in {"train": ["de", "fr"], "test": ["de", "ja"]}.items():
        (tmp_path / split).mkdir()
        for name in names:
            (tmp_path / split / f"{name}-en.tsv.gz").touch()
    (tmp_path / "train" / "README.md").touch()
    found = corpus.find(tmp_path)
    assert not found.is_flat
    assert found.languages == ("de", "fr", "ja")
    assert sorted(found.files["train"]) == ["de", "fr"]
    assert found.files["dev"] == {}


def test_finds_a_flat_corpus(tmp_path):
    (tmp_path / "de-en.tsv").touch()
    found = corpus.find(tmp_path)
    assert found.is_flat
    assert found.files == {"train": {"de": tmp_path / "de-en.tsv"}}


def test_refuses_what_is_no_corpus(tmp_path):
    with pytest.raises(ValueError, match=r"no input folder .*nowhere"):
        corpus.find(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no <lang>-en.tsv or <lang>-en.tsv.gz files in"):
        corpus.find(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "de-en.tsv").touch()
    with pytest.raises(ValueError, match=r"files in .*train"):
        corpus.find(tmp_path)
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "en-de.tsv").touch()
    with pytest.raises(ValueError, match=r"expected a name like de-en.tsv"):
        corpus.find(tmp_path)


def test_one_language_in_two_files_is_refused(tmp_path):
    (tmp_path / "de-en.tsv").touch()
    (tmp_path / "de-en.tsv.gz").touch()
    with pytest.raises(ValueError, match=r"language de is also in de-en.tsv"):
        corpus.find(tmp_path)


def test_holding_out_is_by_english_in_the_asked_shares():
    splits = [corpus.held_out_split(f"Sentence {i}.", 0.1) for i in range(5000)]
    assert abs(splits.count("dev") / 5000 - 0.1) < 0.02
    assert abs(splits.count("test") / 5000 - 0.1) < 0.02
    for i in range(100):
        assert corpus.held_out_split(f"sentence {i}", 0.1) == splits[i]


def test_deal_out_keeps_english_in_one_split_across_languages(tmp_path):
    for name, count in {"de": 300, "fr": 211}.items():
        pairs = [tsv.Pair(f"{name} {i}", f"number {i}") for i in range(count)]
        tsv.write(tmp_path / f"{name}-en.tsv.gz", pairs)
    split, malformed = corpus.deal_out(corpus.find(tmp_path), tmp_path / "dealt", 0.1, 0.01)
    assert malformed == {"de": 0, "fr": 0}
    english = {
        name: {pair.english for path in files.values() for pair in tsv.read(path, 0.0).pairs}
        for name, files in split.files.items()
    }
    assert all(english.values())
    assert sum(map(len, english.values())) == 300
    assert len(tsv.read(split.files["train"]["fr"], 0.0).pairs) > 150
