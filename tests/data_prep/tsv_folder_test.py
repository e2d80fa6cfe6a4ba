import pytest

from data_prep import config, tsv_folder
from data_prep.sources import TsvFile
from lingvo_gshard.input.manifest import Kind


def test_finds_a_split_corpus(tmp_path):
    for split, names in {"train": ["de", "zh-Hant"], "test": ["de", "ja"]}.items():
        (tmp_path / split).mkdir()
        for name in names:
            (tmp_path / split / f"{name}-en.tsv.gz").touch()
    (tmp_path / "train" / "README.md").touch()
    assert tsv_folder.sources_in(tmp_path) == (
        TsvFile(tmp_path / "train" / "de-en.tsv.gz", "de", "train"),
        TsvFile(tmp_path / "train" / "zh-Hant-en.tsv.gz", "zh-Hant", "train"),
        TsvFile(tmp_path / "test" / "de-en.tsv.gz", "de", "test"),
        TsvFile(tmp_path / "test" / "ja-en.tsv.gz", "ja", "test"),
    )


def test_finds_a_flat_corpus(tmp_path):
    (tmp_path / "iw-en.tsv").touch()
    assert tsv_folder.sources_in(tmp_path) == (TsvFile(tmp_path / "iw-en.tsv", "he", None),)


def test_folders_without_a_corpus_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no input folder .*nowhere"):
        tsv_folder.sources_in(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no <lang>-en.tsv or <lang>-en.tsv.gz files in"):
        tsv_folder.sources_in(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "de-en.tsv").touch()
    with pytest.raises(ValueError, match=r"files in .*train"):
        tsv_folder.sources_in(tmp_path)
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "en-de.tsv").touch()
    with pytest.raises(ValueError, match=r"expected a name like de-en.tsv"):
        tsv_folder.sources_in(tmp_path)


def test_one_language_in_two_files_is_refused(tmp_path):
    (tmp_path / "he-en.tsv").touch()
    (tmp_path / "iw-en.tsv.gz").touch()
    with pytest.raises(ValueError, match=r"language he is also in he-en.tsv"):
        tsv_folder.sources_in(tmp_path)


def test_finds_pairs_without_english(tmp_path):
    (tmp_path / "deu_Latn-fra_Latn.tsv").touch()
    (source,) = tsv_folder.sources_in(tmp_path)
    assert source == TsvFile(tmp_path / "deu_Latn-fra_Latn.tsv", "de+fr", None)
    assert source.is_without_english

    (tmp_path / "fr-de.tsv").touch()
    with pytest.raises(ValueError, match=r"pair fr\+de is also in deu_Latn-fra_Latn.tsv"):
        tsv_folder.sources_in(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("de-deu", "both sides are in de"),
        ("de-xx", "'xx' is not a language: expected a BCP-47 code"),
        ("de-CH", "expected a name like de-en.tsv or de-en.tsv.gz, or de-fr.tsv without English"),
    ],
)
def test_invalid_pairs_are_refused(tmp_path, name, message):
    (tmp_path / f"{name}.tsv").touch()
    with pytest.raises(ValueError, match=f"{name}.tsv: {message}"):
        tsv_folder.sources_in(tmp_path)


def test_invalid_languages_are_refused(tmp_path):
    (tmp_path / "xx-en.tsv").touch()
    with pytest.raises(
        ValueError, match=r"xx-en.tsv: 'xx' is not a language: expected a BCP-47 code"
    ):
        tsv_folder.sources_in(tmp_path)


def test_unread_files_are_named(tmp_path, caplog):
    for name in ("train/de-en.tsv", "test/de-en.tsv", "valid/de-en.tsv", "train/fr-en.tsv.xz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for name in ("train/es-en.TSV", "train/it-en.txt", ".hidden", "nl-en.tsv", "extra.tsv"):
        (tmp_path / name).touch()
    config.sources_of_folder(tmp_path, Kind.PARALLEL)
    (told,) = caplog.messages
    unread = "extra.tsv, nl-en.tsv, valid, train/es-en.TSV, train/fr-en.tsv.xz, train/it-en.txt"
    assert told.startswith(f"{tmp_path}: not read: {unread}; ")

    # Files that another source reads are not reported.
    caplog.clear()
    tables = [("folder", "."), ("tsv", "extra.tsv")]
    text = "".join(f'[[sources]]\nformat = "{name}"\npath = "{path}"\n' for name, path in tables)
    (tmp_path / "c.toml").write_text(f'{text}language = "nl"\nsplit = "train"\n')
    config.load(tmp_path / "c.toml", {})
    (told,) = caplog.messages
    assert "not read: c.toml, nl-en.tsv, valid, train/es-en.TSV" in told
