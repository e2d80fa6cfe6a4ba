"""The report of a run: LOGDIR/report.html, a single page with pictures."""

import base64
import dataclasses
import html
import io
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from lingvo_gshard.evaluation import quality
from lingvo_gshard.files import atomic_file, storage, table
from lingvo_gshard.input import manifest
from lingvo_gshard.model import flops
from lingvo_gshard.model.translation_model import TranslationModel
from lingvo_gshard.planning import plan
from lingvo_gshard.runs import expert_load
from lingvo_gshard.runs.run import Run
from lingvo_gshard.train.summaries import EVAL_METRICS, TRAIN_METRICS, read_lines

# What is wider than the window scrolls by itself, and so the page never does.
_STYLE = """
body { font: 15px sans-serif; max-width: 66em; margin: auto; padding: 0 1em }
p { overflow-wrap: anywhere }
div { overflow-x: auto }
img { width: 100%; min-width: 40em }
th, td { padding: 0.1em 0.6em; text-align: right; vertical-align: bottom; min-width: 4em }
tr > :first-child { text-align: left }
tr:nth-child(even) { background: #f3f3f3 }
"""
_LOSS = "loss, nats per token"
# The panels of the curves, and the metrics that each of them shows.
_PANELS = {
    _LOSS: ("loss", "nll"),
    "gradient norm": ("gradient_norm",),
    "learning rate": ("learning_rate",),
    "steps per second": ("steps_per_sec",),
    "time spent waiting for input, %": ("input_wait",),
    "padding of the rows, %": ("padding.source", "padding.target"),
}
# What each section shows, and what to look for.
_CURVES = (
    "The loss should fall; unlike nll, it includes label smoothing and the auxiliary loss. Where "
    "the nll of dev rises while that of training falls, the model overfits."
)
_BY_LANGUAGE = "By training pairs, most first. Languages with few pairs profit from related ones."
_EXPERTS = (
    "The load of each expert divided by their mean, by language: 1 is an even share, and bright "
    "experts are preferred. Languages with similar rows share experts."
)
_SCORES = (
    "Higher scores are better; +- is half the 95 % interval. Compare only scores with the same "
    "signature:"
)
_ROUTING = (
    "A layer passes dropped tokens on unchanged, so they should be few. Where the busiest expert "
    "has many times the mean load, or experts get no tokens, raise task.aux_loss_weight."
)
_SPEED = (
    "Medians over all calls of the training step. A plan estimates the times of another machine."
)


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """Facts that the metrics files lack; `step_flops` are a step's model flops."""

    model: str
    num_weights: int
    max_steps: int
    step_flops: float
    train_pairs: dict[str, int]


def report(run: Run) -> pathlib.Path:
    """Writes a run's LOGDIR/report.html; returns its path. Raises as `write` and check_folder."""
    params, p = run.params, run.params.input
    run.estimator.check_folder()
    task = TranslationModel(params, run.estimator.partitioning).task
    languages = manifest.load(run.launch.data_dir).languages
    facts = RunFacts(
        model=run.launch.model,
        num_weights=task.num_weights,
        max_steps=params.train.max_steps,
        step_flops=flops.train_step_flops(task, p.batch_size, p.source_len, p.target_len),
        train_pairs={language.code: language.num_examples("train") for language in languages},
    )
    return write(pathlib.Path(run.logdir), facts)


def write(logdir: pathlib.Path, facts: RunFacts) -> pathlib.Path:
    """Writes the page. Raises ValueError if the run has not trained a step yet."""
    lines = read_lines(logdir / TRAIN_METRICS)
    if not lines:
        raise ValueError(f"{logdir}: no {TRAIN_METRICS}, so there is nothing to report yet.")
    evaluations = read_lines(logdir / EVAL_METRICS)
    title = html.escape(f"{facts.model} in {storage.origin(logdir).name}")
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>",
        f"<meta name=viewport content='width=device-width'><style>{_STYLE}</style>",
        f"<h1>{title}</h1>",
        _summary(facts, lines),
        *_section("Curves", _CURVES, _picture(_draw_curves, lines, evaluations)),
        *_languages(logdir, facts, evaluations),
        *_routing(lines),
        *_speed(logdir, facts, lines),
    ]
    path = logdir / "report.html"
    atomic_file.write(path, "\n".join(parts) + "\n")
    return path


def _summary(facts: RunFacts, lines: Sequence[dict[str, Any]]) -> str:
    last = lines[-1]
    skipped = sum(line["metrics"].get("skipped", 0.0) * line["num_steps"] for line in lines)
    return (
        f"<p>{table.count(facts.num_weights)} weights, step {last['step']:,} of "
        f"{facts.max_steps:,} after {last['wall_secs'] / 3600:.2f} hours; "
        f"loss {last['metrics']['loss']:.4f}.</p>\n"
        f"<p>{skipped:.0f} steps with non-finite gradients were skipped.</p>"
    )


def _draw_curves(
    figure: Figure, lines: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]]
) -> None:
    figure.set_size_inches(10, 5.5)
    grid = figure.subplots(2, 3)
    steps = [line["step"] for line in lines]
    rates = ("num_steps", "steps_per_sec"), ("input_wait_secs", "input_wait")
    metrics = [
        line["metrics"] | {name: line[field] / line["secs"] for field, name in rates}
        for line in lines
    ]
    dev = {line["step"]: line["nll"] for line in evaluations if line["name"] == "dev"}
    for axes, (title, names) in zip(grid.flat, _PANELS.items(), strict=True):
        factor = 100 if title.endswith("%") else 1
        for name in names:
            if name in metrics[-1]:
                values = [factor * each.get(name, np.nan) for each in metrics]
                axes.plot(steps, values, label=name.removeprefix("padding."))
        if title == _LOSS and dev:
            axes.plot(sorted(dev), [dev[step] for step in sorted(dev)], ".-", label="nll of dev")
        if len(names) > 1 and axes.lines:
            axes.legend(fontsize=8)
        axes.set_title(title, fontsize=9)
    for axes in grid[1]:
        axes.set_xlabel("step")


def _languages(
    logdir: pathlib.Path, facts: RunFacts, evaluations: Sequence[dict[str, Any]]
) -> Iterator[str]:
    """Yields the losses, experts and scores by language, as far as they exist."""
    nll = {line["name"].removeprefix("dev_"): line["nll"] for line in evaluations if "nll" in line}
    rows = [("language", "training pairs", "nll of dev, nats per token")]
    by_size = sorted(facts.train_pairs.items(), key=lambda pair: (-pair[1], pair[0]))
    rows += [(code, f"{n:,}", table.number(nll.get(code), ".3f")) for code, n in by_size]
    yield from _section("Languages", _BY_LANGUAGE, _table(rows))
    if not nll.keys() & facts.train_pairs.keys():
        yield "<p>--mode=eval adds each language's loss and the experts that it uses.</p>"
    if loads := expert_load.by_language(evaluations, [code for code, _ in by_size]):
        picture = _picture(expert_load.draw_by_language, loads)
        yield from _section("Experts by language", _EXPERTS, picture)
    scores = logdir / "decode_test" / "scores.json"
    if scores.exists():
        found = quality.load(scores)
        text = f"{_SCORES} {'; '.join(found.signatures(*found.metrics))}."
        yield from _section("Translations of test", text, _table(found.rows()))
    else:
        yield "<p>--mode=decode adds BLEU, chrF and chrF++.</p>"


def _routing(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yields the routing statistics of each MoE layer and the load of each expert."""
    header, *rows = expert_load.rows(lines[-1])
    if rows:
        title = f"Routing of the last {lines[-1]['num_steps']} steps"
        picture = _picture(expert_load.draw_on, lines)
        yield from _section(title, _ROUTING, _table([header, *rows]), picture)


def _speed(logdir: pathlib.Path, facts: RunFacts, lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yields the median measured step time and, if LOGDIR/plan exists, the planned ones."""
    # The median ignores the first call after each start, which includes loading.
    measured = float(np.median([line["secs"] / line["num_steps"] for line in lines]))
    tokens = lines[-1]["metrics"].get("num_tokens")
    gflop = facts.step_flops / 1e9
    rates = (table.number(tokens and tokens / measured, ",.4g"), f"{gflop / measured:,.4g}")
    rows: list[tuple[str, ...]] = [
        ("", "seconds per step", "target tokens per second", "model GFLOP per second"),
        ("measured here", f"{measured:.4g}", *rates),
    ]
    yield from _section("Speed", _SPEED)
    folder = logdir / "plan"
    if (folder / plan.PLAN_JSON).exists():
        planned = plan.load(folder)
        for name, share in (("roofline", 1.0), ("the paper's share of it", plan.PAPERS_SHARE)):
            steps = planned.steps_per_sec(share)
            secs = f"{1 / steps:.4g}" if steps else "does not fit"
            rates = (f"{planned.tokens_per_sec(share):,.0f}", f"{gflop * steps:,.0f}")
            rows.append((f"plan for {planned.topology}, {name}", secs, *rates))
    else:
        out = storage.origin(folder)
        command = f"python -m lingvo_gshard.plan --model=... --topology=... --out={out}"
        yield f"<p>{html.escape(command)} adds a plan.</p>"
    yield _table(rows)


def _section(title: str, text: str, *content: str) -> tuple[str, ...]:
    return f"<h2>{html.escape(title)}</h2>", f"<p>{html.escape(text)}</p>", *content


def _table(rows: Sequence[Sequence[str]]) -> str:
    return f"<div>{table.as_html(rows)}</div>"


def _picture(draw: Callable[..., None], *args: Any) -> str:
    """What `draw(figure, *args)` draws, as an embedded image."""
    figure = Figure(layout="constrained")
    draw(figure, *args)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=110)
    return (
        f'<div><img src="data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"></div>'
    )
