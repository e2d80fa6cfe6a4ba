"""The report of a run: LOGDIR/report.html, a single page with tables and pictures."""

import dataclasses
import pathlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lingvo_gshard.evaluation import html_page, quality
from lingvo_gshard.evaluation.html_page import Section
from lingvo_gshard.evaluation.quality import Quality
from lingvo_gshard.model import flops, placement
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.plans.plan import Plan
from lingvo_gshard.runs import expert_load, loss_products
from lingvo_gshard.runs.run import Run
from lingvo_gshard.train.metrics_files import EVAL_METRICS, TRAIN_METRICS, read_lines
from lingvo_gshard.train.run_times import RUN_TIMES, Goodput, goodput
from xla_plan.expected import factors_text
from xla_plan.plans import plan_folder
from xla_spmd.files import atomic_file, lock, storage, table

# The text of each section: its contents, and what to look for.
_CURVES = (
    "The loss should fall; unlike nll, it includes label smoothing and the auxiliary loss, if the "
    "task has them. The model overfits where the dev nll rises while the training nll falls."
)
_BY_PART = "Most training data first. Languages with little data profit from related ones."
_NO_LOSSES = "--mode=eval adds the loss of each, and the experts that it uses."
_EXPERTS = (
    "The load of each expert divided by the mean load, by language: 1 is an even share, and bright "
    "experts are preferred. Languages with similar rows share experts."
)
_SCORES = (
    "Higher scores are better; +- is half of the 95 % interval. Compare only scores with equal "
    "signatures."
)
_NO_SCORES = "--mode=decode adds BLEU, chrF and chrF++."
_ROUTING = (
    "A layer passes dropped tokens on unchanged, so there should be few of them. If the busiest "
    "expert has many times the mean load, or experts get no tokens, raise task.aux_loss_weight."
)
_SPEED = (
    "Medians over all calls of the training step. A plan estimates the times for another machine."
)
_GOODPUT = (
    "How all processes that trained this run spent their time; the time between two starts does "
    "not count. Steps that a restart repeated are lost, and so is all else since the checkpoint."
)


@dataclasses.dataclass(frozen=True)
class _Panel:
    """A panel of the curves: its title, its metrics, and their factor."""

    title: str
    metrics: tuple[str, ...]  # Metrics of training.
    factor: float = 1.0
    of_dev: str | None = None  # A metric of the dev split that is drawn beside them.


_PANELS = (
    _Panel("gradient norm", ("gradient_norm",)),
    _Panel("learning rate", ("learning_rate",)),
    _Panel("steps per second", ("steps_per_sec",)),
    _Panel("time spent waiting for input, %", ("input_wait",), factor=100),
)
_PADDING = _Panel("padding of the rows, %", ("padding.source", "padding.target"), factor=100)


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """Facts that the metrics files lack; `step_flops` are the model flops of a step."""

    model: str
    num_weights: int
    max_steps: int
    step_flops: float
    train_pairs: dict[str, int]  # By language; empty if the data is not divided into parts.
    nouns: tuple[str, str]  # The words for a language and a pair.
    unit: str  # What the task counts, such as tokens.
    shown: tuple[str, ...]  # The metrics that the task shows.
    has_source: bool  # Whether the task translates a source.
    dispatch: str | None  # How tokens reach experts, such as `EINSUM`; None if dense.
    # By language, the share of pairs that are too long for a row; empty if none can be too long.
    too_long: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def codes_by_size(self) -> list[str]:
        """Returns the languages, most training pairs first."""
        return sorted(self.train_pairs, key=lambda code: (-self.train_pairs[code], code))


@dataclasses.dataclass(frozen=True)
class _Results:
    """A run's results so far."""

    training: list[dict[str, Any]]  # The lines of train_metrics.jsonl, at least one.
    evaluations: list[dict[str, Any]]  # The lines of eval_metrics.jsonl.
    goodput: Goodput | None  # None for runs of earlier versions, which did not measure it.
    scores: Quality | None  # The scores of the test split's translations.
    plan: Plan | None  # The plan in the run's folder `plan`.
    plan_folder: pathlib.Path | str  # Where the plan is, or is expected.


def report(run: Run) -> pathlib.Path:
    """Writes a run's LOGDIR/report.html; returns its path.

    Raises ValueError if the folder is another model's, or if the run has not trained a step yet.
    """
    params = run.params
    rows = params.input
    run.estimator.check_folder()
    task = TaskModel(params, run.estimator.partitioning).task
    source_len, _ = task.Lengths(rows)
    parts = rows.cls.Parts(rows)

    facts = RunFacts(
        model=run.launch.model,
        num_weights=task.num_weights,
        max_steps=params.train.max_steps,
        step_flops=flops.step_flops(loss_products.of_experiment(params)),
        train_pairs={name: part.num_examples for name, part in parts.items()},
        nouns=rows.cls.Nouns(),
        unit=task.UNIT,
        shown=tuple(task.SHOWN),
        has_source=source_len > 0,
        dispatch=placement.dispatch(params),
        too_long=rows.cls.TooLong(rows),
    )
    return write(pathlib.Path(run.logdir), facts)


def write(logdir: pathlib.Path, facts: RunFacts) -> pathlib.Path:
    """Writes LOGDIR/report.html and returns its path.

    Raises ValueError if the run has not trained a step yet.
    """
    results = _read(logdir)
    sections = [
        _curves(facts, results),
        *_languages(facts, results),
        *_experts(facts, results),
        *_translations(facts, results),
        *_routing(results),
        _speed(facts, results),
        *_goodput(results),
    ]
    title = f"{facts.model} in {storage.origin(logdir).name}"
    page = html_page.document(title, _summary(facts, results), sections)

    path = logdir / "report.html"
    with lock.held(path, "writes this file"):
        atomic_file.write(path, page)
    return path


def _read(logdir: pathlib.Path) -> _Results:
    training = read_lines(logdir / TRAIN_METRICS)
    if not training:
        raise ValueError(f"{logdir}: no {TRAIN_METRICS}, so there is nothing to report yet.")

    scores = logdir / "decode_test" / "scores.json"
    own_folder = logdir / "plan"
    return _Results(
        training=training,
        evaluations=read_lines(logdir / EVAL_METRICS),
        goodput=goodput(read_lines(logdir / RUN_TIMES)),
        scores=quality.load(scores) if scores.exists() else None,
        plan=plan_folder.find(Plan, own_folder),
        plan_folder=storage.origin(own_folder),
    )


def _summary(facts: RunFacts, results: _Results) -> list[tuple[str, str]]:
    last = results.training[-1]

    # A line's metrics are means over its steps.
    skipped = 0.0
    for line in results.training:
        skipped += line["metrics"].get("skipped", 0.0) * line["num_steps"]

    dispatch = [] if facts.dispatch is None else [("dispatch to experts", facts.dispatch)]
    return [
        ("weights", table.count(facts.num_weights)),
        *dispatch,
        ("steps", f"{last['step']:,} of {facts.max_steps:,}"),
        ("time", f"{last['wall_secs'] / 3600:.2f} hours"),
        ("loss", f"{last['metrics']['loss']:.4f}"),
        ("steps skipped: gradient not finite", f"{skipped:.0f}"),
    ]


def _curves(facts: RunFacts, results: _Results) -> Section:
    panels = _panels(facts, results)
    description = "Curves of " + "; ".join(panel.title for panel in panels)
    curves = html_page.picture(description, _draw_curves, panels, results)
    return Section("Curves", _CURVES, (curves,))


def _panels(facts: RunFacts, results: _Results) -> list[_Panel]:
    """Returns the panels of the curves for which a run has metrics."""
    panels = [_Panel(f"loss, nats per {facts.unit}", ("loss", "nll"), of_dev="nll")]
    panels += [_Panel(name, (name,), of_dev=name) for name in facts.shown]
    panels += _PANELS

    # Rows of a single length are never padded.
    if any(name in results.training[-1]["metrics"] for name in _PADDING.metrics):
        panels.append(_PADDING)
    return panels


def _draw_curves(figure: Figure, panels: Sequence[_Panel], results: _Results) -> None:
    all_axes = expert_load.panels(figure, len(panels), 3.0)
    for axes, panel in zip(all_axes, panels, strict=True):
        _draw_panel(axes, panel, results)
    for lowest in all_axes[-expert_load.PANELS_PER_ROW :]:
        lowest.set_xlabel("step")


def _draw_panel(axes: Axes, panel: _Panel, results: _Results) -> None:
    steps = [line["step"] for line in results.training]
    metrics = [_metrics(line) for line in results.training]
    for name in panel.metrics:
        if name in metrics[-1]:
            # The curve has gaps where earlier lines lack the metric.
            values = [panel.factor * of_line.get(name, np.nan) for of_line in metrics]
            axes.plot(steps, values, label=name.removeprefix("padding."))

    # Later evaluations of the same step replace earlier ones.
    dev = {}
    for line in results.evaluations:
        if line["name"] == "dev" and panel.of_dev in line:
            dev[line["step"]] = line[panel.of_dev]
    if dev:
        evaluated = sorted(dev)
        values = [dev[step] for step in evaluated]
        axes.plot(evaluated, values, ".-", label=f"{panel.of_dev} of dev")

    if len(axes.lines) > 1:
        axes.legend()
    axes.set_title(panel.title)


def _metrics(line: dict[str, Any]) -> dict[str, Any]:
    """Returns a line's metrics, and the rates computed from its times."""
    rates = {
        "steps_per_sec": line["num_steps"] / line["secs"],
        "input_wait": line["input_wait_secs"] / line["secs"],
    }
    return {**line["metrics"], **rates}


def _languages(facts: RunFacts, results: _Results) -> Iterator[Section]:
    """Yields the training pairs and, where evaluated, the losses by language."""
    if not facts.train_pairs:
        return

    # Evaluations are named dev_CODE; later evaluations replace earlier ones.
    losses = {}
    for line in results.evaluations:
        if "nll" in line:
            losses[line["name"].removeprefix("dev_")] = line["nll"]

    part, example = facts.nouns
    rows = [[part, f"training {example}s", f"nll of dev, nats per {facts.unit}"]]
    if facts.too_long:
        rows[0].append(f"{example}s too long for a row, never trained on")
    for code in facts.codes_by_size():
        loss = table.number(losses.get(code), ".3f")
        row = [code, f"{facts.train_pairs[code]:,}", loss]
        if facts.too_long:
            row.append(table.number(facts.too_long.get(code), ".1%"))
        rows.append(row)

    content = [html_page.rows(rows)]
    if not losses.keys() & facts.train_pairs.keys():
        content.append(html_page.paragraph(_NO_LOSSES))
    yield Section(f"By {part}", _BY_PART, tuple(content))


def _experts(facts: RunFacts, results: _Results) -> Iterator[Section]:
    """Yields the load of the experts by language, if that was evaluated."""
    loads = expert_load.by_language(results.evaluations, facts.codes_by_size())
    if loads:
        description = "The load of each expert by language, a panel for each layer"
        heat_maps = html_page.picture(description, expert_load.draw_by_language, loads)
        yield Section("Experts by language", _EXPERTS, (heat_maps,))


def _translations(facts: RunFacts, results: _Results) -> Iterator[Section]:
    """Yields the scores of translations or, if the task translates, the way to get them."""
    scores = results.scores
    if scores is not None:
        lines = [*scores.signatures(*scores.metrics), *scores.notes()]
        content = (html_page.rows(scores.rows()), *map(html_page.paragraph, lines))
        yield Section("Translations of test", _SCORES, content)
    elif facts.has_source:
        yield Section("Translations of test", _NO_SCORES)


def _routing(results: _Results) -> Iterator[Section]:
    """Yields the routing statistics of each MoE layer and the load of each expert, if any."""
    last = results.training[-1]
    header, *layers = expert_load.rows(last)
    if layers:
        description = "The load of each expert, and the routing statistics of each layer by step"
        curves = html_page.picture(description, expert_load.draw_on, results.training)
        title = f"Routing of the last {last['num_steps']} steps"
        yield Section(title, _ROUTING, (html_page.rows([header, *layers]), curves))


def _speed(facts: RunFacts, results: _Results) -> Section:
    """Returns the median measured step time and, if there is a plan, the planned step times."""
    gflop = facts.step_flops / 1e9

    # The median is insensitive to the first call after each start, which includes loading.
    step_secs = [line["secs"] / line["num_steps"] for line in results.training]
    measured_secs = float(np.median(step_secs))
    tokens = results.training[-1]["metrics"].get("num_tokens")
    tokens_per_sec = None if tokens is None else tokens / measured_secs

    rows = [
        ("", "seconds per step", f"{facts.unit}s per second", "model GFLOP per second"),
        (
            "measured here",
            f"{measured_secs:.4g}",
            table.number(tokens_per_sec, ",.4g"),
            f"{gflop / measured_secs:,.4g}",
        ),
    ]
    if results.plan is not None and results.plan.has_step:
        rows.append(_planned(results.plan, "roofline", 1.0, gflop))
        factor = results.plan.factor
        if factor is not None:
            rows.append(_planned(results.plan, "expected", factor.value, gflop))
        shares = None if factor is None else factor.shares
        basis = html_page.paragraph(factors_text.basis(results.plan.topology, shares))
        return Section("Speed", _SPEED, (html_page.rows(rows), basis))

    folder = shlex.quote(str(results.plan_folder))
    command = f"gshard plan model --model=... --topology=... --out={folder}"
    advice = html_page.paragraph(f"{command} adds a plan.")
    return Section("Speed", _SPEED, (html_page.rows(rows), advice))


def _goodput(results: _Results) -> Iterator[Section]:
    """Yields the time by category, largest first, if it was measured."""
    measured = results.goodput
    if measured is None:
        return

    rows = [("", "seconds", "share")]
    for category, secs in sorted(measured.secs.items(), key=lambda item: -item[1]):
        rows.append((category.value, f"{secs:,.1f}", f"{secs / measured.total_secs:.1%}"))
    rows.append(("all", f"{measured.total_secs:,.1f}", "100.0%"))
    title = f"Goodput: {measured.share:.1%} of the time went to steps that count"
    yield Section(title, _GOODPUT, (html_page.rows(rows),))


def _planned(planned: Plan, name: str, share: float, gflop: float) -> tuple[str, str, str, str]:
    """Returns the row of a plan at a share of the roofline; `gflop` is a step's model GFLOP."""
    steps_per_sec = planned.steps_per_sec(share)
    return (
        f"plan for {planned.topology}, {name}",
        f"{1 / steps_per_sec:.4g}" if steps_per_sec else "does not fit",
        f"{planned.tokens_per_sec(share):,.0f}",
        f"{gflop * steps_per_sec:,.0f}",
    )
