import collections
import itertools
import json
import math
import pathlib
import shutil

import numpy as np
import pytest

from data_prep import encoding
from lingvo_gshard.input import example_codec, manifest
from lingvo_gshard.input.batches import TranslationInput
from lingvo_gshard.input.bpe_tokenizer import load_pair
from lingvo_gshard.input.example_codec import EOS_ID
from lingvo_gshard.input.records import RecordSource
from lingvo_gshard.input.text_rows import TextInput
from lingvo_gshard.sharding.layout import TensorSpec
from tests.input import reading
from xla_spmd.files import digests


def _input(data_dir, process_index=0, num_processes=1, **changes):
    p = TextInput.Params().Set(data_dir=str(data_dir), batch_size=4, row_len=31)
    return p.Set(**changes).Instantiate(process_index=process_index, num_processes=num_processes)


def _one_pass(data_dir, **changes):
    source = _input(data_dir, repeat=False, **changes)
    count = source.count_batches(None)
    batches = list(source)
    assert count == len(batches) and source.count_batches(1) == min(1, count)
    return batches


def _rows(batches):
    """Returns the labels of all rows that are not empty, as tuples without padding."""
    rows = []
    for batch in batches:
        for labels, weights in zip(batch.labels.labels, batch.labels.weights, strict=True):
            rows.append(tuple(labels[weights > 0].tolist()))
    return [row for row in rows if row]


def _documents(data_dir, corpus, split):
    """Returns the ids of a corpus's documents, by file of records."""
    shards = manifest.load(data_dir).language(corpus).records[split].shards
    files = []
    for shard in shards:
        source = RecordSource(data_dir, manifest.Records((shard,), 0, 0, 0))
        files.append([one.target_ids.tolist() for one in source.read(np.arange(len(source)))])
    return files


def _cut(documents, row_len):
    """The definition, literally: all tokens in a line, and a new row after every `row_len`."""
    line = [token for document in documents for token in document]
    return [tuple(line[i : i + row_len]) for i in range(0, len(line), row_len)]


def _written(folder, text_dir, *documents):
    """Writes a folder of one corpus with these documents, lists of ids, in one file."""
    data = manifest.load(text_dir)
    path = folder / "records/train/x"
    records = [example_codec.encode([], document) for document in documents]
    encoding.write_records(path.with_suffix(".array_record"), records)
    lengths = np.array([[0, len(document)] for document in documents])
    np.save(path.with_suffix(".lengths.npy"), lengths)
    shutil.copytree(pathlib.Path(text_dir, "vocab"), folder / "vocab")

    names = ("records/train/x.array_record", "records/train/x.lengths.npy")
    files = [digests.describe(folder, name) for name in names]
    shard = manifest.Shard(*files, len(documents), int(lengths.sum()))
    of_train = manifest.Records((shard,), 0, int(lengths.sum()), 0)
    corpora = (manifest.Language("x", {"train": of_train}, {}, {}),)
    vocabulary = data.target_vocabulary
    manifest.save(manifest.Manifest(corpora, vocabulary, vocabulary, {}, {}, "text"), folder)
    return folder


def test_rows_by_hand(tmp_path, text_dir):
    folder = _written(tmp_path, text_dir, [5, 6, 2], [7, 8, 9, 2])
    (batch,) = _one_pass(folder, shuffle=False, batch_size=3, row_len=5)
    assert batch.features.ids.tolist() == [[1, 5, 6, 1, 7], [8, 9, 0, 0, 0], [0] * 5]
    assert batch.features.segment_ids.tolist() == [[1, 1, 1, 2, 2], [1, 1, 0, 0, 0], [0] * 5]
    assert batch.features.positions.tolist() == [[0, 1, 2, 0, 1], [0, 1, 0, 0, 0], [0] * 5]
    assert batch.labels.labels.tolist() == [[5, 6, 2, 7, 8], [9, 2, 0, 0, 0], [0] * 5]
    assert batch.labels.weights.tolist() == [[1] * 5, [1, 1, 0, 0, 0], [0] * 5]
    # The first ids are pieces of single bytes.
    assert batch.labels.num_bytes.tolist() == [[1, 1, 0, 1, 1], [1, 0, 0, 0, 0], [0] * 5]


def test_a_document_that_ends_with_a_row_leaves_the_next_one_to_others(tmp_path, text_dir):
    folder = _written(tmp_path, text_dir, [5, 6, 2], [7, 8, 2], [9] * 7 + [2], [5, 2])
    batches = _one_pass(folder, shuffle=False, batch_size=1, row_len=3)
    ids = [batch.features.ids[0].tolist() for batch in batches]
    assert ids == [[1, 5, 6], [1, 7, 8], [1, 9, 9], [9, 9, 9], [9, 9, 1], [5, 0, 0]]
    assert batches[4].features.segment_ids.tolist() == [[1, 1, 2]]
    # A row as long as all tokens, and rows of one token.
    assert _rows(_one_pass(folder, shuffle=False, row_len=16)) == _cut(
        [[5, 6, 2], [7, 8, 2], [9] * 7 + [2], [5, 2]], 16
    )
    assert len(_rows(_one_pass(folder, row_len=1))) == 16


@pytest.mark.parametrize("row_len", [5, 31, 1000])
def test_one_pass_is_all_documents_end_to_end(text_dir, row_len):
    expected = []
    for corpus in ("books", "notes"):
        for documents in _documents(text_dir, corpus, "train"):
            expected += _cut(documents, row_len)
    batches = _one_pass(text_dir, shuffle=False, row_len=row_len)
    assert _rows(batches) == expected
    assert len(batches) == math.ceil(len(expected) / 4)
    assert len(_documents(text_dir, "notes", "train")) > 1


def test_a_shuffle_loses_no_token_and_changes_the_order_of_documents_and_rows(text_dir):
    plain = _rows(_one_pass(text_dir, shuffle=False))
    shuffled = _rows(_one_pass(text_dir))
    assert sorted(map(len, shuffled)) == sorted(map(len, plain))
    tokens = [
        collections.Counter(token for row in rows for token in row) for rows in (plain, shuffled)
    ]
    assert tokens[0] == tokens[1]
    assert len(set(shuffled) & set(plain)) < len(plain) / 2
    # A segment within a row is a whole document, and so are nearly all notes.
    starts = 0
    notes = {tuple(ids) for file in _documents(text_dir, "notes", "train") for ids in file}
    for row in _rows(_one_pass(text_dir, languages=("notes",))):
        ends = [i for i, token in enumerate(row) if token == EOS_ID]
        for start, end in itertools.pairwise(ends):
            assert row[start + 1 : end + 1] in notes
            starts += 1
    assert starts > 20


@pytest.mark.parametrize("corpus", ["books", "notes"])
def test_labels_have_as_many_bytes_as_the_text(text_dir, corpus):
    _, tokenizer = load_pair(text_dir)
    records = manifest.load(text_dir).language(corpus).records["train"]
    batches = _one_pass(text_dir, languages=(corpus,), row_len=7)
    num_bytes = sum(int(batch.labels.num_bytes.sum()) for batch in batches)
    texts = [
        tokenizer.decode(ids) for file in _documents(text_dir, corpus, "train") for ids in file
    ]
    assert num_bytes == sum(len(text.encode()) for text in texts) == records.num_target_bytes
    assert sum(batch.labels.weights.sum() for batch in batches) == records.num_target_tokens


def test_the_stream_has_each_row_once_a_pass_and_the_corpora_in_proportion(text_dir):
    plain = {name: _rows(_one_pass(text_dir, languages=(name,))) for name in ("books", "notes")}
    num_rows = sum(map(len, plain.values()))
    rows = _rows(reading.take(_input(text_dir, batch_size=1), 2 * num_rows))
    for own in plain.values():
        assert len(set(own)) == len(own)
        drawn = [row for row in rows if row in set(own)]
        # To within one row, and in another order in the second pass.
        assert abs(len(drawn) - 2 * len(own)) <= 1
        first = drawn[: len(own)]
        assert sorted(first) == sorted(own)
        assert drawn[len(own) : 2 * len(own)] != first
        assert abs(sum(row in set(own) for row in rows[:40]) - 40 * len(own) / num_rows) <= 1.5


def test_a_temperature_draws_small_corpora_more_often_up_to_a_limit(text_dir, caplog):
    books = set(_rows(_one_pass(text_dir, languages=("books",))))
    hot = {"temperature": 1e9, "max_repeats": None}
    rows = _rows(reading.take(_input(text_dir, **hot), 50))
    assert abs(sum(row in books for row in rows) - 100) <= 1
    assert not caplog.records
    _input(text_dir, **hot | {"max_repeats": 1.01}).close()
    assert "max_repeats 1.01 limits 1 of 2" in caplog.text


@pytest.mark.parametrize("changes", [{}, {"repeat": False, "split": "dev"}])
def test_batches_resume_exactly_and_processes_share_them(text_dir, changes):
    whole = reading.take(_input(text_dir, **changes), 5)
    late = _input(text_dir, **changes)
    late.set_state(json.loads(json.dumps({"next_index": 3})))
    for batch in whole[3:]:
        reading.assert_equal(next(late), batch)
    assert late.get_state() == {"next_index": 5}

    parts = [_input(text_dir, i, 4, **changes) for i in range(4)]
    for batch in whole:
        own = [next(part) for part in parts]
        columns = zip(*(part.Flatten() for part in own), strict=True)
        reading.assert_equal(own[0].Pack(map(np.concatenate, columns)), batch)


def test_far_batches_are_made_at_once(text_dir):
    """As after weeks of training: batch 10**9 continues where the batch before it ends."""
    source = _input(text_dir, batch_size=2)
    source.set_state({"next_index": 10**9})
    rows = _rows(reading.take(source, 3))
    one_by_one = _input(text_dir, batch_size=1)
    one_by_one.set_state({"next_index": 2 * 10**9})
    assert _rows(reading.take(one_by_one, 6)) == rows


def test_batches_match_their_specs(text_dir):
    source = _input(text_dir)
    batch = next(source)
    for (path, spec), (name, array) in zip(
        source.specs.FlattenItems(), batch.FlattenItems(), strict=True
    ):
        assert (path, spec) == (name, TensorSpec(array.shape, array.dtype.name, "BL"))
    assert batch.features.ids.shape == (4, 31)
    assert source.specs == TextInput.batch_specs(source.p)


def test_a_seed_repeats(text_dir):
    first, same, other = (_rows(reading.take(_input(text_dir, seed=seed), 3)) for seed in (1, 1, 2))
    assert first == same != other


def test_data_of_another_kind_is_named(text_dir, data_dir):
    with pytest.raises(
        ValueError, match="holds data of kind parallel, but TextInput reads kind te"
    ):
        _input(data_dir)
    wrong = TranslationInput.Params().Set(data_dir=text_dir, batch_size=4, source_len=9)
    with pytest.raises(ValueError, match="of kind text, but TranslationInput reads kind parallel"):
        wrong.Set(target_len=9).Instantiate()


def test_user_mistakes_are_named(text_dir):
    for changes, message in (
        ({"row_len": 0}, "row_len 0: expected at least 1"),
        ({"batch_size": 0}, "batch_size 0: expected at least 1"),
        ({"languages": ("poems",)}, "corpus 'poems' is not in the data, which has books, notes"),
        ({"split": "test"}, "no corpus has examples in split 'test'"),
    ):
        with pytest.raises(ValueError, match=message):
            _input(text_dir, **changes)
    with pytest.raises(ValueError, match="num_processes 3: expected a divisor of batch_size 4"):
        _input(text_dir, 0, 3)


def test_damage_is_named_when_it_is_read(text_dir, tmp_path):
    copy = pathlib.Path(shutil.copytree(text_dir, tmp_path / "copy"))
    path = copy / "records/train/books-00000-of-00001.array_record"
    content = bytearray(path.read_bytes())
    content[500] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{path} has SHA-256"):
        next(_input(copy, languages=("books",)))

    # Lengths that do not match the records.
    lengths = copy / "records/dev/notes-00000-of-00001.lengths.npy"
    np.save(lengths, np.load(lengths) + 1)
    with pytest.raises(ValueError, match=r"notes-00000-of-00001.lengths.npy has "):
        next(_input(copy, split="dev", repeat=False, languages=("notes",)))
