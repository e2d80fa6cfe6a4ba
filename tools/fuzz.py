"""Damages the files of finished runs and of others' models and programs, one at a time.

    python -m tools.fuzz --data=DATA --run_dir=RUN --bundle_dir=BUNDLE --mutations=1000
    python -m tools.fuzz --model_dir=FOLDER --programs=FOLDER --plan_dir=PLAN --mutations=1000
    python -m tools.fuzz --programs=FOLDER --topology=v3:2x2 --mutations=100
    python -m tools.fuzz --traced=FOLDER --saved_model=FOLDER --mutations=1000

A separate process reads each file with the library's own functions. A mutation flips a bit, zeroes
a block, cuts or extends the file, replaces it by another file or an older version, or replaces one
of its numbers, names or lists. The reader must return an error of one line that names the file, or
the same answer as before. A different answer (`other`) is allowed only for a file without a digest,
and the reader's process may end (`died`) only where the library itself reads such files in a
separate process. In a folder of --model_dir, folder_changes.py also changes one thing at a time so
that the file keeps its format: the reader must refuse it, return another answer, or name it in the
line `not used` (`named`); otherwise the outcome is `silent`, a failure. --programs are read for the
CPU, or planned for --topology.

The exit status is 1 if there is any failure: a wrong answer, an error without the file's name, a
traceback, a process that dies (`crash`), takes longer than a minute (`hang`) or needs too much
memory. Only copies of the folders are damaged.
"""

import collections
import dataclasses
import functools
import hashlib
import io
import json
import multiprocessing
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing import connection
from typing import Any

import numpy as np
from absl import app, flags, logging

from lingvo_gshard.checkpoints import checkpoints, exported, saved_steps
from lingvo_gshard.checkpoints.stored import Stored
from lingvo_gshard.decoding import bundle
from lingvo_gshard.hugging_face import importing
from lingvo_gshard.hugging_face.folder import Folder
from lingvo_gshard.input import fairseq_vocabulary, manifest, sentences
from lingvo_gshard.input.records import RecordSource
from lingvo_gshard.input.tokenizer import Tokenizer
from lingvo_gshard.model import placement
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.runs import expert_load, saved_model
from lingvo_gshard.runs import launch as launches
from lingvo_gshard.runs.launch import Launch
from lingvo_gshard.spmd import program
from lingvo_gshard.train import config, metrics_files
from tools import folder_changes
from tools.folder_changes import Change
from xla_plan.plans import plan_folder, programs
from xla_plan.plans.program_plan import ProgramPlan
from xla_plan.plans.programs import FileRequest
from xla_plan.program import program_file
from xla_spmd.files import child_process, digests, table
from xla_spmd.runtime import environment

_DATA_DIR = flags.DEFINE_string("data", None, "A prepared data folder.")
_LOGDIR = flags.DEFINE_string("run_dir", None, "A finished run.")
_BUNDLE = flags.DEFINE_string("bundle_dir", None, "An exported bundle.")
_MODEL_DIR = flags.DEFINE_string("model_dir", None, "A folder of a model of transformers.")
_PROGRAMS = flags.DEFINE_string("programs", None, "A folder of programs for `plan program`.")
_TOPOLOGY = flags.DEFINE_string(
    "topology", None, "The topology for which the programs are planned, such as v3:2x2."
)
_PLAN_DIR = flags.DEFINE_string("plan_dir", None, "A folder with the plan of such a program.")
_TRACED = flags.DEFINE_string("traced", None, "A folder of stored traced programs.")
_SAVED_MODEL = flags.DEFINE_string("saved_model", None, "A SavedModel with its checksums.")
_KINDS = flags.DEFINE_list("kinds", [], "The kinds of files, by name; by default, all kinds.")
_MUTATIONS = flags.DEFINE_integer("mutations", 1000, "The mutations of each kind of file.", 1)
_SEED = flags.DEFINE_integer("seed", 1, "The seed of the mutations.")

FINE = ("same", "refused", "other", "named", "died")
FAILURES = ("wrong", "silent", "unnamed", "traceback", "crash", "hang", "memory")
_BLOCK_BYTES = 4096
_PRINTED = 3  # The most failures that are printed for each kind of file and outcome.
_HANG_SECS = 60.0
_MAX_MORE_MIB = 512.0  # The most memory that reading a file may add.
_WITH_VALUES = (".json", ".jsonl")
# The values that replace others.
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 2**31, 10**30, float("inf"), float("nan")),
    *("", "x", "../x", "\x00", "9" * 5000, [], [[]], {}, {"x": 1}),
)
_NUMBERS = (b"0", b"-1", b"7", b"65536", b"4294967296", b"99999999999999999999", b"1e999", b"x")


@dataclasses.dataclass(frozen=True)
class Kind:
    """Files of one kind, and `read`, which reads them and returns an answer to compare.

    An error must name the file or `also`. With `is_checked`, a digest protects the files, so that
    the answer must stay the same.
    """

    name: str
    files: Sequence[pathlib.Path]
    read: Callable[[], Any]
    also: str | None = None
    is_checked: bool = True
    is_apart: bool = False  # The library reads it in a separate process and reports its death.
    # Changes one thing, which `read` must account for in the Accounted that it returns.
    change: Callable[[random.Random], Change] | None = None


@dataclasses.dataclass(frozen=True)
class Accounted:
    """The answer of a reader, and the lines that name the parts that it does not use."""

    answer: Any
    not_used: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Answer:
    """The result of a reading: the digest of its answer, or its error."""

    digest: str | None = None
    not_used: tuple[str, ...] = ()
    error: str | None = None
    is_mistake: bool = True  # Whether a user gets the error as one line, without a traceback.
    more_mib: float = 0.0


def main(argv: Sequence[str]) -> None:
    del argv
    logging.set_verbosity(logging.ERROR)
    environment.prepare(8, "cpu")
    given = {
        "data_dir": _DATA_DIR,
        "logdir": _LOGDIR,
        "bundle_dir": _BUNDLE,
        "model_dir": _MODEL_DIR,
        "programs": _PROGRAMS,
        "plan_dir": _PLAN_DIR,
        "traced": _TRACED,
        "saved": _SAVED_MODEL,
    }
    with tempfile.TemporaryDirectory() as folder:
        copies = {}
        for name, flag in given.items():
            if flag.value:
                copies[name] = pathlib.Path(shutil.copytree(flag.value, f"{folder}/{name}"))
        if not copies:
            raise app.UsageError(
                f"give one of --{', --'.join(flag.name for flag in given.values())}."
            )

        options: dict[str, Any] = copies | {"topology_name": _TOPOLOGY.value}
        child = Child(kinds, options)
        rows = [("kind", *FINE, *FAILURES, "ms")]
        num_failures = 0
        for kind in kinds(**options):
            if _KINDS.value and kind.name not in _KINDS.value:
                continue
            began = time.monotonic()
            counts = outcomes(kind, _MUTATIONS.value, _SEED.value, child.read)
            ms = (time.monotonic() - began) / _MUTATIONS.value * 1e3
            cells = (str(counts[outcome]) for outcome in (*FINE, *FAILURES))
            rows.append((kind.name, *cells, f"{ms:.1f}"))
            num_failures += sum(counts[outcome] for outcome in FAILURES)
            print(f"{kind.name}: {dict(counts)}", flush=True)
        child.stop()
        print(table.text(rows))
    sys.exit(1 if num_failures else 0)


def kinds(
    data_dir: pathlib.Path | None = None,
    logdir: pathlib.Path | None = None,
    bundle_dir: pathlib.Path | None = None,
    model_dir: pathlib.Path | None = None,
    programs: pathlib.Path | None = None,
    plan_dir: pathlib.Path | None = None,
    traced: pathlib.Path | None = None,
    saved: pathlib.Path | None = None,
    topology_name: str | None = None,
) -> list[Kind]:
    """Returns every kind of file in the given folders."""
    return [
        *(_of_data(data_dir) if data_dir else ()),
        *(_of_run(logdir) if logdir else ()),
        *(_of_bundle(bundle_dir) if bundle_dir else ()),
        *(_of_model(model_dir) if model_dir else ()),
        *(_of_programs(programs, topology_name) if programs else ()),
        *(_of_plan(plan_dir) if plan_dir else ()),
        *(_of_traced(traced) if traced else ()),
        *(_of_saved_model(saved) if saved else ()),
    ]


def read_here(kind: Kind) -> Answer:
    """Reads a kind's files in this process."""
    try:
        answer = kind.read()
        not_used: Sequence[str] = ()
        if isinstance(answer, Accounted):
            not_used = answer.not_used
            answer = answer.answer
        digest = hashlib.sha256(repr(answer).encode()).hexdigest()
        return Answer(digest=digest, not_used=tuple(not_used))
    except (ValueError, OSError) as error:
        return Answer(error=str(error))
    except Exception as error:
        return Answer(error=repr(error), is_mistake=False)


class Child:
    """Reads files in a separate process, and starts a new process when it dies."""

    def __init__(
        self, make_kinds: Callable[..., Sequence[Kind]], options: Mapping[str, Any]
    ) -> None:
        self._make_kinds = make_kinds
        self._options = dict(options)
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: connection.Connection | None = None

    def read(self, kind: Kind) -> Answer:
        """Returns the answer. Raises EOFError if the process died, TimeoutError if it hangs."""
        if self._connection is None:
            self._start()
        assert self._connection is not None
        try:
            self._connection.send(kind.name)
            if not self._connection.poll(_HANG_SECS):
                raise TimeoutError(f"no answer for {_HANG_SECS:.0f} s")
            answer: Answer = self._connection.recv()
            return answer
        except (EOFError, ConnectionError) as error:
            assert self._process is not None
            self._process.join()
            raise EOFError(f"status {self._process.exitcode}") from error
        finally:
            if sys.exc_info()[0] is not None:
                self.stop()

    def stop(self) -> None:
        """Ends the process."""
        if self._process is not None and self._connection is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
        self._process = None
        self._connection = None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, self._make_kinds, self._options), daemon=True
        )
        # As it starts, the process reads the folders, which are undamaged at this time.
        self._process.start()
        theirs.close()
        self._connection.recv()


def _serve(
    requests: connection.Connection,
    make_kinds: Callable[..., Sequence[Kind]],
    options: Mapping[str, Any],
) -> None:
    """Answers requests for kinds by name until the parent ends."""
    child_process.end_with_parent()
    logging.set_verbosity(logging.ERROR)
    by_name = {kind.name: kind for kind in make_kinds(**options)}
    requests.send("ready")
    while True:
        kind = by_name[requests.recv()]
        # This resets the peak of the memory to the memory that is used now.
        pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        before_mib = _status_mib("VmRSS")
        answer = read_here(kind)
        requests.send(dataclasses.replace(answer, more_mib=_status_mib("VmHWM") - before_mib))


def _status_mib(field: str) -> float:
    """Returns a field of /proc/self/status, such as VmHWM, the peak of the memory."""
    status = pathlib.Path("/proc/self/status").read_text(encoding="utf-8")
    found = re.search(rf"{field}:\s+(\d+) kB", status)
    assert found is not None, field
    return int(found[1]) / 1024


def outcomes(
    kind: Kind, num_mutations: int, seed: int, read: Callable[[Kind], Answer] = read_here
) -> collections.Counter[str]:
    """Counts the outcomes of mutations, each of one file, and prints the first failures."""
    expected = read(kind)
    if expected.digest is None:
        raise ValueError(f"{kind.name} cannot be read even without a mutation: {expected.error}")
    counts = collections.Counter[str]()
    for number in range(num_mutations):
        rng = random.Random(f"{seed} {kind.name} {number}")
        if kind.change is None:
            path = rng.choice(kind.files)
            how, content = _mutated(path, kind.files, rng)
            changed = Change(path, how, content)
        else:
            changed = kind.change(rng)
        found, message = _outcome(kind, changed, number, expected, read)
        if found == "crash" and kind.is_apart:
            found = "died"
        if found in ("crash", "died", "hang"):
            read(kind)  # The next process starts while all files are undamaged.
        counts[found] += 1
        if found in FAILURES and counts[found] <= _PRINTED:
            what = f"{changed.path} {changed.name}"
            print(f"{kind.name}, mutation {number}, {what}: {found}: {message[:300]}")
    return counts


def _outcome(
    kind: Kind,
    changed: Change,
    number: int,
    expected: Answer,
    read: Callable[[Kind], Answer],
) -> tuple[str, str]:
    """Returns the outcome of a change, and a message; `number` becomes the file's mtime."""
    path = changed.path
    content = path.read_bytes() if path.exists() else None
    try:
        path.write_bytes(changed.content)
        os.utime(path, ns=(number, number))  # The cache of hashes looks files up by their mtime.
        answer = read(kind)
    except EOFError as error:
        return "crash", str(error)
    except TimeoutError as error:
        return "hang", str(error)
    finally:
        path.unlink()
        if content is not None:
            path.write_bytes(content)

    if answer.more_mib > _MAX_MORE_MIB + expected.more_mib:
        return "memory", f"{answer.more_mib:.0f} MiB"
    if answer.error is not None:
        text = answer.error
        if not answer.is_mistake:
            return "traceback", text
        is_named = path.name in text or (kind.also is not None and kind.also in text)
        return ("refused" if is_named and "\n" not in text else "unnamed"), text
    if answer.digest == expected.digest:
        if kind.change is None:
            return "same", ""
        return ("named" if _is_named(changed, answer, expected) else "silent"), "the same answer"
    return ("wrong" if kind.is_checked else "other"), "the answer differs"


def _is_named(changed: Change, answer: Answer, expected: Answer) -> bool:
    """Returns whether the line `not used` of the file, or another new line, names the change."""
    lines = [line for line in answer.not_used if changed.name in line]
    of_file = [line for line in lines if line.startswith((changed.path.name, "tensors", "files"))]
    return bool(of_file) or answer.not_used != expected.not_used


def _mutated(
    path: pathlib.Path, others: Sequence[pathlib.Path], rng: random.Random
) -> tuple[str, bytes]:
    """Returns a mutation's name and the mutated bytes."""
    content = bytearray(path.read_bytes())
    how = rng.choice(["flipped", "zeroed", "cut", "extended", "exchanged", "older", "valued"])
    place = rng.randrange(max(len(content), 1))
    if how == "flipped" and content:
        content[place] ^= 1 << rng.randrange(8)
    elif how == "zeroed":
        end = min(len(content), place + rng.randint(1, _BLOCK_BYTES))
        content[place:end] = bytes(end - place)
    elif how == "extended":
        content += rng.randbytes(rng.randint(1, 99))
    elif how == "exchanged" and set(others) != {path}:
        # The two vocabularies of documents are the same file.
        content = bytearray(rng.choice([one for one in others if one != path]).read_bytes())
    elif how == "older" and path.name.endswith("json"):
        content = bytearray(_older(content, rng))
    elif how == "valued":
        content = bytearray(_with_another_value(path, bytes(content), rng))
    else:
        how = "cut"
        content = content[:place]
    return how, bytes(content)


def _with_another_value(path: pathlib.Path, content: bytes, rng: random.Random) -> bytes:
    """Returns a file of the same format in which one value is replaced."""
    if path.suffix in _WITH_VALUES:
        if rng.random() < 0.1:
            return b"[" * 100_000
        lines = content.splitlines() if path.suffix == ".jsonl" else [content]
        index = rng.randrange(len(lines))
        lines[index] = _other_json(lines[index], rng)
        return b"\n".join(lines)
    if path.suffix == ".safetensors":
        end = 8 + int.from_bytes(content[:8], "little")
        header = _other_json(content[8:end], rng)
        return len(header).to_bytes(8, "little") + header + content[end:]
    if path.suffix == ".bin":
        return _other_pickle(content, rng)

    # A number is text, or bytes that may encode one.
    numbers = list(re.finditer(rb"\d+", content))
    if not numbers:
        return content
    number = rng.choice(numbers)
    return content[: number.start()] + rng.choice(_NUMBERS) + content[number.end() :]


def _other_json(text: bytes, rng: random.Random) -> bytes:
    """Returns JSON in which one value is replaced."""
    value = json.loads(text)
    places = list(_places(value))
    if not places:
        return json.dumps(rng.choice(_VALUES)).encode()
    container, key = rng.choice(places)
    container[key] = rng.choice(_VALUES)
    return json.dumps(value).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields each list or object within a value, with the index or key of each of its values."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def _other_pickle(content: bytes, rng: random.Random) -> bytes:
    """Returns an archive of torch.save in which one byte of the pickle is replaced.

    The archive's checksum is correct.
    """
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as theirs, zipfile.ZipFile(written, "w") as ours:
        for info in theirs.infolist():
            entry = bytearray(theirs.read(info))
            if info.filename.endswith("/data.pkl"):
                entry[rng.randrange(len(entry))] = rng.randrange(256)
            ours.writestr(info.filename, bytes(entry))
    return written.getvalue()


def _older(content: bytes, rng: random.Random) -> bytes:
    """Returns a JSON object without its digest, and with the previous version number or none."""
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

    def read_texts() -> list[Any]:
        digests.verify(folder, texts)  # decode_split does the same.
        reader: Callable[[Any], Iterator[Any]] = sentences.eval_text
        if made.kind == manifest.Kind.TEXT:
            reader = sentences.eval_documents
        found: list[Any] = []
        for text in texts:
            found += reader(folder / text.path)
        return found

    def read_vocabularies() -> list[Any]:
        digests.verify(folder, made.vocabulary_files)  # A run's input does the same.
        return _pieces(*(Tokenizer(path) for path in vocabularies))

    def read_manifest() -> str:
        return repr(dataclasses.replace(manifest.load(folder), version=0))

    yield Kind("manifest", [folder / manifest.FILE_NAME], read_manifest)
    vocabularies = [folder / file.path for file in made.vocabulary_files]
    yield Kind("vocabularies of data", vocabularies, read_vocabularies)
    yield Kind("records", [folder / shard.file.path for shard in shards], read_records)
    lengths = [folder / shard.lengths.path for shard in shards]
    yield Kind("lengths", lengths, lambda: RecordSource(folder, *records).lengths.tolist())
    yield Kind("text", [folder / text.path for text in texts], read_texts)


def _of_run(folder: pathlib.Path) -> Iterator[Kind]:
    logdir = str(folder)
    within = saved_steps.folder(folder)
    yield Kind("experiment.json", [folder / "experiment.json"], lambda: launches.recorded(logdir))
    vocabularies = sorted(folder.glob("vocab/*.model"))
    if vocabularies:
        yield Kind(
            "vocabularies of a run",
            vocabularies,
            lambda: _pieces(*map(Tokenizer, launches.vocabularies(logdir))),
        )
    params_path = folder / "params.txt"
    text = params_path.read_text(encoding="utf-8")
    prefixes = ("task", "optimizer.cls")
    check = lambda: config.check_folder(folder, text, prefixes)  # noqa: E731
    yield Kind("params.txt", [folder / "params.txt"], check)
    if (within / "best.json").exists():
        yield Kind("best.json", [within / "best.json"], lambda: _best(folder))
    path = within / str(saved_steps.whole_steps(folder)[-1])
    described = [path / "about/metadata", path / "input_state/metadata"]
    yield Kind("checkpoint, described", described, lambda: _described(path))
    arrays = [each for each in (path / "state").rglob("*") if each.is_file()]
    yield Kind("checkpoint, arrays", arrays, lambda: _arrays(Stored.open(path).arrays()), str(path))
    evaluations = folder / metrics_files.EVAL_METRICS
    if evaluations.exists():

        def read_loads() -> Any:
            lines = metrics_files.read_lines(evaluations)
            return expert_load.by_language(lines, expert_load.evaluated_languages(lines))

        yield Kind("loads of experts", [evaluations], read_loads, is_checked=False)
    weights = sorted(folder.glob("weights*.safetensors*"))
    if weights:
        whole = min(weights, key=lambda each: not each.name.endswith(exported.INDEX_SUFFIX))
        yield Kind("exported weights", weights, lambda: _arrays(exported.read(whole)))


def _of_model(folder: pathlib.Path) -> Iterator[Kind]:
    """Yields the kinds of a folder of transformers."""
    built: dict[str, Any] = {}

    def read_all() -> Accounted:
        source = importing.read(folder)
        launches.experiment_params(source.launch())  # Raises if the model lacks a setting.
        key = repr((source.model, source.settings))
        if key not in built:
            facts = source.launch().facts
            launch = Launch(source.model, source.settings, None, facts)
            params = launches.experiment_params(launch)
            model_of = TaskModel(params, placement.partitioning(params, 1))
            built[key] = model_of.state_spec.theta
        files = Folder(folder, source.config, built[key])
        answer = (source.model, source.settings, source.decode_settings, _arrays(files.arrays))
        model = b"" if source.vocabulary is None else source.vocabulary.model
        return Accounted((*answer, model), importing.not_used(source, files))

    def read() -> Any:
        return read_all().answer

    change = functools.partial(folder_changes.change, folder)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    yield Kind("one thing", files, read_all, str(folder), is_checked=False, change=change)
    yield Kind("config.json", [folder / "config.json"], read, str(folder), is_checked=False)
    indices = sorted(folder.glob("*.index.json"))
    if indices:
        yield Kind("index of parts", indices, read, str(folder), is_checked=False)
    safetensors = sorted(folder.glob("*.safetensors"))
    if safetensors:
        yield Kind("safetensors", safetensors, read, str(folder), is_checked=False)
    archives = sorted(folder.glob("*.bin"))
    if archives:
        yield Kind(".bin", archives, read, str(folder), is_checked=False)
    if (folder / fairseq_vocabulary.MODEL).is_file():
        names = (fairseq_vocabulary.MODEL, "*vocab.json", "*token*.json")
        files = sorted(path for name in names for path in folder.glob(name))
        read_vocabulary = lambda: hashlib.sha256(fairseq_vocabulary.read(folder)).hexdigest()  # noqa: E731
        yield Kind("tokenizer", files, read_vocabulary, str(folder), is_checked=False)


def _of_programs(folder: pathlib.Path, topology_name: str | None) -> Iterator[Kind]:
    """Yields a kind for each program."""
    for path in sorted(folder.iterdir()):
        if topology_name is None:
            read = functools.partial(_program, path)
        else:
            read = functools.partial(_planned, path, topology_name)
        yield Kind(f"program {path.name}", [path], read, is_checked=False, is_apart=True)


def _program(path: pathlib.Path) -> Any:
    found = program_file.read(path, "cpu")
    return found.arguments, found.axes, found.num_partitions, str(found.module)


def _planned(path: pathlib.Path, topology_name: str) -> Any:
    plan = programs.of_file(FileRequest(path, topology_name))
    return dataclasses.replace(plan, lower_secs=0.0, compile_secs=0.0, compile_cpu_secs=0.0)


def _of_plan(folder: pathlib.Path) -> Iterator[Kind]:
    yield Kind(
        "kept plan",
        [folder / plan_folder.PLAN_JSON],
        functools.partial(plan_folder.load, ProgramPlan, folder),
    )


def _of_traced(folder: pathlib.Path) -> Iterator[Kind]:
    paths = sorted(folder.glob("*.program"))[:4]

    def read() -> list[str]:
        programs = [program.load(path, path.stem) for path in paths]
        return [hashlib.sha256(repr(one).encode()).hexdigest() for one in programs]

    yield Kind("traced programs", paths, read)


def _of_saved_model(folder: pathlib.Path) -> Iterator[Kind]:
    names = [line.split("  ", 1)[1] for line in (folder / saved_model.SUMS).open(encoding="utf-8")]
    paths = [folder / name.rstrip("\n") for name in names]

    def read() -> str:
        # The command is from docs/serving.md.
        command = ["sha256sum", "--check", "--strict", "--quiet", saved_model.SUMS]
        checked = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if checked.returncode:
            raise ValueError(checked.stdout.strip())
        return "checked"

    yield Kind("SavedModel", paths, read)


def _of_bundle(folder: pathlib.Path) -> Iterator[Kind]:
    def read() -> Any:
        decoder, *tokenizers = bundle.load(folder)
        programs = [decoder.program_for(length) for length in decoder.spec.input_lengths]
        return decoder.spec, _bytes(decoder.theta.FlattenItems()), programs, _pieces(*tokenizers)

    yield Kind("bundle.json", [folder / "bundle.json"], read)
    yield Kind("programs", sorted(folder.glob("programs/*")), read)
    yield Kind("weights", [folder / "weights.safetensors"], read)
    yield Kind("vocabularies of a bundle", sorted(folder.rglob("*.model")), read)


def _pieces(*tokenizers: Tokenizer) -> list[Any]:
    """Returns the pieces of the vocabularies, and the ids of a line."""
    line = "ba ke, li mo: a line of words."
    return [(one.pieces(range(one.vocab_size)), one.encode(line)) for one in tokenizers]


def _best(folder: pathlib.Path) -> checkpoints.Best:
    found = checkpoints.read_best(folder)
    if found is None:
        raise ValueError("best.json is missing or damaged.")
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
