"""The cost of starting to train on 10^9 pairs in 10^5 files, compared with a thousandth of them.

    python -m bench.start [--files=100000]

Either folder has a hundred languages; the n-th has 1/n of the first one's files. The files are hard
links to a few files of 10,000 records each, so that all of them can be read and are in the page
cache. For each folder, a fresh process starts a training and measures the time until the manifest
is read and until the first batch is ready; the time of a batch of 64 rows of 128 tokens, early and
late, and the files opened for it; and at the end, the open files and the peak memory. All times are
CPU seconds, after the imports.
"""

import dataclasses
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time
from unittest import mock

import numpy as np
from absl import flags
from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]

from data_prep import encoding
from lingvo_gshard import cli
from lingvo_gshard.input import example_codec, manifest
from lingvo_gshard.input.batches import TranslationInput
from xla_spmd.files import digests, table

_FILES = flags.DEFINE_integer("files", 100_000, "Files of records in the larger folder.", 1000)
_MEASURED = flags.DEFINE_string("measured", None, "Measure only this folder, and print JSON.")
_RECORDS = 10_000
_CONTENTS = 8  # The files to link to. In ext4, a file has at most 65,000 names.
_LANGUAGES = 100
_BATCH_SIZE = 64
_ROW_LEN = 128
_BATCHES = 64  # In this number of batches, each lane begins one more pool.
_STEPS = (_BATCHES, 10**6)


def main() -> None:
    if _MEASURED.value:
        print(json.dumps(measure(_MEASURED.value)))
        return
    with tempfile.TemporaryDirectory() as folder:
        num_few = _FILES.value // 1000
        few = _measure_apart(pathlib.Path(folder, "few"), num_few)
        many = _measure_apart(pathlib.Path(folder, "many"), _FILES.value)

    rows = [(name, *_cells(few[name], many[name])) for name in few]
    print(table.text([("", "small", "large", "ratio"), *rows]))


def write(data_dir: pathlib.Path, num_files: int) -> None:
    """Writes a prepared folder of about `num_files` files of records, at least one per language."""
    rng = np.random.default_rng(1)
    contents = [_content(data_dir, f"{number}", rng) for number in range(_CONTENTS)]
    (data_dir / "records/train").mkdir(parents=True)

    shares = 1 / np.arange(1, _LANGUAGES + 1)
    languages = []
    for number, share in enumerate(shares / shares.sum()):
        code = f"q{number:02d}"
        shards = []
        for index in range(int(np.ceil(num_files * share))):
            name = f"records/train/{code}-{index:05d}"
            shards.append(_linked(data_dir, contents[index % _CONTENTS], name))
        records = manifest.Records(tuple(shards), 1, 1, 0)
        languages.append(manifest.Language(code, {"train": records}, {}, {}))

    vocabulary = manifest.Vocabulary(contents[0].lengths, 32_000)  # Any file works here.
    manifest.save(manifest.Manifest(tuple(languages), vocabulary, vocabulary, {}, {}), data_dir)


def measure(data_dir: str) -> dict[str, float]:
    """Starts the input of a training and reads batches; returns the costs by name."""
    opened: list[str] = []
    reader = array_record_module.ArrayRecordReader

    def open_file(path: str, **options: object) -> array_record_module.ArrayRecordReader:
        opened.append(path)
        return reader(path, **options)

    with mock.patch.object(array_record_module, "ArrayRecordReader", open_file):
        began = time.process_time()
        records = [language.records["train"] for language in manifest.load(data_dir).languages]
        costs = {
            "pairs": sum(of_language.num_examples for of_language in records),
            "files": sum(len(of_language.shards) for of_language in records),
            "secs to the manifest": time.process_time() - began,
        }

        p = TranslationInput.Params().Set(data_dir=data_dir, batch_size=_BATCH_SIZE)
        p.hash_records = False  # The right choice for this much data.
        source = p.Set(source_len=_ROW_LEN, target_len=_ROW_LEN).Instantiate()
        next(source)
        costs["secs to the first batch"] = time.process_time() - began

        for step in _STEPS:
            source.set_state({"next_index": step})
            next(source)  # Begins the first pool of each lane.
            began = time.process_time()
            before = len(opened)
            for _ in range(_BATCHES):
                next(source)
            costs[f"ms a batch after {step}"] = (time.process_time() - began) / _BATCHES * 1e3
            costs[f"files opened a batch after {step}"] = (len(opened) - before) / _BATCHES
    source.close()
    costs["open files"] = len(os.listdir("/proc/self/fd"))
    return costs | {"peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def _measure_apart(data_dir: pathlib.Path, num_files: int) -> dict[str, float]:
    """Returns the costs from `measure` in a fresh process, for a new folder of `num_files`."""
    write(data_dir, num_files)
    command = [sys.executable, "-m", "bench.start", f"--measured={data_dir}"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def _cells(few: float, many: float) -> tuple[str, str, str]:
    return f"{few:.4g}", f"{many:.4g}", f"{many / few:.2f}" if few else "-"


def _content(data_dir: pathlib.Path, name: str, rng: np.random.Generator) -> manifest.Shard:
    """Writes a file of records with 4 to 39 tokens per side, and the file of their lengths."""
    lengths = rng.integers(4, 40, (_RECORDS, 2))

    def pair(sizes: np.ndarray) -> bytes:
        source, target = (rng.integers(4, 32_000, size) for size in sizes)
        return example_codec.encode(source, target)

    records = map(pair, lengths)
    paths = f"{name}.array_record", f"{name}.lengths.npy"
    encoding.write_records(data_dir / paths[0], records)
    np.save(data_dir / paths[1], lengths.astype(np.uint8))
    file, lengths_file = (digests.describe(data_dir, path) for path in paths)
    return manifest.Shard(file, lengths_file, _RECORDS)


def _linked(data_dir: pathlib.Path, shard: manifest.Shard, name: str) -> manifest.Shard:
    """Links a shard's files under another name; returns the new shard."""
    files = []
    for file, suffix in ((shard.file, "array_record"), (shard.lengths, "lengths.npy")):
        os.link(data_dir / file.path, data_dir / f"{name}.{suffix}")
        files.append(dataclasses.replace(file, path=f"{name}.{suffix}"))
    return manifest.Shard(*files, shard.num_examples)


if __name__ == "__main__":
    cli.run("start", main)
