"""The commands of `plan`. Each part of the text is printed as soon as it is known.

Compilations take minutes, so progress is printed between them.
"""

import functools
import pathlib
from collections.abc import Callable, Mapping

from lingvo_gshard.plans import (
    commands_text,
    kept_plans,
    least_remat,
    machines,
    plan_text,
    remedies,
    search,
    trainer_executables,
)
from lingvo_gshard.plans.candidates import candidates
from lingvo_gshard.plans.machines import Machine
from lingvo_gshard.plans.plan import TRAIN
from lingvo_gshard.plans.request import Request
from lingvo_gshard.plans.trials import Trial
from xla_plan.measured import rates
from xla_plan.measured.rates import MeasuredRates
from xla_plan.plans import own_process
from xla_plan.searches import trials_text

Print = Callable[[str], None]


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
            show(commands_text.saved_line(names, executables))
        return

    # Each change is compiled, so that every suggestion is known to help.
    def show_trial(trial: Trial) -> None:
        show(commands_text.remedy_line(trial, request))

    show("what would make it fit, each compiled (--search tries partitionings):")
    remedies.try_remedies(request, folder, show_trial)
    if save:
        raise ValueError("--save: nothing was saved, as a step does not fit into memory.")


def search_partitioning(request: Request, folder: pathlib.Path, show: Print) -> None:
    """Prints each compiled candidate, the ranking, and all programs of the best candidate."""

    def show_trial(trial: Trial) -> None:
        show(trials_text.trial_line(trial))

    # The cost model ranks all candidates, the compiler the best few.
    fitting = candidates(request)
    show(commands_text.candidates_line(len(fitting)))
    trials = search.compile_best(fitting, request, folder, show_trial)
    show("\n" + trials_text.ranking(trials))

    # So far only training steps were planned; the best candidate's other programs may not fit.
    best = trials[0]
    if best.fits:
        show(commands_text.training_flags_line(best))
        show("\n" + plan_text.programs(kept_plans.load_or_make(best.request, best.folder)))


def compare_machines(
    requests: Mapping[str, Request | None], folder: pathlib.Path, show: Print
) -> None:
    """Prints whether a model fits on each machine, then the table.

    `requests` has the request for each topology, or None if its compiler is not installed.
    """

    def show_machine(machine: Machine) -> None:
        show(commands_text.machine_line(machine))

    planned = machines.plan_machines(requests, folder, show_machine)
    show(commands_text.machines_table(planned))
