"""Loss, BLEU, memory and speed by the share of experts that a model keeps for some languages.

    python -m repro.quality.prune --logdir=RUN --languages=de,fr --out=OUT [--keep=1,0.5,0.25,0.125]

RUN was trained on a prepared folder and evaluated with --mode=eval. For each share, the benchmark
writes a pruned run and its bundle to OUT; for a share below 1, also a run with the other experts
merged. Each run is evaluated on dev, and a separate process decodes the first sentences of test
with its bundle. nll is the mean over the languages; the next column is the mean over the other
languages, which lose their experts. The memory is the peak of the bundle's process, or of its
fullest device; the rate is the best of a few calls after the first. Existing results in OUT are
kept.
"""

import itertools
import json
import pathlib
import resource
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import flags

from lingvo_gshard import cli
from lingvo_gshard.decoding import bundle, bundle_spec, kinds
from lingvo_gshard.evaluation import quality
from lingvo_gshard.input import example_codec, manifest, sentences
from lingvo_gshard.runs import launch as launches
from lingvo_gshard.spmd import devices
from lingvo_gshard.train.metrics_files import EVAL_METRICS, read_lines
from repro.quality import multilingual
from xla_spmd.files import digests, table
from xla_spmd.runtime import environment

_LOGDIR = flags.DEFINE_string("logdir", None, "An evaluated run.", required=True)
_LANGUAGES = flags.DEFINE_list("languages", None, "The languages to keep.", required=True)
_KEEP = flags.DEFINE_list("keep", ["1", "0.5", "0.25", "0.125"], "The shares to try.")
_OUT = flags.DEFINE_string("out", None, "The folder of the pruned runs.", required=True)
_SENTENCES = flags.DEFINE_integer("sentences", 500, "The sentences of each language.", 1)
_CALLS = flags.DEFINE_integer("calls", 2, "The number of timed calls.", 1)
_BUNDLE = flags.DEFINE_string("bundle", None, "Decode with this bundle, and print JSON.")

_DEV = "dev_"


def main() -> None:
    if _BUNDLE.value is not None:
        print(json.dumps(_decoded(_BUNDLE.value)))
        return

    scores = [f"BLEU of {code}" for code in _LANGUAGES.value]
    rows = [["keep", "weights", "nll", "nll of others", *scores, "sentences/s", "peak memory, GB"]]
    for keep in _KEEP.value:
        for is_merged in (False, True):
            if not is_merged or float(keep) < 1:
                rows.append(_row(keep, is_merged))
    print(table.text(rows))


def _row(keep: str, is_merged: bool) -> list[str]:
    """Makes, evaluates and measures a pruned run; returns a row of the table."""
    name = f"{keep} merged" if is_merged else keep
    logdir = pathlib.Path(_OUT.value, f"keep-{name.replace(' ', '-')}")
    languages = ",".join(_LANGUAGES.value)
    if not (logdir / "checkpoints/0").is_dir():
        merge = ["--merge"] if is_merged else []
        multilingual.command(
            "lingvo_gshard.prune",
            f"--logdir={_LOGDIR.value}",
            f"--languages={languages}",
            f"--keep={keep}",
            f"--out={logdir}",
            *merge,
        )
    if not (logdir / EVAL_METRICS).exists():
        multilingual.command("lingvo_gshard.trainer", f"--logdir={logdir}", "--mode=eval")
    folder = logdir.with_name(f"{logdir.name}.bundle")
    if not folder.exists():
        multilingual.command(
            "lingvo_gshard.export_bundle", f"--logdir={logdir}", f"--bundle={folder}"
        )

    printed = multilingual.command(
        "repro.quality.prune",
        f"--bundle={folder}",
        f"--logdir={logdir}",
        f"--languages={languages}",
        f"--out={_OUT.value}",
        f"--sentences={_SENTENCES.value}",
        f"--calls={_CALLS.value}",
    )
    measured = json.loads(printed.splitlines()[-1])
    kept, others = _losses(logdir)
    return [
        name,
        table.count(measured["num_weights"]),
        f"{kept:.4f}",
        table.number(others, ".4f"),
        *[f"{score:.2f}" for score in measured["bleu"]],
        f"{measured['sentences_per_sec']:.1f}",
        f"{measured['peak_bytes'] / 1e9:.2f}",
    ]


def _losses(logdir: pathlib.Path) -> tuple[float, float | None]:
    """Returns the mean nll of the languages, and of all other languages, or None."""
    kept: list[float] = []
    others: list[float] = []
    for line in read_lines(logdir / EVAL_METRICS):
        if line["name"].startswith(_DEV):
            code = line["name"].removeprefix(_DEV)
            losses = kept if code in _LANGUAGES.value else others
            losses.append(line["nll"])
    return float(np.mean(kept)), float(np.mean(others)) if others else None


def _decoded(folder: str) -> dict[str, Any]:
    """Decodes test with a bundle; returns the scores, the rate and the peak memory."""
    environment.prepare(bundle_spec.load_spec(folder).num_partitions)
    devices.start()
    decoder, source, target = bundle.load(folder)
    translator = kinds.text_decoder(decoder, source, target)

    lines: list[str] = []
    references: list[list[str]] = []
    for pairs in _test_pairs():
        lines += [line for line, _ in pairs]
        references.append([translator.written(reference) for _, reference in pairs])

    # The first call compiles.
    secs = []
    found = []
    for _ in range(1 + _CALLS.value):
        began_secs = time.perf_counter()
        found = [best[0].text for best in translator.decode(lines)]
        secs.append(time.perf_counter() - began_secs)

    sizes = [weight.size for weight in decoder.theta.Flatten()]
    return {
        "bleu": _bleu(found, references),
        "sentences_per_sec": len(lines) / min(secs[1:]),
        "peak_bytes": _peak_bytes(),
        "num_weights": int(np.sum(sizes)),
    }


def _data_dir() -> str:
    data_dir = launches.recorded(_LOGDIR.value).data_dir
    if data_dir is None:
        raise ValueError(f"{_LOGDIR.value} does not name its data: evaluate it with --data_dir.")
    return data_dir


def _test_pairs() -> list[list[tuple[str, str]]]:
    """Returns the lines of test to decode, with their references, for each language."""
    data_dir = _data_dir()
    data = {language.code: language for language in manifest.load(data_dir).languages}
    pairs = []
    for code in _LANGUAGES.value:
        if code not in data or "test" not in data[code].text:
            raise ValueError(f"{data_dir} lacks a test split of {code}.")
        path = digests.local(data_dir, data[code].text["test"])
        of_language = []
        for source, reference in itertools.islice(sentences.eval_text(path), _SENTENCES.value):
            of_language.append((data[code].line(source), reference))
        pairs.append(of_language)
    return pairs


def _bleu(found: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
    """Returns the BLEU of each language; `found` are the translations of all languages."""
    codes = [language.code for language in manifest.load(_data_dir()).languages]
    scores = []
    first = 0
    for code, of_language in zip(_LANGUAGES.value, references, strict=True):
        _, target = example_codec.sides(code, codes)
        own = found[first : first + len(of_language)]
        scores.append(quality.score("bleu", own, of_language, target).value)
        first += len(of_language)
    return scores


def _peak_bytes() -> int:
    """Returns the peak memory of the fullest device, or of this process."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.devices()]
    if any(peaks):
        return max(peaks)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    cli.run("prune", main)
