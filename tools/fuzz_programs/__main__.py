"""Random annotated programs: on several devices, they must give the results of one device.

    python -m tools.fuzz_programs --log=LOG --first=0 --count=10000
    python -m tools.fuzz_programs --summary=LOG
    python -m tools.fuzz_programs --shrink=SEED
    python -m tools.fuzz_programs --show=SEED

Each seed gives a program of 4 to 8 operators with random annotations, values and gradients, of
uneven shapes. The program is compiled for a mesh of 3 to 8 virtual CPU devices, and its results are
compared with TensorFlow's own, which are computed eagerly on one device. The outcome is one of:

    same     the results are equal, up to rounding
    refused  the library raised a ValueError
    error    the compiler or the library raised another exception
    died     the process was aborted, or did not end
    wrong    a result differs, without an error
    unlike   on one device, too, XLA's results differ from TensorFlow's, or XLA fails

The log has a line of JSON for each seed. A run continues after the seeds of its log, so that it can
be stopped at any time; two runs with separate logs may share the work. --shrink reduces a program
whose outcome is wrong, refused, error or died to a few lines, and prints it as a program of the
public API. The exit status of a run is 1 if any outcome is wrong, error or died.
"""

import collections
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from absl import app, flags

from tools.fuzz_programs import worker
from tools.fuzz_programs.draft import EVERYTHING, Choices

_LOG = flags.DEFINE_string("log", None, "Run programs, and append their outcomes to this file.")
_FIRST = flags.DEFINE_integer("first", 0, "The first seed of a run.", 0)
_COUNT = flags.DEFINE_integer("count", 1000, "The number of seeds of a run.", 1)
_FAMILIES = flags.DEFINE_list("families", [], "The families of operators, by name; or all.")
_ZERO_SHARE = flags.DEFINE_float(
    "zero_share", EVERYTHING.zero_share, "The share of sizes that are 0.", 0.0, 1.0
)
_SUMMARY = flags.DEFINE_list("summary", [], "Print a summary of these logs.")
_SHRINK = flags.DEFINE_integer("shrink", None, "Reduce the program of this seed.")
_SHOW = flags.DEFINE_integer("show", None, "Print the program of this seed.")


def main(argv: Sequence[str]) -> int:
    del argv
    wanted = [_LOG.value is not None, bool(_SUMMARY.value)]
    wanted += [_SHRINK.value is not None, _SHOW.value is not None]
    if sum(wanted) != 1:
        raise app.UsageError("give one of --log, --summary, --shrink, --show.")

    worker.prepare()
    choices = Choices(tuple(_FAMILIES.value), _ZERO_SHARE.value)
    if _LOG.value is not None:
        seeds = range(_FIRST.value, _FIRST.value + _COUNT.value)
        return _run(pathlib.Path(_LOG.value), seeds, choices)
    if _SUMMARY.value:
        print(summary([pathlib.Path(path) for path in _SUMMARY.value]))
    elif _SHOW.value is not None:
        # These modules import TensorFlow.
        from tools.fuzz_programs import generate, program

        print(program.describe(generate.generate(_SHOW.value, choices)))
    else:
        from tools.fuzz_programs import shrink

        try:
            print(shrink.shrunk_source(_SHRINK.value, choices))
        except ValueError as error:
            print(error)
            return 1
    return 0


def _run(log: pathlib.Path, seeds: Sequence[int], choices: Choices) -> int:
    """Runs the seeds that are not in the log; returns the exit status."""
    counts: collections.Counter[str] = collections.Counter()
    for line in run(log, seeds, choices):
        counts[line["kind"]] += 1
        if line["kind"] in worker.FINDINGS:
            print(f"seed {line['seed']}: {line['kind']}: {line['detail'][:300]}", flush=True)
    print(dict(counts))
    return int(any(counts[kind] for kind in worker.FINDINGS))


def run(
    log: pathlib.Path, seeds: Sequence[int], choices: Choices = EVERYTHING
) -> Iterator[dict[str, Any]]:
    """Runs the seeds that are not in the log, and yields each line that it adds."""
    done = set()
    if log.exists():
        done = {line["seed"] for line in lines(log)}
        _cut_last_line(log)

    process = worker.Worker()
    try:
        with log.open("a", encoding="utf-8") as file:
            for seed in seeds:
                if seed in done:
                    continue
                line = {"seed": seed} | worker.outcome_of_seed(process, seed, choices)
                file.write(f"{json.dumps(line)}\n")
                file.flush()
                yield line
    finally:
        process.close()


def lines(log: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the lines of a log, without a last line that was cut off."""
    found = []
    for text in log.read_text(encoding="utf-8").splitlines(keepends=True):
        if text.endswith("\n"):
            found.append(json.loads(text))
    return found


def _cut_last_line(log: pathlib.Path) -> None:
    """Removes an unfinished line, which a stopped run may leave."""
    content = log.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with log.open("r+b") as file:
            file.truncate(whole)


def summary(logs: Sequence[pathlib.Path]) -> str:
    """Returns the number of programs with each outcome, and a line for each failure, as text."""
    counts: collections.Counter[str] = collections.Counter()
    by_kind = collections.defaultdict(list)
    deaths = []
    secs = 0.0
    for log in logs:
        for line in lines(log):
            counts[line["kind"]] += 1
            secs += line["secs"]
            by_kind[line["kind"]].append(line)
            if "died_once" in line:
                deaths.append(f"seed {line['seed']}: once: {line['died_once'][:300]}")

    total = counts.total()
    text = [f"{total} programs, {secs / max(total, 1):.2f} s of CPU each"]
    for kind, count in counts.most_common():
        text.append(f"{count:7} {kind}")
    for kind in worker.FINDINGS:
        for line in by_kind[kind]:
            text.append(f"seed {line['seed']}: {kind}: {line['detail'][:300]}")
    return "\n".join([*text, *deaths])


if __name__ == "__main__":
    app.run(main)
