"""The commands of plan_tables. Each part of a table is printed as soon as it is known."""

import functools
import pathlib
from collections.abc import Callable, Sequence

from lingvo_gshard.plans import (
    plan_pictures,
    topology_executable,
)
from lingvo_gshard.plans.request import Ask
from lingvo_gshard.spmd.executable import compile_program
from repro.published import steps, steps_text
from repro.published.steps import Step
from repro.tables import (
    capacity,
    compilation_growth,
    family,
    language_models,
    late_sums,
    mpmd,
    paper,
    paper_text,
    report,
    sbp,
    table4,
)
from repro.tables.family import PlannedRun
from xla_plan.machines import topology

Tell = Callable[[str], None]

# The numbers of partitions D for Table 4. The binary prepares 8 virtual devices.
_OWN_PARTITIONS = (2, 4, 8)
_V3_PARTITIONS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)


def plan_family(ask: Ask, folder: pathlib.Path, both_readings: bool, tell: Tell) -> None:
    """Prints whether each of the paper's models fits, then Table 3; draws Figures 7 and 8."""

    def tell_run(planned: PlannedRun) -> None:
        tell(report.planned_run_line(planned))

    planned_runs = family.plan_family(ask, folder, both_readings, tell_run)
    tell(report.family_tables(planned_runs, paper.recomputed(folder)))
    _draw_family(planned_runs, folder)


def show_kept_family(kept: pathlib.Path, folder: pathlib.Path | None, tell: Tell) -> None:
    """Prints Table 3 from stored plans of plan_family, without a compiler.

    Draws Figures 7 and 8 into `folder`, unless it is None. Raises ValueError if `kept` contains no
    plan, or if one is damaged, outdated or of another model.
    """
    planned_runs = family.load_family(kept)
    tell(report.family_tables(planned_runs, paper.recomputed(kept)))
    if folder is not None:
        _draw_family(planned_runs, folder)


def show_paper(kept: pathlib.Path | None, folder: pathlib.Path | None, tell: Tell) -> None:
    """Prints the paper's figures and tables beside ours, with the stored plans in `kept`, if any.

    Draws Figure 1 into `folder`, unless it is None. Raises ValueError if `kept` contains no plan,
    or if one is damaged, outdated or of another model.
    """
    rows = paper.rows(kept)
    tell(paper_text.paper(rows, paper.recomputed(kept)))
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        paper.draw_figure_1(rows, folder / "figure_1.png")


def _draw_family(planned_runs: Sequence[PlannedRun], folder: pathlib.Path) -> None:
    """Draws Figures 7 and 8, with a bar for each model."""
    folder.mkdir(parents=True, exist_ok=True)
    plans = {planned.run.name: planned.plan for planned in planned_runs}
    plan_pictures.draw(plans, folder / "figure_7.png", folder / "figure_8.png")


def plan_language_models(ask: Ask, folder: pathlib.Path, tell: Tell) -> None:
    """Prints whether each published language model fits its machine, then the table of all."""

    def tell_run(planned: language_models.PlannedRun) -> None:
        tell(report.published_run_line(planned))

    planned_runs = language_models.plan_all(ask, folder, tell_run)
    tell(report.language_models_table(planned_runs))


def show_kept_language_models(kept: pathlib.Path, tell: Tell) -> None:
    """Prints the table of language models from stored plans, without a compiler.

    Raises ValueError if `kept` contains no plan, or if one is damaged, outdated or of another
    model.
    """
    tell(report.language_models_table(language_models.load_all(kept)))


def plan_published(ask: Ask, folder: pathlib.Path, tell: Tell) -> None:
    """Prints each published step once it is planned, then the tables; writes folder/bounds.json."""

    def tell_step(step: Step) -> None:
        tell(steps_text.progress_line(step))

    planned = steps.plan_all(ask, folder, tell_step)
    tell(steps_text.tables(planned))
    steps.save_bounds(planned, folder / steps.BOUNDS_JSON)


def show_kept_published(kept: pathlib.Path, folder: pathlib.Path | None, tell: Tell) -> None:
    """Prints the tables of the published steps from stored plans, without a compiler.

    Writes bounds.json into `folder`, unless it is None. Raises ValueError if `kept` contains no
    plan, or if one is damaged, outdated or of another model.
    """
    planned = steps.load_all(kept)
    tell(steps_text.tables(planned))
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        steps.save_bounds(planned, folder / steps.BOUNDS_JSON)


def compile_growing(over: str, tell: Tell) -> None:
    """Prints how a training step grows with the cores (`compile`) or the layers (`layers`)."""
    if over == "compile":
        plans = compilation_growth.over_cores()
    else:
        plans = compilation_growth.over_layers()
    tell(report.compilations_table(plans))


def compile_each_device(tell: Tell) -> None:
    """Prints Figure 2: the cost of one program for D devices, and of one for each device."""
    tell("CPU seconds to compile an MoE layer for D virtual devices of a CPU")
    for row in mpmd.over_devices():
        tell(report.mpmd_line(row))


def simulate_capacities(tell: Tell) -> None:
    """Prints how many tokens full experts drop, by group size and capacity."""
    tell(report.capacities_table(capacity.rows()))


def compile_operators(tell: Tell) -> None:
    """Prints Table 4 for JAX's own devices and, with its compiler, for TPU v3; also Figure 4c."""
    # JAX's own devices do not need an optional package.
    rows = table4.measure(compile_program, _OWN_PARTITIONS)
    tell(report.operators_table("On JAX's own devices", rows))

    if not topology.is_installed("v3"):
        tell("Without TPUs and Figure 4c; `make setup-tpu` installs their compiler.")
        return

    rows = table4.measure(table4.compile_for_v3, _V3_PARTITIONS)
    tell(report.operators_table("On TPU v3", rows))
    tell("AG or CP (Figure 4c), operands of n x n on 8 cores of TPU v3: the loop needs less memory")
    tell(report.figure_4c_table(table4.figure_4c()))


def compile_states(topology_name: str | None, tell: Tell) -> None:
    """Prints OneFlow's tables for JAX's own devices, then for a topology if one is named.

    Raises ValueError if the topology is unknown or lacks its compiler, before anything is compiled.
    """
    compilers: dict[str, sbp.Compile] = {"JAX's own devices": compile_program}
    if topology_name is not None:
        topology.devices(topology_name)
        compilers[topology_name] = functools.partial(
            topology_executable.compile_program, name=topology_name
        )

    for where, compile in compilers.items():
        tell(f"On 8 of {where}: signatures, along one axis of 8")
        tell(report.signatures_table(sbp.measure([*sbp.products(1), *sbp.sums()], compile)))
        tell("Signatures of the product, along axes of 2 and 4")
        tell(report.signatures_table(sbp.measure(sbp.products(2), compile)))

        tell("Conversions of a matrix, along one axis of 8 and along axes of 2 and 4")
        conversions = [*sbp.CONVERSIONS, *sbp.CONVERSIONS_ALONG_TWO_AXES]
        tell(report.conversions_table(sbp.measure(conversions, compile)))

        tell("Sums taken at once, and later")
        tell(report.late_sums_table(late_sums.measure(compile)))
