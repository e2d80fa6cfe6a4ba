"""The memory that data_prep takes for a corpus, and for one so many times its size.

    python -m bench.data_prep_memory [--input=TEXT_DIR] [--times=10]

The larger corpus is the smaller one, repeated with edits: in each copy a word of every side stands
in another place, so that no pair is dropped as a duplicate. Both are prepared a step at a time,
and of each step the most that its processes took together is told. Shared pages count once, those
of files not at all: libraries are the same for any corpus, and whoever else has loaded them counts.

The vocabularies learn from as many sentences as there are, up to max_vocab_sentences: that step
takes more for the larger corpus where the smaller one has fewer, as the one made up has, but with

    --set=max_vocab_sentences=30000
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import numpy as np
from absl import app, flags

from bench import corpus as made_up
from data_prep import sources, tsv
from data_prep.pipeline import Step

_INPUT = flags.DEFINE_string("input", None, "A folder of split text; by default it is made up.")
_TIMES = flags.DEFINE_integer("times", 10, "As many times the larger corpus' training text.")
_WORKERS = flags.DEFINE_integer("workers", 2, "Processes.")
_SETTINGS = flags.DEFINE_multi_string("set", [], "Other flags of data_prep.build, NAME=VALUE.")
_SAMPLE_SECS = 0.05


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of a step: the most memory that its processes took together, and its time."""

    peak_mib: float
    secs: float


def main(argv: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        texts = _texts(pathlib.Path(folder))
        costs = {name: _costs(text, pathlib.Path(folder, name)) for name, text in texts.items()}
    print(f"{'MiB':<8}" + "".join(f"{name:>10}" for name in costs))
    for step in Step:
        print(f"{step:<8}" + "".join(f"{of[step].peak_mib:>10.0f}" for of in costs.values()))
    peaks = [max(cost.peak_mib for cost in of.values()) for of in costs.values()]
    print(f"{'highest':<8}" + "".join(f"{peak:>10.0f}" for peak in peaks))
    times = [sum(cost.secs for cost in of.values()) for of in costs.values()]
    print(f"{'seconds':<8}" + "".join(f"{secs:>10.0f}" for secs in times))


def _texts(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """The folder of each corpus, by its name."""
    once, many = folder / "text", folder / "repeated"
    if _INPUT.value is None:
        made_up.write(once)
    else:
        once = pathlib.Path(_INPUT.value)
    for file in sources.in_folder(once):
        copies = _TIMES.value if file.split == "train" else 1
        path = many / str(file.split) / f"{file.language}-en.tsv.gz"
        tsv.write(path, _repeated(file.path, copies))
    return {"x1": once, f"x{_TIMES.value}": many}


def _repeated(path: pathlib.Path, copies: int) -> Iterator[tsv.Pair]:
    """The pairs of a file, then their edited copies."""
    for number in range(copies):
        rng = np.random.default_rng(number)
        for pair in tsv.read(path):
            if isinstance(pair, tsv.Pair):
                yield pair if number == 0 else _edited(pair, rng)


def _edited(pair: tsv.Pair, rng: np.random.Generator) -> tsv.Pair:
    return tsv.Pair(_with_a_word_moved(pair.source, rng), _with_a_word_moved(pair.english, rng))


def _with_a_word_moved(text: str, rng: np.random.Generator) -> str:
    # Chinese and Japanese have no spaces: a character, then.
    separator = " " if " " in text or text.isascii() else ""
    words = text.split(" ") if separator else list(text)
    start, end = rng.integers(0, len(words), 2)
    words.insert(end, words.pop(start))
    return separator.join(words)


def _costs(text: pathlib.Path, data: pathlib.Path) -> dict[Step, Cost]:
    settings = [f"--{setting}" for setting in _SETTINGS.value]
    command = [sys.executable, "-m", "data_prep.build", f"--input={text}", f"--out={data}"]
    command += [f"--workers={_WORKERS.value}", *settings]
    return {step: _cost([*command, f"--through={step}"]) for step in Step}


def _cost(command: list[str]) -> Cost:
    began, peak_kib = time.monotonic(), 0
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            peak_kib = max(peak_kib, sum(map(_taken_kib, _tree(process.pid))))
            time.sleep(_SAMPLE_SECS)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Cost(peak_kib / 1024, time.monotonic() - began)


def _tree(pid: int) -> list[int]:
    """A process and all that descend from it."""
    try:
        tasks = list(pathlib.Path(f"/proc/{pid}/task").iterdir())
        children = [int(c) for task in tasks for c in (task / "children").read_text().split()]
    except OSError:  # It has ended.
        return []
    return [pid, *(one for child in children for one in _tree(child))]


def _taken_kib(pid: int) -> int:
    """A process's share of memory (PSS) but for the pages of files."""
    try:
        rollup = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    kib = dict(re.findall(r"^(\w+): +(\d+) kB$", rollup, re.MULTILINE))
    return sum(int(kib.get(name, 0)) for name in ("Pss_Anon", "Pss_Shmem"))


if __name__ == "__main__":
    app.run(main)
