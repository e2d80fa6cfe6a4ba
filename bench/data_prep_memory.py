"""The memory that data_prep needs for a corpus, and for a corpus that is several times as large.

    python -m bench.data_prep_memory [--text=TEXT_DIR] [--times=10]

The larger corpus repeats the smaller one with edits: in each copy of a pair, one word moves on
either side, so that the pair is not dropped as a duplicate. Both corpora are prepared step by step,
and the peak memory of all processes together is printed for each step. Shared pages count once.
Pages of files do not count, because libraries are the same for any corpus and may be shared with
unrelated processes.

The vocabularies are trained on at most max_vocab_sentences sentences. If the smaller corpus has
fewer, like the synthetic one, this step needs more memory for the larger corpus. To avoid this:

    --set=max_vocab_sentences=30000
"""

import dataclasses
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import numpy as np
from absl import flags

from bench import corpus
from data_prep import tsv, tsv_folder
from data_prep.pipeline import Step
from lingvo_gshard import cli
from xla_spmd.files import table

_TEXT = flags.DEFINE_string("text", None, "A folder of split text; by default, synthetic text.")
_TIMES = flags.DEFINE_integer("times", 10, "The larger corpus' size relative to the smaller one's.")
_WORKERS = flags.DEFINE_integer("workers", 2, "The number of worker processes.")
_SETTINGS = flags.DEFINE_multi_string(
    "build_flag", [], "A flag of data_prep.build, NAME=VALUE; repeatable."
)
_SAMPLE_SECS = 0.05


@dataclasses.dataclass(frozen=True)
class Cost:
    """The peak memory of all processes of a step together, and the step's time."""

    peak_mib: float
    secs: float


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        corpora = texts(pathlib.Path(folder))
        costs = [_costs(text, pathlib.Path(folder, name)) for name, text in corpora.items()]
    columns = [_column(of_corpus) for of_corpus in costs]
    rows = zip((*Step, "highest", "seconds"), *columns, strict=True)
    print(table.text([("MiB", *corpora), *rows]))


def _column(costs: dict[Step, Cost]) -> list[str]:
    """Returns the peaks of a corpus's steps, the highest of them, and the seconds of all steps."""
    peaks = [costs[step].peak_mib for step in Step]
    secs = sum(cost.secs for cost in costs.values())
    return [f"{number:.0f}" for number in (*peaks, max(peaks), secs)]


def texts(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Writes the corpora; returns the folder of each by its name."""
    once = folder / "text"
    repeated = folder / "repeated"
    if _TEXT.value is None:
        corpus.write(once)
    else:
        once = pathlib.Path(_TEXT.value)
    for file in tsv_folder.sources_in(once):
        copies = _TIMES.value if file.split == "train" else 1
        path = repeated / str(file.split) / f"{file.language}-en.tsv.gz"
        tsv.write(path, _repeated(file.path, copies))
    return {"x1": once, f"x{_TIMES.value}": repeated}


def _repeated(path: pathlib.Path, copies: int) -> Iterator[tsv.Pair]:
    """Yields the pairs of a file, then their edited copies."""
    for number in range(copies):
        rng = np.random.default_rng(number)
        for pair in tsv.read(path):
            if isinstance(pair, tsv.Pair):
                yield pair if number == 0 else _edited(pair, rng)


def _edited(pair: tsv.Pair, rng: np.random.Generator) -> tsv.Pair:
    return tsv.Pair(_with_a_word_moved(pair.source, rng), _with_a_word_moved(pair.english, rng))


def _with_a_word_moved(text: str, rng: np.random.Generator) -> str:
    # In text without spaces, such as Chinese or Japanese, a character moves instead.
    separator = " " if " " in text or text.isascii() else ""
    words = text.split(" ") if separator else list(text)
    start, end = rng.integers(0, len(words), 2)
    words.insert(end, words.pop(start))
    return separator.join(words)


def _costs(text: pathlib.Path, data: pathlib.Path) -> dict[Step, Cost]:
    command = [sys.executable, "-m", "data_prep.build", f"--input={text}", f"--out={data}"]
    command += [f"--workers={_WORKERS.value}", *(f"--{setting}" for setting in _SETTINGS.value)]
    return {step: _cost([*command, f"--through={step}"]) for step in Step}


def _cost(command: list[str]) -> Cost:
    began = time.monotonic()
    peak_kib = 0
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            peak_kib = max(peak_kib, sum(map(_memory_kib, _process_tree(process.pid))))
            time.sleep(_SAMPLE_SECS)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Cost(peak_kib / 1024, time.monotonic() - began)


def _process_tree(pid: int) -> list[int]:
    """Returns the ids of a process and all its descendants; empty if the process has ended."""
    children: list[str] = []
    try:
        for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
            children += (task / "children").read_text(encoding="utf-8").split()
    except OSError:
        return []

    tree = [pid]
    for child in children:
        tree += _process_tree(int(child))
    return tree


def _memory_kib(pid: int) -> int:
    """Returns a process's proportional share of memory (PSS), without the pages of files."""
    try:
        rollup = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8")
    except OSError:
        return 0
    kib = dict(re.findall(r"^(\w+): +(\d+) kB$", rollup, re.MULTILINE))
    return sum(int(kib.get(name, 0)) for name in ("Pss_Anon", "Pss_Shmem"))


if __name__ == "__main__":
    cli.run("data_prep_memory", main)
