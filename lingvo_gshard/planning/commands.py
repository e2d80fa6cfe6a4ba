"""What `plan` does for its flags. Each part of the text is printed as soon as it is known.

Compilations take minutes, so progress is printed between them.
"""

import functools
import pathlib
from collections.abc import Callable, Sequence

from lingvo_gshard.planning import kept_plans, plan_pictures, plan_text
from lingvo_gshard.planning.compiled import own_process, trainer_executables
from lingvo_gshard.planning.estimate.candidates import candidates
from lingvo_gshard.planning.plan import TRAIN
from lingvo_gshard.planning.published import steps, steps_text
from lingvo_gshard.planning.published.steps import Step
from lingvo_gshard.planning.request import Ask, Request
from lingvo_gshard.planning.tables import (
    capacity,
    compilation_growth,
    family,
    language_models,
    late_sums,
    machines,
    paper,
    paper_text,
    remedies,
    report,
    sbp,
    search,
    table4,
)
from lingvo_gshard.planning.tables.family import PlannedRun
from lingvo_gshard.planning.tables.machines import Machine
from lingvo_gshard.planning.tables.trials import Trial
from lingvo_gshard.spmd import topology
from lingvo_gshard.spmd.executable import compile_program

Tell = Callable[[str], None]

# The numbers of partitions D of Table 4. The binary prepares 8 virtual devices.
_OWN_PARTITIONS = (2, 4, 8)
_V3_PARTITIONS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)


def plan_model(request: Request, folder: pathlib.Path, save: bool, tell: Tell) -> None:
    """Tells the plan, and if a training step was asked for that does not fit, what would make it.

    `save` saves the trainer's executables below `folder`. Raises ValueError if a step does not fit
    then or was not asked for, and as kept_plans.load_or_make.
    """
    trains = TRAIN in request.programs
    if save and not trains:
        raise ValueError("--save saves training steps; expected train among --programs.")
    plan = kept_plans.load_or_make(request, folder)
    tell(plan_text.screen(plan))
    if not trains:
        return

    # The trainer's programs are loops of several steps, so they are compiled apart.
    if plan.step.fits:
        if save:
            executables = folder / "executables"
            save_training = functools.partial(trainer_executables.save, folder=executables)
            names = own_process.call(save_training, request)
            tell(report.saved_line(names, executables))
        return

    # Each change is compiled, so that what is suggested is known to help.
    def tell_trial(trial: Trial) -> None:
        tell(report.remedy_line(trial, request))

    tell("what would make it fit, each compiled (--search tries partitionings):")
    remedies.try_remedies(request, folder, tell_trial)
    if save:
        raise ValueError("--save: nothing was saved, as a step does not fit into memory.")


def search_partitioning(request: Request, folder: pathlib.Path, tell: Tell) -> None:
    """Tells each candidate once it is compiled, their ranking, and all programs of the best."""

    def tell_trial(trial: Trial) -> None:
        tell(report.trial_line(trial))

    # The cost model ranks all candidates, the compiler the best few.
    fitting = candidates(request)
    tell(report.candidates_line(len(fitting)))
    trials = search.compile_best(fitting, request, folder, tell_trial)
    tell("\n" + report.ranking(trials))

    # Until here training steps were planned; the best one's other programs may not fit.
    best = trials[0]
    if best.fits:
        tell(report.training_flags_line(best))
        tell("\n" + plan_text.programs(kept_plans.load_or_make(best.request, best.folder)))


def compare_machines(
    ask: Ask, model: str, num_devices: int, folder: pathlib.Path, tell: Tell
) -> None:
    """Tells whether a model fits on each machine of so many devices, then the table."""

    def tell_machine(machine: Machine) -> None:
        tell(report.machine_line(machine))

    planned = machines.plan_machines(ask, model, num_devices, folder, tell_machine)
    tell(report.machines_table(planned))


def plan_family(ask: Ask, folder: pathlib.Path, both_readings: bool, tell: Tell) -> None:
    """Tells whether each of the paper's models fits, then Table 3; draws Figures 7 and 8."""

    def tell_run(planned: PlannedRun) -> None:
        tell(report.planned_run_line(planned))

    planned_runs = family.plan_family(ask, folder, both_readings, tell_run)
    tell(report.family_tables(planned_runs, paper.recomputed(folder)))
    _draw_family(planned_runs, folder)


def show_kept_family(kept: pathlib.Path, folder: pathlib.Path | None, tell: Tell) -> None:
    """Tells Table 3 of plans that plan_family has kept, without a compiler.

    Figures 7 and 8 are drawn into `folder` if there is one. Raises ValueError as
    family.load_family.
    """
    planned_runs = family.load_family(kept)
    tell(report.family_tables(planned_runs, paper.recomputed(kept)))
    if folder is not None:
        _draw_family(planned_runs, folder)


def show_paper(kept: pathlib.Path | None, folder: pathlib.Path | None, tell: Tell) -> None:
    """Tells the paper's figures and tables beside ours, with the plans that are kept, if any.

    Figure 1 is drawn into `folder` if there is one. Raises ValueError as family.load_family.
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
    """Tells whether each published language model fits its machine, then the table of all."""

    def tell_run(planned: language_models.PlannedRun) -> None:
        tell(report.published_run_line(planned))

    planned_runs = language_models.plan_all(ask, folder, tell_run)
    tell(report.language_models_table(planned_runs))


def show_kept_language_models(kept: pathlib.Path, tell: Tell) -> None:
    """Tells the table of language models whose plans are kept, without a compiler.

    Raises ValueError as language_models.load_all.
    """
    tell(report.language_models_table(language_models.load_all(kept)))


def plan_published(ask: Ask, folder: pathlib.Path, tell: Tell) -> None:
    """Tells each published step once it is planned, then the tables; writes folder/bounds.json."""

    def tell_step(step: Step) -> None:
        tell(steps_text.progress_line(step))

    planned = steps.plan_all(ask, folder, tell_step)
    tell(steps_text.tables(planned))
    steps.save_bounds(planned, folder / steps.BOUNDS_JSON)


def show_kept_published(kept: pathlib.Path, folder: pathlib.Path | None, tell: Tell) -> None:
    """Tells the tables of the published steps whose plans are kept, without a compiler.

    bounds.json is written into `folder` if there is one. Raises ValueError as steps.load_all.
    """
    planned = steps.load_all(kept)
    tell(steps_text.tables(planned))
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        steps.save_bounds(planned, folder / steps.BOUNDS_JSON)


def compile_growing(over: str, tell: Tell) -> None:
    """Tells how a training step grows with the cores (`compile`) or the layers (`layers`)."""
    if over == "compile":
        plans = compilation_growth.over_cores()
    else:
        plans = compilation_growth.over_layers()
    tell(report.compilations_table(plans))


def simulate_capacities(tell: Tell) -> None:
    """Tells how many tokens full experts lose, by group size and capacity."""
    tell(report.capacities_table(capacity.rows()))


def compile_operators(tell: Tell) -> None:
    """Tells Table 4 on JAX's own devices and, if its compiler is installed, TPU v3; Figure 4c."""
    # JAX's own devices need no optional package.
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
    """Tells OneFlow's tables on JAX's own devices, then on a topology's if one is named.

    Raises ValueError as topology.devices, before anything is compiled.
    """
    compilers: dict[str, sbp.Compile] = {"JAX's own devices": compile_program}
    if topology_name is not None:
        topology.devices(topology_name)
        compilers[topology_name] = functools.partial(topology.compile_program, name=topology_name)

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
