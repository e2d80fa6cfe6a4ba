import json
import math
import pathlib
import shutil

import numpy as np
import pytest

from lingvo_gshard.input import manifest, mixture, packing, records
from lingvo_gshard.input.batches import TranslationInput
from lingvo_gshard.input.packing import Rows
from lingvo_gshard.sharding.layout import TensorSpec
from tests.input import reading
from xla_spmd.files import digests


def _input(data_dir, process_index=0, num_processes=1, **changes):
    p = TranslationInput.Params().Set(data_dir=data_dir, batch_size=6, source_len=29, target_len=23)
    return p.Set(**changes).Instantiate(process_index=process_index, num_processes=num_processes)


def _segments(batch):
    """Returns (source ids, labels) of every segment, in the order of the rows."""
    features, labels = batch.features, batch.labels
    for row in range(features.source_ids.shape[0]):
        for segment in range(1, features.source_segment_ids[row].max() + 1):
            in_source = features.source_segment_ids[row] == segment
            in_target = features.target_segment_ids[row] == segment
            yield (
                tuple(features.source_ids[row][in_source].tolist()),
                tuple(labels.target_labels[row][in_target].tolist()),
            )


def _all_examples(data_dir, split):
    data = manifest.load(data_dir)
    for language in data.languages:
        if split in language.records:
            source = records.RecordSource(data_dir, language.records[split])
            for example in source.read(np.arange(len(source))):
                yield tuple(example.source_ids.tolist()), tuple(example.target_ids.tolist())


def test_batches_match_their_specs(data_dir):
    source = _input(data_dir)
    batch = next(source)
    pairs = zip(source.specs.FlattenItems(), batch.FlattenItems(), strict=True)
    for (path, spec), (name, array) in pairs:
        assert (path, spec) == (name, TensorSpec(array.shape, array.dtype.name, "BL"))
    assert batch.features.source_ids.shape == (6, 29)
    assert batch.labels.target_weights.shape == (6, 23)


@pytest.mark.parametrize("num_before", [0, 47])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rows": Rows.SINGLE},
        pytest.param({"shuffle": False, "batch_size": 150}, marks=pytest.mark.slow),
    ],
)
def test_resume_is_exact(data_dir, num_before, changes):
    straight = _input(data_dir, **changes)
    reading.take(straight, num_before)
    state = json.loads(json.dumps(straight.get_state()))
    expected = reading.take(straight, 30)
    fresh = _input(data_dir, **changes)
    fresh.set_state(state)
    assert fresh.get_state() == state
    for a, b in zip(reading.take(fresh, 30), expected, strict=True):
        reading.assert_equal(a, b)
    # The same input continues as well, although its thread has prefetched other batches.
    straight.set_state(state)
    for a, b in zip(reading.take(straight, 30), expected, strict=True):
        reading.assert_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{}, *({"split": "dev", "repeat": False, "rows": r} for r in (Rows.SINGLE, Rows.BUCKETED))],
)
def test_processes_share_the_batches_of_a_single_process(data_dir, changes):
    num_processes = 4
    whole = _input(data_dir, batch_size=8, **changes)
    parts = [
        _input(data_dir, batch_size=8, num_processes=num_processes, process_index=i, **changes)
        for i in range(num_processes)
    ]
    for _ in range(2 if changes else 60):
        own = [next(part) for part in parts]
        joined = own[0].Pack(
            np.concatenate(leaves)
            for leaves in zip(*(batch.Flatten() for batch in own), strict=True)
        )
        reading.assert_equal(next(whole), joined)
    # All processes have the same state, and any number of processes can continue from it.
    assert all(part.get_state() == whole.get_state() for part in parts)
    parts[1].set_state(json.loads(json.dumps(whole.get_state())))
    expected, found = next(whole), next(parts[1])
    size = len(expected.features.source_ids) // num_processes
    reading.assert_equal(found, expected.Transform(lambda x: x[size : 2 * size]))


def _record_reads(monkeypatch, cls):
    """Returns a list that collects the arguments of all later calls of cls.read."""
    calls, original = [], cls.read

    def read(self, *args):
        calls.append(args)
        return original(self, *args)

    monkeypatch.setattr(cls, "read", read)
    return calls


@pytest.mark.slow
def test_more_processes_than_eight_have_a_lane_each(data_dir, monkeypatch):
    calls = _record_reads(monkeypatch, mixture.Mixture)
    sources = [
        _input(data_dir, batch_size=12, num_processes=12, process_index=i) for i in range(12)
    ]
    batches = [next(source) for source in sources]
    assert all(batch.features.source_ids.shape == (1, 29) for batch in batches)
    parts = [bounds for bounds in calls if bounds != (0, 2000)]
    assert len(set(parts)) == len(parts) >= 12


@pytest.mark.parametrize("shuffle", [True, False])
def test_processes_pack_an_nth_of_the_rows_for_equally_many_batches(data_dir, shuffle, monkeypatch):
    planned, plan_rows, num_processes = [], packing.plan_rows, 3
    monkeypatch.setattr(
        packing, "plan_rows", lambda *args: planned.append(len(args[0])) or plan_rows(*args)
    )
    settings = {"split": "dev", "repeat": False, "shuffle": shuffle, "batch_size": 12}
    settings |= {"source_len": 90, "target_len": 80, "num_processes": num_processes}
    sources = [_input(data_dir, process_index=i, **settings) for i in range(num_processes)]
    parts = [list(source) for source in sources]
    assert planned == [math.ceil(48 / num_processes)] * num_processes
    shapes = [[batch.Transform(np.shape) for batch in part] for part in parts]
    assert all(one == shapes[0] for one in shapes)
    assert shapes[0][0].features.source_ids == (12 // num_processes, 90)
    found = [segment for part in parts for batch in part for segment in _segments(batch)]
    assert sorted(found) == sorted(_all_examples(data_dir, "dev"))
    assert {source.get_state()["next_index"] for source in sources} == {len(parts[0])}


@pytest.mark.parametrize("rows", Rows)
def test_processes_read_different_records_in_one_pass(data_dir, rows, monkeypatch):
    calls = _record_reads(monkeypatch, records.RecordSource)
    settings = {"split": "dev", "repeat": False, "rows": rows, "num_processes": 2}
    sizes = []
    for index in (0, 1):
        list(_input(data_dir, process_index=index, **settings))
        sizes.append(sum(len(indices) for (indices,) in calls))
    assert 10 < sizes[0] < 38
    assert sorted(np.concatenate([indices for (indices,) in calls])) == list(range(48))


def test_an_unknown_state_is_refused(data_dir):
    state = _input(data_dir).get_state()
    assert state == {"next_index": 0}
    with pytest.raises(ValueError, match=r"input state has \['step'\], expected \['next_index'"):
        _input(data_dir).set_state({"step": 3})


@pytest.mark.parametrize("rows", Rows)
@pytest.mark.parametrize("shuffle", [True, False])
def test_one_pass_has_every_example_once(data_dir, rows, shuffle):
    source = _input(
        data_dir,
        split="dev",
        repeat=False,
        rows=rows,
        shuffle=shuffle,
        source_len=90,
        target_len=80,
    )
    batches = list(source)
    found = [segment for batch in batches for segment in _segments(batch)]
    expected = list(_all_examples(data_dir, "dev"))
    assert sorted(found) == sorted(expected)
    assert len(found) == 48
    # Packing and shuffling change the order; here, a single bucket contains all pairs.
    assert (found == expected) == (rows is not Rows.PACKED and not shuffle)
    if rows is Rows.SINGLE:
        assert len(batches) == 8
    if rows is not Rows.PACKED:
        assert batches[0].features.source_segment_ids.max() == 1
    source.set_state({"next_index": 0})
    reading.assert_equal(next(source), batches[0])


@pytest.mark.parametrize("shuffle", [True, False])
def test_bucketed_batches_have_equal_tokens_and_the_shortest_rows_possible(data_dir, shuffle):
    source = _input(
        data_dir,
        split="dev",
        repeat=False,
        rows=Rows.BUCKETED,
        shuffle=shuffle,
        source_len=16,
        target_len=40,
    )
    batches = list(source)
    shapes = [batch.features.source_ids.shape for batch in batches]
    assert set(shapes) == {(6, 16), (12, 8), (24, 4)}
    assert shuffle != (shapes == sorted(shapes, key=lambda shape: shape[1]))
    for batch, (rows, source_len) in zip(batches, shapes, strict=True):
        target_len = source_len * 40 // 16
        assert batch.labels.target_labels.shape == (rows, target_len)
        assert batch.features.source_segment_ids.max() == 1
        for source_ids, target_ids in _segments(batch):
            is_short = len(source_ids) <= source_len // 2 and len(target_ids) <= target_len // 2
            assert source_len == 4 or not is_short
    found = [segment for batch in batches for segment in _segments(batch)]
    examples = list(_all_examples(data_dir, "dev"))
    num_long = sum(len(s) > 16 or len(t) > 40 for s, t in examples)
    assert num_long > 0
    assert len(set(found) & set(examples)) == 48 - num_long
    # Odd lengths have a single bucket.
    odd = _input(data_dir, split="dev", repeat=False, rows=Rows.BUCKETED)
    assert {batch.features.source_ids.shape for batch in odd} == {(6, 29)}


def test_rows_of_weight_0_fill_up_the_last_batch(data_dir):
    source = _input(data_dir, split="dev", repeat=False, rows=Rows.SINGLE, batch_size=50)
    batches = list(source)
    assert len(batches) == 1
    for name, array in batches[0].FlattenItems():
        assert array.shape[0] == 50
        assert not array[48:].any(), name
    assert (batches[0].labels.target_weights[:48].sum(axis=1) > 0).all()


def test_one_pass_truncates_too_long_examples(data_dir):
    source = _input(data_dir, split="dev", repeat=False, source_len=12, target_len=9)
    found = [segment for batch in source for segment in _segments(batch)]
    expected = [
        (s if len(s) <= 12 else (*s[:11], 2), t if len(t) <= 9 else (*t[:8], 2))
        for s, t in _all_examples(data_dir, "dev")
    ]
    assert sorted(found) == sorted(expected)
    assert sum(len(s) > 12 or len(t) > 9 for s, t in _all_examples(data_dir, "dev")) > 5


def test_an_endless_stream_leaves_too_long_examples_out(data_dir):
    source = _input(data_dir, source_len=12, target_len=9, max_too_long_share=1.0)
    found = {segment for batch in reading.take(source, 200) for segment in _segments(batch)}
    examples = set(_all_examples(data_dir, "train"))
    short = {(s, t) for s, t in examples if len(s) <= 12 and len(t) <= 9}
    assert found == short != examples


def test_rows_that_no_example_fits_are_refused(data_dir):
    with pytest.raises(ValueError, match=r"none of 200\d examples fit RowShape"):
        _input(data_dir, source_len=2, target_len=2)


@pytest.mark.parametrize(
    ("settings", "num_warnings"),
    [
        ({"max_repeats": 1.5}, 1),
        ({"max_repeats": None}, 0),
        ({"max_repeats": 1.5, "repeat": False}, 0),
        ({"max_repeats": 1.5, "temperature": 1.0}, 0),
    ],
)
def test_a_limit_on_repeats_is_logged_where_training_reads(
    data_dir, caplog, settings, num_warnings
):
    _input(data_dir, **settings).close()
    told = [record.getMessage() for record in caplog.records]
    assert told == num_warnings * [
        "max_repeats 1.5 limits 2 of 3 languages, which temperature 5 would repeat more often; "
        "the smallest: cy, br. None removes the limit."
    ]


def test_only_the_first_process_logs_a_limit(data_dir, caplog):
    _input(data_dir, process_index=1, num_processes=2, max_repeats=1.5).close()
    assert not caplog.records


def test_seeds_differ_and_repeat(data_dir):
    first, same, other = (reading.take(_input(data_dir, seed=seed), 3) for seed in (1, 1, 2))
    for a, b in zip(first, same, strict=True):
        reading.assert_equal(a, b)
    assert any(
        (a.features.source_ids != b.features.source_ids).any()
        for a, b in zip(first, other, strict=True)
    )


def test_user_mistakes_are_named(data_dir, tmp_path):
    with pytest.raises(ValueError, match=r"set batch_size, data_dir, source_len, target_len"):
        TranslationInput.Params().Instantiate()
    with pytest.raises(ValueError, match=r"no manifest.json in"):
        _input(str(tmp_path))
    with pytest.raises(ValueError, match=r"batch_size 0"):
        _input(data_dir, batch_size=0)
    for changes in ({}, {"split": "dev", "repeat": False}):
        with pytest.raises(ValueError, match=r"num_processes 4: .* a divisor of batch_size 6"):
            _input(data_dir, num_processes=4, **changes)
    with pytest.raises(ValueError, match=r"rows BUCKETED needs repeat=False"):
        _input(data_dir, rows=Rows.BUCKETED)
    with pytest.raises(ValueError, match=r"language 'de' is not in the data"):
        _input(data_dir, languages=["de"])


def _with_a_byte_changed(data_dir, tmp_path, name, position):
    path = pathlib.Path(shutil.copytree(data_dir, tmp_path / "copy")) / name
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    return path


def test_damaged_vocabularies_and_missing_files_are_reported_before_anything_is_read(
    data_dir, tmp_path
):
    path = _with_a_byte_changed(data_dir, tmp_path, "vocab/source.model", 1000)
    copy = str(tmp_path / "copy")
    with pytest.raises(ValueError, match=rf"{path.name} has SHA-256 .*: it was damaged"):
        _input(copy)
    shutil.copy(pathlib.Path(data_dir, "vocab/source.model"), path)
    path = tmp_path / "copy/records/train/aa-00000-of-00001.array_record"
    path.unlink()
    next(_input(copy, split="dev", repeat=False))  # Other splits can still be read.
    with pytest.raises(ValueError, match=rf"{path.name} is missing"):
        _input(copy)


@pytest.mark.parametrize("split", ["train", "dev"])
def test_a_damaged_record_makes_no_batch(data_dir, tmp_path, split):
    name = f"records/{split}/aa-00000-of-00001.array_record"
    path = _with_a_byte_changed(data_dir, tmp_path, name, 1000)
    for hashed, message in {True: " has SHA-256", False: ": Corrupted .*mismatch"}.items():
        how = {"split": split, "repeat": split == "train", "hash_records": hashed}
        with pytest.raises(ValueError, match=f"^{path}{message}") as error:
            next(_input(str(tmp_path / "copy"), **how))
        assert "\n" not in str(error.value)


def test_each_process_looks_at_its_share_of_the_files(data_dir, monkeypatch):
    calls = []
    monkeypatch.setattr(
        digests, "verify", lambda _, files, contents=True: contents or calls.append(set(files))
    )
    for index in (0, 1):
        _input(data_dir, process_index=index, num_processes=2)
    shards = [one.records["train"].shards for one in manifest.load(data_dir).languages]
    assert calls[0] | calls[1] == {shard.file for one in shards for shard in one}
    assert not calls[0] & calls[1]
    assert len(calls[0]) - len(calls[1]) in (0, 1)


def test_a_closed_input_is_refused(data_dir):
    source = _input(data_dir)
    next(source)
    source.close()
    source.close()
    with pytest.raises(ValueError, match=r"closed iterator"):
        next(source)
