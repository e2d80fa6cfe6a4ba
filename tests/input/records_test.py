import dataclasses

import numpy as np
import pytest

from data_prep import encoding
from lingvo_gshard.input import example_codec, manifest, records


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Three files of 20, 1 and 36 records: (folder, manifest's entry, the examples)."""
    folder = tmp_path_factory.mktemp("records")
    rng = np.random.default_rng(4)
    examples = [
        (rng.integers(0, 9000, rng.integers(1, 12)).tolist(), [i, 70000 if i % 3 else 5, 2])
        for i in range(57)
    ]
    shards = []
    for start, end in ((0, 20), (20, 21), (21, 57)):
        path = f"x/de-{start}.array_record"
        encoded = (example_codec.encode(*example) for example in examples[start:end])
        number = encoding.write_records(folder / path, encoded)
        np.save(folder / f"x/{start}.npy", [[len(s), len(t)] for s, t in examples[start:end]])
        files = (manifest.describe_file(folder, name) for name in (path, f"x/{start}.npy"))
        shards.append(manifest.Shard(*files, number))
    return folder, manifest.Records(tuple(shards), 1, 1, 0, 0), examples


def test_reads_what_was_written_in_any_order(written):
    folder, entry, examples = written
    source = records.RecordSource(folder, entry)
    assert len(source) == entry.num_examples == 57
    order = np.random.default_rng(1).permutation(57)
    for index, example in zip(order, source.read(order), strict=True):
        np.testing.assert_array_equal(example.source_ids, examples[index][0])
        np.testing.assert_array_equal(example.target_ids, examples[index][1])
    np.testing.assert_array_equal(source[20].source_ids, examples[20][0])
    assert source.read(np.array([], int)) == []
    assert source.lengths.tolist() == [[len(s), len(t)] for s, t in examples]


def test_a_wrong_number_of_records_is_refused(written):
    folder, entry, _ = written
    shards = (dataclasses.replace(entry.shards[0], num_examples=21),)
    with pytest.raises(ValueError, match=r"de-0.* holds 20 records, the manifest says 21"):
        records.RecordSource(folder, dataclasses.replace(entry, shards=shards))[0]


def test_a_full_disk_is_reported_and_leaves_no_file(tmp_path):
    path = tmp_path / "de.array_record"
    path.with_name("de.array_record.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device.*de.array_record"):
        encoding.write_records(path, [b"a record"])
    assert not path.exists()
