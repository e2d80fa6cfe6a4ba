"""The commands of `plan`. Each part of the text is printed as soon as it is known.

Compilations take minutes, so progress is printed between them.
"""

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence

from lingvo_gshard.plans import (
    kept_plans,
    least_remat,
    plan_text,
    remedies,
    search,
    trainer_executables,
)
from lingvo_gshard.plans.candidates import candidates
from lingvo_gshard.plans.plan import TRAIN, Plan
from lingvo_gshard.plans.request import Request
from xla_plan.measured import rates
from xla_plan.measured.rates import MeasuredRates
from xla_plan.plans import figures, own_process
from xla_plan.searches import trials_text

Print = Callable[[str], None]

# The figures of a plan that compare machines, and their names in that table.
_MACHINE_FIGURES = {
    "cores": "devices",
    "fits": "fits",
    "peak GiB": "peak GiB",
    "capacity GiB": "capacity GiB",
    "roofline step ms": "step ms at the roofline",
    "expected ms": "expected step ms",
    "expected, at least ms": "at least",
    "expected, at most ms": "at most",
    "roofline compute ms": "compute ms",
    "roofline memory ms": "memory ms",
    "roofline network ms": "network ms",
    "M tokens/s": "M tokens/s",
}

_HOURS_PER_YEAR = 365.25 * 24


def plan_model(
    request: Request,
    folder: pathlib.Path,
    save: bool,
    show: Print,
    measured: MeasuredRates | None = None,
) -> None:
    """Prints the plan. If the training step does not fit, also prints changes that would help.

    If a stack has remat=AUTO, first prints each Remat that is tried in its place. `save` saves the
    trainer's executables below `folder`, for which the training step must be among the programs.
    `measured` gives the programs one more time. Raises ValueError if a step that is to be saved
    does not fit, and if a process that compiles a program dies.
    """
    trains = TRAIN in request.programs
    assert trains or not save, "plan_model checks --save."
    request = least_remat.resolved(
        request, folder, lambda trial: show(trials_text.trial_line(trial))
    )
    plan = kept_plans.load_or_make(request, folder)
    show(plan_text.screen(plan))
    for name, program in plan.programs.items():
        if measured is not None and program.cost is not None:
            show(f"{name} {rates.described(program.cost, measured)}")
    if not trains:
        return

    # The trainer's programs are loops of several steps, so they are compiled separately.
    if plan.step.fits:
        if save:
            executables = folder / "executables"
            save_training = functools.partial(trainer_executables.save, folder=executables)
            names = own_process.call(save_training, request)
            show(_saved_line(names, executables))
        return

    # Each change is compiled, so that every suggestion is known to help.
    show("what would make it fit, each compiled (gshard plan search tries partitionings):")
    for trial in remedies.trials_of(request, folder):
        changes = trial.request.settings[len(request.settings) :]
        show(f"  {trials_text.trial_line(trial)} ({_flags(changes)})")
    if save:
        raise ValueError("--save: nothing was saved, as a step does not fit into memory.")


def search_partitioning(request: Request, folder: pathlib.Path, show: Print) -> None:
    """Prints each compiled candidate, the ranking, and all programs of the best candidate."""
    # The cost model ranks all candidates, the compiler the best few.
    fitting = candidates(request)
    show(f"{len(fitting)} candidates fit by the cost model; its best ones, compiled:")
    trials = []
    for trial in search.compiled(fitting, request, folder):
        show(trials_text.trial_line(trial))
        trials.append(trial)
    trials.sort(key=lambda trial: trial.secs.step)
    show("\n" + trials_text.ranking(trials))

    # So far only training steps were planned; the best candidate's other programs may not fit.
    best = trials[0]
    if best.fits:
        show(f"to train so: {_flags(best.request.settings)}")
        show("\n" + plan_text.programs(kept_plans.load_or_make(best.request, best.folder)))


def compare_machines(
    requests: Mapping[str, Request | None], folder: pathlib.Path, show: Print
) -> None:
    """Prints whether a model fits on each machine, then the table.

    `requests` has the request for each topology, or None if its compiler is not installed. Each
    plan has its own folder in `folder`.
    """
    plans = []
    for topology, request in requests.items():
        if request is None:
            show(f"{topology}: left out, its compiler is not installed")
            continue

        machine_folder = folder / topology.replace(":", "_")
        resolved = least_remat.resolved(request, machine_folder)
        plan = kept_plans.load_or_make(resolved, machine_folder)
        show(f"{topology}: {plan_text.verdict(plan)}")
        plans.append(plan)

    # Below the table are the published steps that the expected times rest on.
    columns = {plan.topology: _machine_figures(plan) for plan in plans}
    show("\n".join([figures.side_by_side(columns), *plan_text.expectations(plans)]))


def _saved_line(names: Sequence[str], folder: pathlib.Path) -> str:
    """Returns the names of the saved programs of the trainer, and the flag that loads them."""
    noun = "program" if len(names) == 1 else "programs"
    pronoun = "it" if len(names) == 1 else "them"
    return (
        f"saved the compiled {noun} {', '.join(names)} (of train.iterations_per_loop steps, "
        f"compiled besides the plan's one): `trainer --executables={folder}` loads {pronoun}"
    )


def _flags(settings: Sequence[str]) -> str:
    """Returns the flags with which the trainer uses some settings."""
    return " ".join(f"--set={setting}" for setting in settings)


def _machine_figures(plan: Plan) -> dict[str, float]:
    """Returns the figures of _MACHINE_FIGURES, and the device-hours of a training."""
    named = plan_text.figures(plan)
    column = {row: named[name] for name, row in _MACHINE_FIGURES.items() if name in named}
    if plan.has_step and plan.step.cost is not None:
        column["device-hours for 10^12 tokens"] = _HOURS_PER_YEAR * plan.core_years()
        if plan.factor is not None:
            column["expected device-hours"] = _HOURS_PER_YEAR * plan.core_years(plan.factor.value)
    return column
