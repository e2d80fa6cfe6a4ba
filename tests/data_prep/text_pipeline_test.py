"""Documents from their files to a prepared folder."""

import gzip
import itertools
import json

import numpy as np
import pytest

from data_prep import config, engines, pipeline, source_tables, vocabulary
from data_prep.config import BuildConfig
from lingvo_gshard.input import manifest
from lingvo_gshard.input.bpe_tokenizer import load_pair
from lingvo_gshard.input.manifest import Kind
from lingvo_gshard.input.records import RecordSource
from lingvo_gshard.input.tokenizer import Tokenizer
from tests.data_prep import prepared
from xla_spmd.files import digests

_CONFIG = BuildConfig(kind="text", text_vocab_size=420, pairs_per_chunk=40, pairs_per_shard=60)
_RULER = "-" * 40
_BOOK = " ".join(f"word {i} of a long book" for i in range(600))
# The notes that cleaning drops, by the rule.
_DROPPED = {
    "duplicate": ["note 3 of many"],
    "empty": ["", "  "],
    "held_out": ["Note, three hundred!"],
    "repeated": [f"short {_RULER}"],
    "undecodable": ["dam\ufffdaged"],
    "wrong_script": ["это совсем другой язык"],
}


def _write_corpus(folder):
    notes = [f"note {i} of many" for i in range(100)] + ["schÃ¶n is repaired"]
    notes += itertools.chain.from_iterable(_DROPPED.values())
    books = [_BOOK, f"{_BOOK} with {_RULER} a ruler", "note three hundred"]
    texts = {
        "train/notes.txt": notes,
        "train/books.txt": books,
        "dev/notes.txt": ["\ufb01ve", "note three hundred", ""],
        "test/books.txt": [f"{_BOOK} of test"],
    }
    for name, documents in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("".join(f"{document}\n" for document in documents))
    return texts


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    texts = _write_corpus(folder / "text")
    return folder, texts, prepared.build(folder / "text", folder / "data", _CONFIG)


def _texts(folder, corpus, split):
    records = RecordSource(folder / "data", corpus.records[split])
    _, tokenizer = load_pair(folder / "data")
    examples = records.read(np.arange(len(records)))
    assert all(len(example.source_ids) == 0 for example in examples)
    return [tokenizer.decode(example.target_ids) for example in examples]


def test_every_document_is_kept_or_dropped_by_a_rule(built):
    _, texts, data = built
    assert (data.kind, [corpus.code for corpus in data.languages]) == ("text", ["books", "notes"])
    books, notes = data.languages
    by_rule = {rule: len(documents) for rule, documents in _DROPPED.items()}
    assert notes.dropped == by_rule | {"empty": 3}  # One of them in dev.
    # The English of dev is held out from all corpora.
    assert books.dropped == {"held_out": 1}
    assert notes.repaired == 1
    for corpus in data.languages:
        num_read = sum(
            len(texts.get(f"{split}/{corpus.code}.txt", ())) for split in manifest.SPLITS
        )
        num_kept = sum(corpus.num_examples(split) for split in manifest.SPLITS)
        assert num_read == num_kept + sum(corpus.dropped.values())


def test_records_hold_whole_documents_however_long(built):
    folder, _, data = built
    books, notes = data.languages
    assert _texts(folder, books, "train") == [_BOOK, f"{_BOOK} with {_RULER} a ruler"]
    kept = [f"note {i} of many" for i in range(100)] + ["schön is repaired"]
    assert _texts(folder, notes, "train") == kept
    assert _texts(folder, notes, "dev") == ["ﬁve", "note three hundred"]
    records = notes.records["train"]
    assert records.num_target_bytes == sum(len(text.encode()) for text in kept)
    assert records.num_target_tokens == sum(shard.num_target_tokens for shard in records.shards)
    assert len(records.shards) == 3
    assert books.records["train"].num_source_tokens == 0


def test_one_vocabulary_and_the_unchanged_text_of_dev(built):
    folder, _, data = built
    assert data.vocabulary_files == (data.source_vocabulary.file,) * 2
    assert data.target_vocabulary.file.path == "vocab/text.model"
    assert Tokenizer(folder / "data/vocab/text.model").vocab_size == 420
    _, notes = data.languages
    with gzip.open(folder / "data" / notes.text["dev"].path, "rt") as file:
        assert file.read() == "\ufb01ve\nnote three hundred\n"
    assert notes.text["dev"].path == "text/dev/notes.txt.gz"
    digests.verify(folder / "data", data.files())
    assert len(set(data.files())) == len(data.files())


def test_the_report_counts_documents(built):
    folder, _, data = built
    rows = json.loads((folder / "data/report/report.json").read_text())
    assert [row["code"] for row in rows] == ["notes", "books"]
    assert rows[0]["documents"] == {"train": 101, "dev": 2, "test": 0}
    assert rows[0]["text"]["tokens"] == data.language("notes").records["train"].num_target_tokens
    page = (folder / "data/report/report.md").read_text()
    assert "## Documents dropped, by rule" in page
    assert "| corpus |" in page
    assert "training pair" not in page
    # The manifest and the plan have only the settings for text.
    assert data.config["text_vocab_size"] == 420
    assert not {"source_vocab_size", "max_pieces"} & data.config.keys()


def test_a_corpus_without_documents_is_reported(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train/notes.txt").write_text("\n\n")
    with pytest.raises(ValueError, match="no training documents are left: dropped 2 empty"):
        prepared.build(tmp_path, tmp_path / "data", _CONFIG)


def test_a_field_that_no_line_has_is_refused(tmp_path):
    (tmp_path / "web.jsonl").write_text('{"body": "x"}\n' * 5)
    text = "kind = 'text'\n[[sources]]\nformat = 'jsonl'\npath = 'web.jsonl'\ncorpus = 'web'\n"
    (tmp_path / "data.toml").write_text(f"{text}field = 'text'")
    sources, settings = config.load(tmp_path / "data.toml", {})
    with pytest.raises(ValueError, match="web.jsonl: no line has the field text, only body"):
        pipeline.run_through(
            pipeline.Step.REPORT, sources, tmp_path / "data", settings, engines.pool(1)
        )


def test_documents_are_cut_for_the_vocabulary_at_spaces_without_loss():
    texts = [_BOOK, "水" * 2500, "short"]
    segments = list(vocabulary.segments(texts))
    assert "".join(segments) == "".join(texts)
    assert max(map(len, segments)) <= 1000
    assert all(segment.startswith(" ") for segment in segments[1:15])
    assert [len(segment) for segment in segments[-4:]] == [1000, 1000, 500, 5]


@pytest.mark.parametrize("most", [1, 7, 99, 100, 101])
def test_a_sample_is_an_even_part(most):
    sample = list(vocabulary.sample(lambda: iter(map(str, range(100))), most))
    assert len(sample) == min(most, 100)
    gaps = np.diff([int(text) for text in sample])
    assert len(gaps) == 0 or gaps.max() - gaps.min() <= 1


_TEXT = "kind = 'text'\n"
_SOURCE = f"{_TEXT}[[sources]]\nformat = 'text'\npath = 'x.txt'\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind = 'speech'", "kind 'speech': expected one of parallel, text"),
        (f"{_TEXT}max_pieces = 99", "max_pieces is not a setting for data of kind text"),
        ("text_vocab_size = 300", "text_vocab_size is not a setting for data of kind parallel"),
        (f"{_SOURCE}corpus = 'x'", "text needs document"),
        (f"{_SOURCE}corpus = 'a/b'", "corpus 'a/b': expected letters, digits, - and _"),
        (f"{_SOURCE}corpus = 'x'\ndocument = 'page'", "document 'page': expected one of line, bl"),
        (
            f"{_TEXT}[[sources]]\nformat = 'moses'",
            "format 'moses' has pairs: for text, choose one side of them, such as side = 'english'",
        ),
        (
            f"{_TEXT}[[sources]]\nformat = 'moses'\nside = 'target'",
            "side 'target': expected one of source, english",
        ),
        (
            f"{_SOURCE}corpus = 'x'\ndocument = 'line'\n"
            "[[sources]]\nformat = 'text'\npath = 'x.txt'\ncorpus = 'y'\ndocument = 'line'",
            "x.txt is given twice",
        ),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path, text, message):
    (tmp_path / "x.txt").touch()
    (tmp_path / "data.toml").write_text(text)
    with pytest.raises(ValueError, match=message):
        config.load(tmp_path / "data.toml", {})


def test_folders_and_their_mistakes(tmp_path):
    text_of = source_tables.FOLDERS[Kind.TEXT]
    with pytest.raises(ValueError, match=r"no <name>.txt or <name>.txt.gz files in"):
        text_of(tmp_path)
    (tmp_path / "a.txt").touch()
    (source,) = text_of(tmp_path, "block")
    assert (source.corpus, source.document, source.split) == ("a", "block", None)
    (tmp_path / "a.txt.gz").touch()
    with pytest.raises(ValueError, match=r"a.txt.gz: corpus a is also in a.txt"):
        text_of(tmp_path)
    (tmp_path / "a b.txt").touch()
    with pytest.raises(ValueError, match=r"a b.txt: expected a name of letters, digits, - and _"):
        text_of(tmp_path)
