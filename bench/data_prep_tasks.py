"""How data_prep's tasks grow with a corpus, and the gain from a second worker.

    python -m bench.data_prep_tasks [--text=TEXT_DIR] [--times=10] [--notimed]

The corpora are made by bench/data_prep_memory.py. For each, an engine that runs one task after the
other counts the files that Python opens in the folders of text and data, and the bytes that the
process reads and writes. Then the larger corpus is built with one worker and with two. Finally, the
benchmark counts the files that the deduplication of one language would open, without running it.
"""

import dataclasses
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

from absl import flags, logging

from bench import data_prep_memory
from data_prep import config, deduplication, pipeline, tsv_folder
from data_prep.engines import Call
from data_prep.text_chunks import Chunk
from lingvo_gshard import cli
from xla_spmd.files import table

_TIMED = flags.DEFINE_bool("timed", True, "Also build the larger corpus with 1 and 2 workers.")
_CONFIG = config.BuildConfig(max_vocab_sentences=30_000)


@dataclasses.dataclass(frozen=True)
class Usage:
    """The resources that a process has used, since its start or between two moments."""

    opens: int
    read_bytes: int
    written_bytes: int
    secs: float

    def __sub__(self, other: "Usage") -> "Usage":
        both = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Usage(*(mine - theirs for mine, theirs in both))


class Meter:
    """An engine that measures its tasks, and counts the files that they open in `folders`."""

    def __init__(self, *folders: pathlib.Path) -> None:
        self.tasks: list[Usage] = []
        self._folders = tuple(map(str, folders))
        self._opens = 0
        sys.addaudithook(self._count)

    def __call__(self, calls: Sequence[Call]) -> Iterator[None]:
        for call in calls:
            before = self.usage()
            yield call()
            self.tasks.append(self.usage() - before)

    def usage(self) -> Usage:
        """Returns the resources that this process has used so far."""
        lines = pathlib.Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
        done = dict(line.split(": ") for line in lines)
        return Usage(self._opens, int(done["rchar"]), int(done["wchar"]), time.process_time())

    def _count(self, event: str, args: tuple) -> None:
        if event == "open" and str(args[0]).startswith(self._folders):
            self._opens += 1


def main() -> None:
    logging.set_verbosity(logging.WARNING)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        corpora = data_prep_memory.texts(folder)
        meter = Meter(folder, *corpora.values())
        rows = [_row(meter, name, text, folder / name) for name, text in corpora.items()]
        workers = (1, 2) if _TIMED.value else ()
        secs = [_build_secs(list(corpora.values())[-1], folder, number) for number in workers]
        counts = [_num_opens(folder, 10**power) for power in (7, 8, 9)]

    header = ("corpus", "tasks", "opens", "MB read", "MB written", "largest task: MB", "CPU s")
    print(table.text([header, *rows]))
    if secs:
        print(
            f"{secs[0]:.0f} s with one worker, {secs[1]:.0f} s with two: x{secs[0] / secs[1]:.2f}"
        )
    print("opens to deduplicate 10^7, 10^8 and 10^9 pairs of a language:", *counts)


def _row(meter: Meter, name: str, text: pathlib.Path, data: pathlib.Path) -> tuple[str, ...]:
    meter.tasks.clear()
    before = meter.usage()
    pipeline.run_through(pipeline.Step.REPORT, tsv_folder.sources_in(text), data, _CONFIG, meter)
    done = meter.usage() - before

    largest = max(task.read_bytes + task.written_bytes for task in meter.tasks)
    sizes = [done.read_bytes, done.written_bytes, largest]
    longest = max(task.secs for task in meter.tasks)
    megabytes = (f"{size / 1e6:.1f}" for size in sizes)
    return (name, str(len(meter.tasks)), str(done.opens), *megabytes, f"{longest:.1f}")


def _build_secs(text: pathlib.Path, folder: pathlib.Path, workers: int) -> float:
    command = [sys.executable, "-m", "data_prep.build", f"--input={text}", f"--workers={workers}"]
    command += [f"--out={folder}/{workers}", "--max_vocab_sentences=30000"]
    began = time.monotonic()
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return time.monotonic() - began


def _num_opens(folder: pathlib.Path, num_pairs: int) -> int:
    """Returns the number of files that deduplication.py's tasks get for one language."""
    size = _CONFIG.pairs_per_chunk
    starts = range(0, num_pairs, size)
    chunks = [Chunk("train", "de", pathlib.Path(f"{start}.tsv"), size, start) for start in starts]
    planned: list[Call] = []

    def plan(name, calls):
        planned.extend(calls.values())
        return {}

    deduplication.select({"de": chunks}, (), folder / "planned", size, plan)
    return sum(_num_files(call.args) for call in planned)


def _num_files(args: Sequence) -> int:
    num_paths = sum(isinstance(arg, pathlib.Path) for arg in args)
    return num_paths + sum(len(arg) for arg in args if isinstance(arg, list))


if __name__ == "__main__":
    cli.run("data_prep_tasks", main)
