"""The paper's tables beside ours as text, and the Markdown tables of docs/scaling.md."""

import collections
from collections.abc import Iterable, Iterator, Sequence

from lingvo_gshard.plans.plan import DECODE, EVALUATE, INITIALIZE, TRAIN, Plan
from repro.tables import as_printed, family, figure9
from repro.tables.as_printed import PaperRun
from repro.tables.family import PlannedRun
from repro.tables.figure9 import CollectiveTime
from repro.tables.paper import Recomputed, Row
from xla_plan.plans import figures as program_figures
from xla_spmd.files import table

_FIGURE_9 = """\
Figure 9: ms of the collectives' model on TPU v3 by partitions (section 5.3). The paper measured
AllToAll x9 and AllReduce about constant; ours is a formula without latency."""

_FIGURE_1 = "Figure 1: quality and cost by size; BLEU is the paper's average of 100 languages"
_TABLE_1 = "Table 1: the family; ours are the registered experiments"
_TABLE_2 = "Table 2: billions of tokens to a cross entropy, as printed; in miniature, "
_TABLE_3 = """\
Table 3: rates and costs as printed, the figures that follow from its rates and batches, and ours.
`% of peak` is the share of the cores' peak that our products without recomputation would need at
the printed rate, for as many source as target tokens in a batch, and for half on each side."""
_RECOMPUTED = """\
Section 5.1: the share of a step that recomputes activations, in %; the paper's share is of measured
cycles, ours of the products' flops and of the roofline's time."""

_TAKEN = """\
We take the first reading, as footnote 7 counts source tokens: a batch has 2^20 or 2^22 tokens on
each side."""


def paper(rows: Sequence[Row], shares: Sequence[Recomputed]) -> str:
    """Returns Figure 1, Tables 1 to 3, section 5.1's shares and Figure 9."""
    sections = [
        f"{_FIGURE_1}\n{_figure_1(rows)}",
        f"{_TABLE_1}\n{_table_1(rows)}",
        f"{_TABLE_2}`python -m repro.quality.sample_efficiency`\n{_table_2(rows)}",
        f"{_TABLE_3}\n{_table_3(rows)}",
        f"{_RECOMPUTED}\n{table.text(_recomputed_rows(shares))}",
        figure_9(figure9.points()),
    ]
    if all(row.planned is None for row in rows):
        sections.append("Without our plans; --plans=FAMILY adds the plans of --table=scaling.")
    return "\n\n".join(sections)


def page(planned: Sequence[PlannedRun], shares: Sequence[Recomputed]) -> str:
    """Returns the tables of docs/scaling.md in Markdown, and the conclusions of each reading."""
    return "\n".join(
        [
            table.markdown(_program_rows(planned)),
            table.markdown(_rate_rows(planned)),
            *_reading_remarks(planned),
            "",
            table.markdown(_recomputed_rows(shares)),
        ]
    )


def figure_9(points: Iterable[CollectiveTime]) -> str:
    """Returns the milliseconds of each collective by partitions."""
    columns: dict[str, dict[str, float]] = collections.defaultdict(dict)
    for point in points:
        columns[str(point.cores)][f"{point.kind} {point.mib} MiB"] = 1e3 * point.secs
    return f"{_FIGURE_9}\n{program_figures.side_by_side(columns)}"


# Tables of the paper.


def _figure_1(rows: Sequence[Row]) -> str:
    header = ["model", "weights B", "BLEU", "delta BLEU", "core-years", "ours planned", "half"]
    cells = [header]
    for row in rows:
        run = row.run
        if run.bleu is None:
            continue
        numbers = [table.number(value, ".1f") for value in (run.bleu, run.delta_bleu)]
        years = [table.number(run.core_years, ".1f"), *_planned_years(row.planned)]
        cells.append([run.name, f"{run.weights / 1e9:g}", *numbers, *years])

    # This row stands for all bilingual models together.
    cells.append(
        [
            "Baselines",
            f"{as_printed.NUM_BASELINES}x{as_printed.BASELINE_WEIGHTS / 1e9:g}",
            f"{as_printed.BASELINES_BLEU:.1f}",
            "-",
            f"{as_printed.BASELINES_CORE_YEARS:.1f}",
            *_planned_years(None),
        ]
    )

    # The growth that the caption mentions.
    by_name = {row.run.name: row.run for row in rows}
    small = by_name["MoE(128E, 36L)"]
    large = by_name["MoE(2048E, 36L)"]
    assert small.core_years is not None and large.core_years is not None
    growth = (
        f"From {small.name} to {large.name}: weights x{large.weights / small.weights:.1f}, "
        f"core-years x{large.core_years / small.core_years:.1f}. (The caption has 37.5B, 16x and "
        "3.6x.)"
    )
    return f"{table.text(cells)}\n{growth}"


def _table_1(rows: Sequence[Row]) -> str:
    cells = [["", "model", "experts", "in all", "cores", "layers", "weights B", "ours B"]]
    misprints = []
    for row in rows:
        run = row.run
        if run.printed_experts is None:
            continue  # T(96L) is not in Table 1.
        sizes = [str(size) for size in (run.cores, run.experts, run.cores, run.layers)]
        weights = [f"{run.weights / 1e9:g}", f"{row.own.weights / 1e9:.2f}"]
        cells.append([run.number, run.name, *sizes, *weights])
        if run.printed_experts != run.experts:
            misprints.append(
                f"misprint: {run.name} has {run.cores} x {run.layers // 2} = {run.experts} "
                f"experts in all; the paper prints {run.printed_experts}."
            )
    return "\n".join([table.text(cells), *misprints])


def _table_2(rows: Sequence[Row]) -> str:
    cells = [["", "model", "cores", *(f"to {loss}" for loss in as_printed.CROSS_ENTROPIES)]]
    for row in rows:
        run = row.run
        if any(run.billion_tokens):
            tokens = [table.number(value, "g") for value in run.billion_tokens]
            cells.append([run.number, run.name, str(run.cores), *tokens])
    return table.text(cells)


def _table_3(rows: Sequence[Row]) -> str:
    header = ["", "model", "cores", "steps/s", "batch", "core-years", "days", "BLEU"]
    header += ["core-years so", "days so", "Gflop a token", "% of peak", "half: % of peak"]
    header += ["planned steps/s", "half: steps/s"]
    cells = [header]
    for row in rows:
        run = row.run
        if run.bleu is None:
            continue  # MoE(2048E, 60L) is not in Table 3.
        printed = [str(run.cores), table.number(run.steps_per_sec), _tokens(run)]
        printed += [table.number(value, ".1f") for value in (run.core_years, run.days, run.bleu)]

        # Figures by formula.
        shares = [row.share_of_peak(half=False), row.share_of_peak(half=True)]
        own = [table.number(value, ".1f") for value in (row.core_years, row.days)]
        own.append(f"{row.own.step_flops / run.batch_tokens / 1e9:.2f}")
        own += [table.number(None if share is None else 100 * share, ".0f") for share in shares]

        rates = [table.number(rate) for rate in _planned_rates(row.planned)]
        cells.append([run.number, run.name, *printed, *own, *rates])
    return table.text(cells)


def _tokens(run: PaperRun) -> str:
    return f"{run.batch_tokens // 2**20}M"


# Tables of plans.


def _planned_rates(planned: PlannedRun | None) -> tuple[float | None, float | None]:
    """Returns our steps per second by both readings, where planned."""
    if planned is None:
        return None, None
    return _rate(planned.plan), _rate(planned.half)


def _rate(made: Plan | None) -> float | None:
    if made is None or made.step.cost is None:
        return None
    return made.steps_per_sec()


def _planned_years(planned: PlannedRun | None) -> list[str]:
    """Returns our core-years by both readings, where planned."""
    years: list[float | None] = [None, None]
    if planned is not None and planned.plan.step.fits:
        years[0] = planned.plan.core_years()
    if planned is not None and planned.half is not None and planned.half.step.fits:
        years[1] = family.half_core_years(planned.half)
    return [table.number(value, ".1f") for value in years]


def _program_rows(planned: Sequence[PlannedRun]) -> Iterator[list[str]]:
    """Yields the memory of all programs, the time of a step, and the rate of decoding."""
    names = (TRAIN, INITIALIZE, EVALUATE, DECODE)
    yield ["model", "cores", "weights", *names, "step, ms", "K tokens decoded a second"]
    for model in planned:
        made = model.plan
        cells = [model.run.name, str(made.cores), table.count(made.weights)]
        for name in names:
            program = made.programs.get(name)
            cells.append("-" if program is None else f"{program.memory_gib.peak:.2f}")

        cost = made.step.cost
        cells.append(table.number(None if cost is None else 1e3 * cost.step_secs, ".0f"))
        decoding = made.programs.get(DECODE)
        rate = None if decoding is None else decoding.tokens_per_sec() / 1e3
        cells.append(table.number(rate or None, ".0f"))
        yield cells


def _rate_rows(planned: Sequence[PlannedRun]) -> Iterator[list[str]]:
    """Yields the paper's steps per second and core-years, and ours by both readings."""
    yield [
        "model",
        "the paper's steps/s",
        "ours",
        "the paper's, % of ours",
        "ours, half on each side",
        "the paper's, % of that",
        "the paper's core-years",
        "ours",
        "ours, half on each side",
    ]
    for model in planned:
        cells = [model.run.name, table.number(model.run.steps_per_sec)]
        for made in (model.plan, model.half):
            ratio = family.ratio_to_ours(model.run, made)
            cells.append(table.number(_rate(made)))
            cells.append(table.number(None if ratio is None else 100 * ratio, ".0f"))
        years = table.number(model.run.core_years, ".1f")
        yield [*cells, years, *_planned_years(model)]


def _reading_remarks(planned: Sequence[PlannedRun]) -> Iterator[str]:
    """Yields the chosen reading, and the models for which the paper is faster than ours."""
    yield _TAKEN
    yield f"By it, the paper exceeds our roofline for {_exceeding(planned, half=False)}."
    if any(model.half is not None for model in planned):
        yield f"With half on each side, it does for {_exceeding(planned, half=True)}."
    else:
        yield "The other reading is not planned; --both_readings plans it."


def _exceeding(planned: Sequence[PlannedRun], half: bool) -> str:
    ratios = family.faster_than_ours(planned, half)
    texts = [f"{name} ({ratio:.0%} of ours)" for name, ratio in ratios.items()]
    return ", ".join(texts) or "no model"


def _recomputed_rows(shares: Sequence[Recomputed]) -> Iterator[list[str]]:
    """Yields the shares of recomputation, and the results that our experiments keep."""
    yield ["model", "weights", "remat", "the paper, cycles", "ours, flops", "ours, time"]
    for share in shares:
        cells = [share.model, table.count(share.own.weights), share.own.remat.name]
        printed = None if share.printed is None else 100 * share.printed
        cells.append(table.number(printed, ".0f"))

        cost = None if share.plan is None else share.plan.step.cost
        own = (
            [None, None]
            if cost is None
            else [cost.recomputed_flops_share, cost.recomputed_time_share]
        )
        cells += [table.number(None if value is None else 100 * value, ".0f") for value in own]
        yield cells
