"""Trials as text: a line for each, their ranking, and why the first is the best."""

from collections.abc import Sequence

from xla_plan.searches import agreement, trials
from xla_plan.searches.agreement import Agreement
from xla_plan.searches.trials import Trial
from xla_spmd.files import table


def trial_line(trial: Trial, call: str = "step") -> str:
    """Returns the outcome of a trial in one line; `call` is the word for a call of its program."""
    if trial.plan is None:
        return f"{trial.name}: refused: {trial.refusal}"

    # Memory decides, then time.
    memory = trial.plan.memory_gib
    if not trial.fits:
        return f"{trial.name}: does not fit, {memory.peak:.2f} of {memory.capacity:.2f} GiB"
    line = f"{trial.name}: fits, {memory.peak:.2f} GiB, {_millis(trial.secs.step)} ms a {call}"
    if trial.estimated_secs is None:
        return line
    return f"{line}, {_millis(trial.estimated_secs)} ms estimated"


def ranking(tried: Sequence[Trial], given: Trial | None = None) -> str:
    """Returns the trials that fit, in their order, the others, and why the first is the best.

    The first is chosen if it is faster than `given`, the program before the search, or if `given`
    is None.
    """
    listed = tried if given is None else [given, *tried]
    rows = [["partitioning", "GiB", "step ms", "compute", "memory", "network", "estimated ms"]]
    for trial in listed:
        if trial.plan is not None and trial.fits:
            secs = trial.secs
            times = (secs.step, secs.compute, secs.memory, secs.network)
            millis = [_millis(value) for value in times]
            estimated = "-" if trial.estimated_secs is None else _millis(trial.estimated_secs)
            rows.append([trial.name, f"{trial.plan.memory_gib.peak:.2f}", *millis, estimated])

    # Below the table, the trials that failed, and whether the estimates can be trusted.
    lines = [table.text(rows)]
    lines += [trial_line(trial) for trial in listed if not trial.fits]
    steps = []
    for trial in tried:
        if trial.fits and trial.estimated_secs is not None:
            steps.append((trial.estimated_secs, trial.secs.step))
    if len(steps) > 1:
        lines.append(agreement_line(agreement.of(steps)))
    lines.append(f"chosen: {_choice([trial for trial in tried if trial.fits], given)}")
    return "\n".join(lines)


def agreement_line(found: Agreement) -> str:
    """Returns how well the estimated steps predict the compiled ones."""
    return (
        f"the estimated steps: {found.least_ratio:.2f} to {found.greatest_ratio:.2f} of the "
        f"compiled ones, rank correlation {table.number(found.rank_correlation)} over "
        f"{found.num_candidates} candidates"
    )


def _choice(fitting: Sequence[Trial], given: Trial | None) -> str:
    """Returns the first trial, and how much it gains over the given program or the second."""
    if not fitting:
        return "nothing fits."
    best = fitting[0]
    second = given
    if given is None:
        if len(fitting) == 1:
            return f"{best.name}, the only one that fits."
        second = fitting[1]

    assert second is not None
    if not second.fits:
        return f"{best.name}, which fits where {second.name} does not."
    if second is given and best.secs.step >= second.secs.step:
        return f"nothing is faster than {second.name}."
    gain = trials.gain(best.secs, second.secs)
    return (
        f"{best.name}: {gain.times_as_fast:.2f} times as fast as {second.name} at the roofline, "
        f"most of it {gain.resource} time ({_millis(gain.saved_secs)} ms less)."
    )


def _millis(secs: float) -> str:
    return f"{1e3 * secs:.4g}"
