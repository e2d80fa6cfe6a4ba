import pytest

from data_prep import languages, patterns, source_tables, text_folder, tsv_folder
from lingvo_gshard.input.manifest import Kind


def _touch(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def test_a_table_for_each_file_with_placeholders_filled_in_everywhere(tmp_path):
    _touch(tmp_path, "train/de.jsonl", "train/pt-BR.jsonl", "dev/de.jsonl", "other/de.jsonl")
    table = {"path": "{split}/{language}.jsonl", "source_field": "text.{language}", "min": 3}
    expected = []
    for split, language in (("dev", "de"), ("train", "de"), ("train", "pt-BR")):
        expected.append(
            {
                "path": f"{split}/{language}.jsonl",
                "source_field": f"text.{language}",
                "min": 3,
                "language": language,
                "split": split,
            }
        )
    assert patterns.expand(table, tmp_path) == expected


def test_the_two_files_of_a_pair_make_one_table(tmp_path):
    _touch(tmp_path, "en-de.de", "en-de.en", "fr-en.fr", "fr-en.en")
    assert patterns.expand({"source": "{pair}.{side}"}, tmp_path) == [
        {"language": "de", "source": "en-de.de", "english": "en-de.en"},
        {"language": "fr", "source": "fr-en.fr", "english": "fr-en.en"},
    ]


def test_a_files_name_may_contain_wildcards(tmp_path):
    _touch(tmp_path, "x[1]/de.tsv")
    for pattern in ("*/{language}.tsv", "x[1]/{language}.tsv"):
        (table,) = patterns.expand({"path": pattern}, tmp_path)
        assert table["path"] == "x[1]/de.tsv"


def test_a_placeholder_has_one_value_in_a_path(tmp_path):
    _touch(tmp_path, "de/de.tsv", "de/fr.tsv", "fr/fr.tsv")
    tables = patterns.expand({"path": "{language}/{language}.tsv"}, tmp_path)
    assert [table["path"] for table in tables] == ["de/de.tsv", "fr/fr.tsv"]


def test_english_cannot_be_a_source(tmp_path):
    _touch(tmp_path, "de.tsv", "en.tsv", "eng_Latn.tsv")
    (table,) = patterns.expand({"path": "{language}.tsv"}, tmp_path)
    assert table["language"] == "de"


@pytest.mark.parametrize("pair", ["de-de", "en-eng"])
def test_a_pair_has_two_languages(tmp_path, pair):
    _touch(tmp_path, f"{pair}.tsv")
    with pytest.raises(ValueError, match=f"{pair}.tsv: expected a pair of two languages, got "):
        patterns.expand({"path": "{pair}.tsv"}, tmp_path)


def test_a_pair_without_english_names_its_target(tmp_path):
    _touch(tmp_path, "de-fr.de", "de-fr.fr", "en-fr.en", "en-fr.fr")
    without, with_english = patterns.expand({"source": "{pair}.{side}"}, tmp_path)
    assert without == {
        "language": "de",
        "target_language": "fr",
        "source": "de-fr.de",
        "english": "de-fr.fr",
    }
    assert with_english == {"language": "fr", "source": "en-fr.fr", "english": "en-fr.en"}

    _touch(tmp_path, "x/de.tsv", "x/fr.tsv")
    (table,) = patterns.expand({"path": "x/{language}.tsv", "target_language": "fr"}, tmp_path)
    assert (table["language"], table["target_language"]) == ("de", "fr")


def test_files_that_only_the_placeholders_leave_out_are_named(tmp_path, caplog):
    _touch(tmp_path, "train/de.tsv", "valid/de.tsv", "train/fr.tsv")
    assert len(patterns.expand({"path": "{split}/{language}.tsv"}, tmp_path)) == 2
    (told,) = caplog.messages
    assert told == (
        f"path '{{split}}/{{language}}.tsv': 1 files in {tmp_path} are not read: valid/de.tsv"
    )


# Names with vowel signs, points, and an accent that is a separate character.
_NAMES = [
    "\u0939\u093f\u0928\u094d\u0926\u0940",
    "\u05e2\u05b4\u05d1\u05e8\u05b4\u05d9\u05ea",
    "cafe\u0301-2",
]


@pytest.mark.parametrize("name", _NAMES)
def test_a_name_has_the_letters_of_any_script(tmp_path, name):
    _touch(tmp_path, f"{name}.jsonl", f"train/{name}.txt", f"pairs/train/{name}-en.tsv")
    (table,) = patterns.expand({"path": "{corpus}.jsonl"}, tmp_path)
    assert table["corpus"] == name
    (table,) = patterns.expand({"path": "{language}.jsonl"}, tmp_path)
    assert table["language"] == name
    assert languages.named(name, "source") == name
    assert languages.printable(f"{name}/x") == f"{name}?x"

    (source,) = text_folder.sources_in(tmp_path)
    assert source.corpus == name
    (source,) = tsv_folder.sources_in(tmp_path / "pairs", "source")
    assert source.language == name
    fields = {"format": "text", "path": f"train/{name}.txt", "document": "line", "corpus": name}
    (source,) = source_tables.of_table(fields, tmp_path, Kind.TEXT)
    assert source.corpus == name


def test_names_do_not_contain_spaces_or_punctuation(tmp_path):
    _touch(tmp_path, "a\u2019b.jsonl", "a b.jsonl", "a\u0964.jsonl")
    with pytest.raises(ValueError, match="no file in .* matches"):
        patterns.expand({"path": "{corpus}.jsonl"}, tmp_path)
