import contextlib
import dataclasses
import pathlib
import shutil

import numpy as np
import pytest

from data_prep import encoding
from lingvo_gshard.input import example_codec, manifest, records
from xla_spmd.files import atomic_file, digests


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
        files = (digests.describe(folder, name) for name in (path, f"x/{start}.npy"))
        shards.append(manifest.Shard(*files, number))
    return folder, manifest.Records(tuple(shards), 1, 1, 0), examples


def test_reads_what_was_written_in_any_order(written):
    folder, entry, examples = written
    source = records.RecordSource(folder, entry)
    assert len(source) == entry.num_examples == 57
    order = np.random.default_rng(1).permutation(57)
    for index, example in zip(order, source.read(order), strict=True):
        np.testing.assert_array_equal(example.source_ids, examples[index][0])
        np.testing.assert_array_equal(example.target_ids, examples[index][1])
    assert source.read(np.array([], int)) == []
    assert source.lengths.tolist() == [[len(s), len(t)] for s, t in examples]


def _damaged(folder, tmp_path, shard, position):
    """Returns a copy of a shard's file in which one byte differs."""
    content = bytearray((folder / shard.file.path).read_bytes())
    content[position] ^= 0x55
    path = tmp_path / shard.file.path
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


def test_a_damaged_byte_anywhere_is_reported_or_has_no_effect(written, tmp_path):
    folder, entry, examples = written
    shard = entry.shards[2]
    one = dataclasses.replace(entry, shards=(shard,))
    size, reported = shard.file.size_bytes, 0
    assert size < 1 << 18
    # Most bytes of such a small file pad its blocks of 64 KiB.
    for position in [*range(0, 2500, 13), *range(2500, size, 1997), *range(size - 70, size)]:
        path = _damaged(folder, tmp_path, shard, position)
        try:
            found = records.RecordSource(tmp_path, one, hashed=False).read(np.arange(36))
        except ValueError as error:
            reported += 1
            assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
            continue
        for example, (source_ids, target_ids) in zip(found, examples[21:], strict=True):
            assert example.source_ids.tolist() == source_ids
            assert example.target_ids.tolist() == target_ids
    assert reported > 100


def test_a_file_in_the_place_of_another_is_refused_when_it_is_first_read(written, tmp_path):
    folder, entry, _ = written
    shutil.copytree(folder, tmp_path / "copy")
    shard = entry.shards[0]
    other = [(np.arange(n) % 7 + 4, np.array([2])) for n in range(1, 21)]
    path = tmp_path / "copy" / shard.file.path
    encoding.write_records(path, [example_codec.encode(*pair) for pair in other])
    source = records.RecordSource(tmp_path / "copy", entry)
    assert len(source.read(np.arange(20, 57))) == 37  # From the other files.
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"^{path} has "):
            source.read(np.array([3]))


def test_missing_files_and_damaged_lengths_are_reported(written, tmp_path):
    folder, entry, _ = written
    with pytest.raises(ValueError, match=r"x/de-0.array_record is missing"):
        records.RecordSource(tmp_path, entry).read(np.array([0]))
    content = (folder / "x/20.npy").read_bytes()
    for file in (shard.lengths for shard in entry.shards):
        path = tmp_path / file.path
        path.parent.mkdir(exist_ok=True)
        path.write_bytes((folder / file.path).read_bytes())
    path = pathlib.Path(tmp_path, "x/20.npy")
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"x/20.npy has SHA-256"):
        records.RecordSource(tmp_path, entry).lengths  # noqa: B018


def test_only_the_files_used_last_stay_open(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "_MAX_OPEN_FILES", 3)
    opened, reader = [], records.array_record_module.ArrayRecordReader
    monkeypatch.setattr(
        records.array_record_module,
        "ArrayRecordReader",
        lambda path, **options: opened.append(path) or reader(path, **options),
    )
    shards = []
    for number in range(20):
        encoding.write_records(tmp_path / str(number), [example_codec.encode([number], [2])] * 4)
        file = digests.describe(tmp_path, str(number))
        shards.append(manifest.Shard(file, file, 4))
    halves = (manifest.Records(tuple(half), 1, 1, 0) for half in (shards[:9], shards[9:]))
    source = records.RecordSource(tmp_path, *halves)
    assert source.sizes == [36, 44]
    for indices in (np.arange(80), np.arange(80)[::-1], np.arange(79, 68, -1)):
        found = source.read(indices)
        assert [int(one.source_ids[0]) for one in found] == (indices // 4).tolist()
    # A call opens each file at most once; the third call finds its three files open.
    assert [path.rsplit("/")[-1] for path in opened[:20]] == [str(number) for number in range(20)]
    assert len(opened) == 40
    assert len(_open_files(tmp_path)) == 3


def _open_files(folder):
    """Returns the files below a folder that this process has open."""
    files = []
    for descriptor in pathlib.Path("/proc/self/fd").iterdir():
        # The link of a file that was closed meanwhile, such as this folder's listing, is broken.
        with contextlib.suppress(FileNotFoundError):
            files.append(descriptor.readlink())
    return [path for path in files if path.is_relative_to(folder)]


def test_a_full_disk_is_reported_and_leaves_no_file(tmp_path, monkeypatch):
    replacing = atomic_file.replacing  # Saved, to give the temporary file a known name.
    monkeypatch.setattr(atomic_file, "replacing", lambda path, is_shared: replacing(path))
    path = tmp_path / "de.array_record"
    path.with_name("de.array_record.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device.*de.array_record"):
        encoding.write_records(path, [b"a record"])
    assert not path.exists()


def test_a_wrong_number_of_records_is_refused(written):
    folder, entry, _ = written
    shards = (dataclasses.replace(entry.shards[0], num_examples=21),)
    with pytest.raises(ValueError, match=r"de-0.* has 20 records, the manifest 21"):
        records.RecordSource(folder, dataclasses.replace(entry, shards=shards)).read(np.array([0]))
