"""Damages the files of a finished run, one at a time, and checks that nothing damaged is used.

    python -m tools.fuzz --data=DATA --run_dir=RUN --bundle_dir=BUNDLE --mutations=1000

Each file is read by the library's own functions, in this process. A mutation flips a bit, zeroes a
block, cuts or extends the file, puts another file in its place, or makes it one of an older
version. It must end in one line that names the file, or in the very same answer. The exit status is
1 if any does not. The folders themselves are not touched: copies of them are damaged.
"""

import collections
import dataclasses
import json
import os
import pathlib
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from absl import app, flags, logging

from lingvo_gshard.checkpoints import checkpoints, exported
from lingvo_gshard.checkpoints.stored import Stored
from lingvo_gshard.decoding import bundle
from lingvo_gshard.files import digests, table
from lingvo_gshard.input import manifest, sentences
from lingvo_gshard.input.records import RecordSource
from lingvo_gshard.input.tokenizer import Tokenizer, load_pair, vocabulary_files
from lingvo_gshard.runs import launch as launches
from lingvo_gshard.train import config

_DATA_DIR = flags.DEFINE_string("data", None, "A prepared data folder.")
_LOGDIR = flags.DEFINE_string("run_dir", None, "A finished run.")
_BUNDLE = flags.DEFINE_string("bundle_dir", None, "An exported bundle.")
_MUTATIONS = flags.DEFINE_integer("mutations", 1000, "Mutations of each kind of file.", 1)
_SEED = flags.DEFINE_integer("seed", 1, "The seed of the mutations.")

FINE = ("same", "refused")
FAILURES = ("wrong", "unnamed", "traceback")
_BLOCK_BYTES = 4096
_PRINTED = 3  # Failures of each kind of file and outcome.


@dataclasses.dataclass(frozen=True)
class Kind:
    """Files that are read alike: `read` returns an answer that can be compared.

    An error names the file, or `also`.
    """

    name: str
    files: Sequence[pathlib.Path]
    read: Callable[[], Any]
    also: str | None = None


def main(argv: Sequence[str]) -> None:
    del argv
    logging.set_verbosity(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        copies = {}
        for name, flag in {"data_dir": _DATA_DIR, "logdir": _LOGDIR, "bundle_dir": _BUNDLE}.items():
            if flag.value:
                copies[name] = pathlib.Path(shutil.copytree(flag.value, f"{folder}/{name}"))
        if not copies:
            raise app.UsageError("give --data, --run_dir or --bundle_dir.")
        rows = [("kind", *FINE, *FAILURES, "ms")]
        num_failures = 0
        for kind in kinds(**copies):
            began = time.monotonic()
            counts = outcomes(kind, _MUTATIONS.value, _SEED.value)
            ms = (time.monotonic() - began) / _MUTATIONS.value * 1e3
            cells = (str(counts[outcome]) for outcome in (*FINE, *FAILURES))
            rows.append((kind.name, *cells, f"{ms:.1f}"))
            num_failures += sum(counts[outcome] for outcome in FAILURES)
        print(table.text(rows))
    sys.exit(1 if num_failures else 0)


def kinds(
    data_dir: pathlib.Path | None = None,
    logdir: pathlib.Path | None = None,
    bundle_dir: pathlib.Path | None = None,
) -> list[Kind]:
    """Returns every kind of file of the folders that are given."""
    return [
        *(_of_data(data_dir) if data_dir else ()),
        *(_of_run(logdir) if logdir else ()),
        *(_of_bundle(bundle_dir) if bundle_dir else ()),
    ]


def outcomes(kind: Kind, num_mutations: int, seed: int) -> collections.Counter[str]:
    """Counts the outcomes of mutations, each of one file; prints the first failures."""
    expected = kind.read()
    counts = collections.Counter[str]()
    for number in range(num_mutations):
        rng = random.Random(f"{seed} {kind.name} {number}")
        path = rng.choice(kind.files)
        how, content = _mutated(path, kind.files, rng)
        found, message = _outcome(kind, path, content, number, expected)
        counts[found] += 1
        if found in FAILURES and counts[found] <= _PRINTED:
            print(f"{kind.name}, mutation {number}, {path} {how}: {found}: {message}")
    return counts


def _outcome(
    kind: Kind, path: pathlib.Path, content: bytes, number: int, expected: Any
) -> tuple[str, str]:
    aside = path.with_name(path.name + ".aside")
    path.rename(aside)
    try:
        path.write_bytes(content)
        os.utime(path, ns=(number, number))  # Hashes are kept by the time of modification.
        return ("same" if kind.read() == expected else "wrong"), "the answer differs"
    except (ValueError, OSError) as error:
        text = str(error)
        is_named = path.name in text or (kind.also is not None and kind.also in text)
        return ("refused" if is_named and "\n" not in text else "unnamed"), text
    except Exception as error:
        return "traceback", repr(error)
    finally:
        aside.replace(path)


def _mutated(
    path: pathlib.Path, others: Sequence[pathlib.Path], rng: random.Random
) -> tuple[str, bytes]:
    """Returns a mutation's name and the bytes that it leaves."""
    content = bytearray(path.read_bytes())
    how = rng.choice(["flipped", "zeroed", "cut", "extended", "exchanged", "older"])
    place = rng.randrange(max(len(content), 1))
    if how == "flipped" and content:
        content[place] ^= 1 << rng.randrange(8)
    elif how == "zeroed":
        end = min(len(content), place + rng.randint(1, _BLOCK_BYTES))
        content[place:end] = bytes(end - place)
    elif how == "extended":
        content += rng.randbytes(rng.randint(1, 99))
    elif how == "exchanged" and len(others) > 1:
        content = bytearray(rng.choice([one for one in others if one != path]).read_bytes())
    elif how == "older" and path.name.endswith("json"):
        content = bytearray(_older(content, rng))
    else:
        how = "cut"
        content = content[:place]
    return how, bytes(content)


def _older(content: bytes, rng: random.Random) -> bytes:
    """Returns an object of JSON without a digest, and of the version before or of none."""
    fields = json.loads(content)
    fields.pop("digest", None)
    version = fields.pop("version", None)
    if version and rng.random() < 0.5:
        fields["version"] = version - 1
    return json.dumps(fields).encode()


def _of_data(folder: pathlib.Path) -> Iterator[Kind]:
    made = manifest.load(folder)
    records: list[manifest.Records] = []
    texts: list[digests.File] = []
    for language in made.languages:
        records += language.records.values()
        texts += language.text.values()
    shards: list[manifest.Shard] = []
    for of_split in records:
        shards += of_split.shards

    def read_records() -> list[bytes]:
        source = RecordSource(folder, *records)
        examples = source.read(np.arange(len(source)))
        ids: list[np.ndarray] = []
        for example in examples:
            ids += [example.source_ids, example.target_ids]
        return [array.tobytes() for array in ids]

    def read_texts() -> list[tuple[str, str]]:
        digests.verify(folder, texts)  # As decode_split does.
        pairs: list[tuple[str, str]] = []
        for text in texts:
            pairs += sentences.eval_text(folder / text.path)
        return pairs

    def read_manifest() -> str:
        return repr(dataclasses.replace(manifest.load(folder), version=0))

    yield Kind("manifest", [folder / manifest.FILE_NAME], read_manifest)
    vocabularies = [folder / file.path for file in made.vocabulary_files]
    yield Kind("vocabularies of data", vocabularies, lambda: _pieces(*load_pair(folder)))
    yield Kind("records", [folder / shard.file.path for shard in shards], read_records)
    lengths = [folder / shard.lengths.path for shard in shards]
    yield Kind("lengths", lengths, lambda: RecordSource(folder, *records).lengths.tolist())
    yield Kind("text", [folder / text.path for text in texts], read_texts)


def _of_run(folder: pathlib.Path) -> Iterator[Kind]:
    logdir = str(folder)
    within = pathlib.Path(checkpoints.folder(folder))
    yield Kind("experiment.json", [folder / "experiment.json"], lambda: launches.recorded(logdir))
    vocabularies = vocabulary_files(folder, "parallel")
    yield Kind(
        "vocabularies of a run",
        vocabularies,
        lambda: _pieces(*map(Tokenizer, launches.vocabularies(logdir))),
    )
    text = (folder / "params.txt").read_text(encoding="utf-8")
    prefixes = ("task", "optimizer.cls")
    check = lambda: config.check_folder(folder, text, prefixes)  # noqa: E731
    yield Kind("params.txt", [folder / "params.txt"], check)
    if (within / "best.json").exists():
        yield Kind("best.json", [within / "best.json"], lambda: _best(folder))
    path = within / str(checkpoints.whole_steps(folder)[-1])
    described = [path / "about/metadata", path / "input_state/metadata"]
    yield Kind("checkpoint, described", described, lambda: _described(path))
    arrays = [each for each in (path / "state").rglob("*") if each.is_file()]
    yield Kind("checkpoint, arrays", arrays, lambda: _arrays(Stored.open(path).arrays()), str(path))
    weights = sorted(folder.glob("weights*.safetensors*"))
    if weights:
        whole = min(weights, key=lambda each: not each.name.endswith(exported.INDEX_SUFFIX))
        yield Kind("exported weights", weights, lambda: _arrays(exported.read(whole)))


def _of_bundle(folder: pathlib.Path) -> Iterator[Kind]:
    def read() -> Any:
        decoder, *tokenizers = bundle.load(folder)
        programs = [decoder.program_for(length) for length in decoder.spec.input_lengths]
        return decoder.spec, _bytes(decoder.theta.FlattenItems()), programs, _pieces(*tokenizers)

    yield Kind("bundle.json", [folder / "bundle.json"], read)
    yield Kind("programs", sorted(folder.glob("programs/*")), read)
    yield Kind("weights", [folder / "weights.safetensors"], read)
    yield Kind("vocabularies of a bundle", vocabulary_files(folder, "parallel"), read)


def _pieces(*tokenizers: Tokenizer) -> list[Any]:
    """Returns the vocabularies, and how a line is encoded."""
    line = "ba ke, li mo: a line of words."
    return [(one.pieces(range(one.vocab_size)), one.encode(line)) for one in tokenizers]


def _best(folder: pathlib.Path) -> checkpoints.Best:
    found = checkpoints.read_best(folder)
    if found is None:
        raise ValueError("best.json counts as absent.")
    return found


def _described(path: pathlib.Path) -> Any:
    found = Stored.open(path)
    return found.specs, found.fingerprints, found.input_state


def _arrays(arrays: dict[str, Any]) -> Any:
    return _bytes((name, array[()]) for name, array in sorted(arrays.items()))


def _bytes(arrays: Iterable[tuple[str, Any]]) -> list[tuple[str, str, bytes]]:
    return [(name, str(x.dtype), np.asarray(x).tobytes()) for name, x in arrays]


if __name__ == "__main__":
    app.run(main)
