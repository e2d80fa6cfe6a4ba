"""The tables of this package as text, and the lines that report progress."""

import statistics
from collections.abc import Iterable, Mapping, Sequence

from lingvo_gshard.plans import plan_text
from lingvo_gshard.plans.plan import Plan
from repro.tables import (
    capacity,
    family,
    figure9,
    language_models,
    late_sums,
    mpmd,
    paper_text,
    sbp,
    table4,
)
from repro.tables.as_printed import PaperRun
from repro.tables.family import PlannedRun
from repro.tables.paper import Recomputed
from repro.tables.table4 import Difference, OtherCollectives, Row, WindowedEinsum
from xla_plan.plans import figures as program_figures
from xla_spmd.files import table
from xla_spmd.hlo.compiled_report import CompiledReport

_HOURS_PER_YEAR = 365.25 * 24

_TABLE_3_TITLE = """\
Table 3, Figures 7 and 8: plans with every core at its roofline, and the paper's own figures. From
128 to 2048 cores, the paper measured for a forward pass of the layers (section 5.2): step x1.7,
AllToAll x3.75, its share 16% to 36%, share of the roofline 70% to 48%."""

_LANGUAGE_MODELS_TITLE = """\
Language models on the machines of their published rates: plans at the roofline, and the published
rates. The share is the published rate over the plan's rate, which is a bound."""

_CAPACITY_TITLE = """\
What full experts drop with perfectly balanced random gates: shares of the first choices, of the
requested second choices, and of the tokens, which are dropped if no expert takes them. A token
requests its second expert with probability 2 * g2, or all request it. C is 2S/E, rounded up to a
multiple. Experts compute E * C / S rows per token, full or empty."""


def compilations_table(plans: Mapping[str, Plan]) -> str:
    """Returns plans side by side, with the growth from the first to the last."""
    return program_figures.side_by_side(
        {name: plan_text.figures(plan) for name, plan in plans.items()}
    )


def mpmd_line(row: mpmd.Row) -> str:
    """Returns both of Figure 2's costs for D devices, in one line."""
    return (
        f"D = {len(row.mpmd)}: one program {row.spmd.cpu_secs:.2f} s "
        f"({row.whole_cpu_secs:.2f} s with the partitioner), {row.spmd.instructions} instructions; "
        f"D programs {row.mpmd_cpu_secs:.2f} s, {row.mpmd_instructions} instructions; "
        f"x{row.cpu_ratio:.1f} s, x{row.instruction_ratio:.1f} instructions"
    )


# Table 3 and Figures 7 and 8.


def planned_run_line(planned: PlannedRun) -> str:
    """Returns whether a model of the family fits, in one line."""
    return f"{planned.run.name}: {plan_text.verdict(planned.plan)}"


def published_run_line(planned: language_models.PlannedRun) -> str:
    """Returns whether a published language model fits, in one line."""
    return f"{planned.run.name}: {plan_text.verdict(planned.plan)}"


def language_models_table(planned_runs: Sequence[language_models.PlannedRun]) -> str:
    """Returns plans of language models beside the published rates, as in the documents."""
    rows = [["model", "machine", "weights B", "GiB", "capacity", "step ms", "K tokens/s"]]
    rows[0] += ["published", "share"]
    for planned in planned_runs:
        made = planned.plan
        memory = made.step.memory_gib
        cost = made.step.cost

        cells = [planned.run.name, made.topology, f"{made.weights / 1e9:.1f}"]
        cells += [f"{memory.peak:.2f}", f"{memory.capacity:.2f}"]
        for value in (
            None if cost is None else 1e3 * cost.step_secs,
            None if cost is None else made.tokens_per_sec() / 1e3,
        ):
            cells.append("does not fit" if value is None else f"{value:.5g}")

        rate = planned.run.tokens_per_sec
        cells.append(table.number(None if rate is None else rate / 1e3, ".4g"))
        cells.append(table.number(planned.share))
        rows.append(cells)

    # The range of the shares of one system.
    lines = [_LANGUAGE_MODELS_TITLE, "", table.markdown(rows)]
    known = language_models.shares(planned_runs, "lm.Dense")
    if known:
        lines.append(
            f"Lingvo's {len(known)} rates: {known[0]:.2f} to {known[-1]:.2f} of the bound, median "
            f"{statistics.median(known):.2f}."
        )
    return "\n".join(lines)


def family_tables(planned_runs: Sequence[PlannedRun], shares: Sequence[Recomputed]) -> str:
    """Returns the tables of docs/scaling.md, a table by cores for each depth, and Figure 9."""
    columns_by_depth: dict[int, dict[str, Mapping[str, float | None]]] = {}
    for planned in planned_runs:
        columns = columns_by_depth.setdefault(planned.run.layers, {})
        columns[planned.run.name] = _family_figures(planned)

    # Models of equal depth side by side show the growth with the experts.
    sections = [paper_text.page(planned_runs, shares), _TABLE_3_TITLE]
    for layers, columns in columns_by_depth.items():
        sections.append(f"{layers} layers\n{program_figures.side_by_side(columns)}")
    sections.append("\n".join(_family_remarks(planned_runs)))
    sections.append(paper_text.figure_9(figure9.points()))
    return "\n\n".join(sections)


def _family_figures(planned: PlannedRun) -> dict[str, float | None]:
    """Returns the plan's figures, in total and per token of a core, and the paper's."""
    figures: dict[str, float | None] = {}
    figures |= plan_text.figures(planned.plan)

    # Figures per token, because the batch does not grow with the cores.
    times = family.token_times(planned.plan)
    if times is not None:
        figures["us a token of a core"] = 1e6 * times.step_secs
        figures["AllToAll us a token of a core"] = 1e6 * times.all_to_all_secs
        figures["AllToAll % of the layers"] = 100 * times.all_to_all_share
    return figures | _paper_figures(planned.run, planned.plan)


def _paper_figures(run: PaperRun, plan: Plan) -> dict[str, float | None]:
    """Returns the paper's own figures, and their ratio to the plan's."""
    figures: dict[str, float | None] = {}

    # The paper's rate as a share of our roofline.
    if run.steps_per_sec is not None and plan.step.cost is not None:
        figures["paper's % of our steps/s"] = 100 * run.steps_per_sec / plan.steps_per_sec()
    if run.token_secs is not None:
        figures["paper's us a token of a core"] = 1e6 * run.token_secs

    figures["paper's weights B"] = run.weights / 1e9
    figures["paper's steps/s"] = run.steps_per_sec
    figures["paper's core-years"] = run.core_years
    return figures


def _family_remarks(planned_runs: Sequence[PlannedRun]) -> list[str]:
    """Returns the suspicious operations of any program, and the caveats of all plans."""
    # This includes training, because nothing else in these tables reports a step's suspicions.
    remarks = []
    for planned in planned_runs:
        for name, program in planned.plan.programs.items():
            for description in program.suspicious:
                remarks.append(f"suspicious in {name} of {planned.run.name}: {description}")
    if not remarks:
        remarks.append("No program that fits gathers weights, experts or tokens.")

    for planned in planned_runs:
        remarks += [f"{planned.run.name}: {text}" for text in plan_text.caveats(planned.plan)]
    return remarks


# Table 4 and Figure 4c.


def capacities_table(rows: Iterable[capacity.Row]) -> str:
    """Returns the losses of full experts, in percent, by group size and capacity."""
    header = (
        "E",
        "S",
        "C",
        "multiple of",
        "rows a token",
        "first",
        "second",
        "tokens",
        "second, all ask",
        "tokens, all ask",
        "models",
    )
    cells: list[tuple[object, ...]] = [header]
    for row in rows:
        cells.append(
            (
                row.num_experts,
                row.group_size,
                row.capacity,
                row.multiple_of,
                f"{row.rows_per_token:.1f}",
                f"{row.random.first:.2%}",
                f"{row.random.second:.2%}",
                f"{row.random.tokens:.2%}",
                f"{row.all.second:.2%}",
                f"{row.all.tokens:.2%}",
                " ".join(row.models) or "-",
            )
        )
    return f"{_CAPACITY_TITLE}\n{table.text(cells)}"


def operators_table(compiler: str, rows: Iterable[Row]) -> str:
    """Returns Table 4 by one compiler."""
    return "\n".join([compiler, *(operator_text(row) for row in rows)])


def operator_text(row: Row) -> str:
    """Returns the paper's columns and the verdict, then the figures of each program's partition."""
    paper = row.operator
    differences = "; ".join(map(difference_text, row.differences))
    verdict = f"different: {differences}" if differences else "equal"

    # The verdict follows from these figures.
    cells = []
    for d, report in row.measured.items():
        sent = f"{table4.communicated_bytes(report)} bytes"
        cells.append((f"D={d}", _collective_counts(report), f"{report.flops:.0f} flop", sent))
    return (
        f"{paper.name}: total {paper.total_compute}, per partition {paper.compute}, "
        f"communication {paper.communication}: {verdict}\n{table.text(cells, indent='  ')}"
    )


def difference_text(difference: Difference) -> str:
    """Returns one difference of a compiled operator from Table 4."""
    if not isinstance(difference, OtherCollectives):
        growth = f"D^{difference.power:.2f}, not D^{difference.expected_power}"
        return f"{difference.figure} grow as {growth}"

    # The TPU's compiler writes a gather of many parts as a sum.
    since = f"from D={difference.partitions}"
    if difference.used == {"AR"} and "AG" in difference.expected:
        return f"gathers by an AllReduce of parts padded with zeros, {since}"
    used = "+".join(sorted(difference.used)) or "nothing"
    expected = "/".join(sorted(difference.expected)) or "nothing"
    return f"communicates by {used}, not {expected}, {since}"


def figure_4c_table(products: Iterable[WindowedEinsum]) -> str:
    """Returns the table of both forms of Table 4's `AG or CP`, per partition.

    Temporary memory holds neither an argument nor the result.
    """
    cells = [["operator", "n", "form", "collectives", "sent MiB", "temporary MiB"]]
    for product in products:
        report = product.report
        form = "loop" if product.is_loop else "gathered"
        sizes = (table4.communicated_bytes(report), report.temp_bytes)
        mib = [f"{size / 2**20:.0f}" for size in sizes]
        counts = _collective_counts(report)
        cells.append([product.operator.name, str(product.side), form, counts, *mib])
    return table.text(cells, indent="  ")


# OneFlow's signatures, conversions, and sums that are taken later.


def signatures_table(rows: Iterable[sbp.Row]) -> str:
    """Returns each signature of a product or a sum, and the communication of its program."""
    cells = [["operands", "result", "collectives", "bytes"]]
    for row in rows:
        match row.case:
            case sbp.Product(left, right, result):
                operands = f"{_states(left)} x {_states(right)}"
            case sbp.Sum(result):
                operands = f"{_states(result)} + {_states(result)}"
            case sbp.Conversion():
                raise AssertionError(row.case)
        cells.append([operands, _states(result), *_communication(row.report)])
    return table.text(cells, indent="  ")


def conversions_table(rows: Iterable[sbp.Row]) -> str:
    """Returns each conversion, OneFlow's collective for it, and its program's communication."""
    cells = [["from", "to", "OneFlow", "collectives", "bytes"]]
    for row in rows:
        assert isinstance(row.case, sbp.Conversion)
        expected = "none"
        if row.case.expected:
            expected = table4.abbreviation(row.case.expected)
        states = [_states(row.case.start), _states(row.case.end)]
        cells.append([*states, expected, *_communication(row.report)])
    return table.text(cells, indent="  ")


def late_sums_table(rows: Iterable[late_sums.Row]) -> str:
    """Returns the communication of sums taken at once and later, and the ratio of the bytes."""
    cells = [["sum", "at once", "bytes", "later", "bytes", "saved"]]
    for row in rows:
        saved = table4.communicated_bytes(row.at_once) / table4.communicated_bytes(row.later)
        both = [*_communication(row.at_once), *_communication(row.later)]
        cells.append([row.late_sum.name, *both, f"x{saved:.0f}"])
    return table.text(cells, indent="  ")


def _states(states: sbp.States) -> str:
    """Returns S(0) for one axis, and [S(0), B] for two."""
    return states[0] if len(states) == 1 else f"[{', '.join(states)}]"


def _communication(report: CompiledReport) -> list[str]:
    return [_collective_counts(report), str(table4.communicated_bytes(report))]


def _collective_counts(report: CompiledReport) -> str:
    counts = table4.collective_counts(report)
    return " ".join(f"{count} {kind}" for kind, count in counts.items()) or "none"
