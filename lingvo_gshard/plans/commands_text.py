"""Searches for a partitioning, changes that save memory, and machines as text."""

import pathlib
from collections.abc import Iterable, Sequence

from lingvo_gshard.plans import plan_text
from lingvo_gshard.plans.machines import Machine
from lingvo_gshard.plans.plan import Plan
from lingvo_gshard.plans.request import Request
from lingvo_gshard.plans.trials import Trial
from xla_plan.plans import figures as program_figures
from xla_plan.searches import trials_text

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


# Trials: searches for a partitioning and for memory.

_HOURS_PER_YEAR = 365.25 * 24


def candidates_line(count: int) -> str:
    """Returns how many candidates fit, as the head of the trials."""
    return f"{count} candidates fit by the cost model; its best ones, compiled:"


def remedy_line(trial: Trial, request: Request) -> str:
    """Returns the outcome of a change to a request, with the flags that make it."""
    changes = trial.request.settings[len(request.settings) :]
    return f"  {trials_text.trial_line(trial)} ({_flags(changes)})"


def training_flags_line(chosen: Trial) -> str:
    """Returns the flags with which the trainer uses the chosen partitioning."""
    return f"to train so: {_flags(chosen.request.settings)}"


def saved_line(names: Sequence[str], folder: pathlib.Path) -> str:
    """Returns the names of the saved programs of the trainer, and the flag that loads them."""
    noun = "program" if len(names) == 1 else "programs"
    pronoun = "it" if len(names) == 1 else "them"
    return (
        f"saved the compiled {noun} {', '.join(names)} (of train.iterations_per_loop steps, "
        f"compiled besides the plan's one): `trainer --executables={folder}` loads {pronoun}"
    )


def _flags(settings: Iterable[str]) -> str:
    return " ".join(f"--set={setting}" for setting in settings)


# Machines and compilations side by side.


def machine_line(machine: Machine) -> str:
    """Returns whether a model fits on a machine, in one line."""
    if machine.plan is None:
        return f"{machine.topology}: left out, its compiler is not installed"
    return f"{machine.topology}: {plan_text.verdict(machine.plan)}"


def machines_table(machines: Iterable[Machine]) -> str:
    """Returns machines side by side, if their compilers are installed.

    Below are the published steps that the expected times rest on.
    """
    plans = [machine.plan for machine in machines if machine.plan is not None]
    columns = {plan.topology: _machine_figures(plan) for plan in plans}
    return "\n".join([program_figures.side_by_side(columns), *plan_text.expectations(plans)])


def _machine_figures(plan: Plan) -> dict[str, float]:
    figures = plan_text.figures(plan)
    column = {row: figures[name] for name, row in _MACHINE_FIGURES.items() if name in figures}
    if plan.has_step and plan.step.cost is not None:
        column["device-hours for 10^12 tokens"] = _HOURS_PER_YEAR * plan.core_years()
        if plan.factor is not None:
            column["expected device-hours"] = _HOURS_PER_YEAR * plan.core_years(plan.factor.value)
    return column
