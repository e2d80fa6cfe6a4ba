"""Trials of a search, their ranking, and how well estimates predict them."""

import math

import pytest

from tests.xla_plan import samples
from xla_plan.cost.step_cost import Times
from xla_plan.searches import agreement, trials, trials_text
from xla_plan.searches.trials import Trial


def _trial(name, cost, **fields):
    """Returns a trial whose call has that cost; without a cost it does not fit."""
    return Trial(name=name, plan=samples.program(cost), **fields)


def test_a_trial_fits_or_does_not_or_is_refused():
    fast = _trial("a", samples.cost())
    assert fast.fits and trials_text.trial_line(fast) == "a: fits, 9.00 GiB, 500 ms a step"
    estimated = _trial("a", samples.cost(), estimated_secs=0.25)
    line = "a: fits, 9.00 GiB, 500 ms a call, 250 ms estimated"
    assert trials_text.trial_line(estimated, "call") == line

    unfit = _trial("b", None)
    assert not unfit.fits and unfit.secs.step == math.inf
    assert trials_text.trial_line(unfit) == "b: does not fit, 20.00 of 15.48 GiB"
    refused = Trial(name="c", plan=None, refusal="E=7 is not divisible")
    assert not refused.fits and refused.secs.step == math.inf
    assert trials_text.trial_line(refused) == "c: refused: E=7 is not divisible"


def test_the_choice_is_explained_by_the_second():
    best = _trial("fast", samples.cost(0.25, 0.05), estimated_secs=0.2)
    second = _trial("slow", samples.cost(0.5, 0.3), estimated_secs=0.6)
    head, first, _, unfit, agreed, choice = trials_text.ranking(
        [best, second, _trial("big", None)]
    ).splitlines()
    assert head.split()[:2] == ["partitioning", "GiB"]
    assert first.split() == ["fast", "9.00", "250", "100", "100", "50", "200"]
    assert unfit == "big: does not fit, 20.00 of 15.48 GiB"
    assert agreed == (
        "the estimated steps: 0.80 to 1.20 of the compiled ones, rank correlation 1.00 over 2 "
        "candidates"
    )
    assert choice == (
        "chosen: fast: 2.00 times as fast as slow at the roofline, most of it network time "
        "(250 ms less)."
    )


@pytest.mark.parametrize(
    ("tried", "given", "choice"),
    [
        ([0.5, None], "none", "fast, the only one that fits."),
        ([None], "none", "nothing fits."),
        ([0.5], 1.0, "fast: 2.00 times as fast as it was given at the roofline, most of it"),
        ([0.5, 0.5], 0.5, "nothing is faster than it was given."),
        ([0.5], None, "fast, which fits where it was given does not."),
        ([None], 0.5, "nothing fits."),
    ],
)
def test_the_first_must_be_faster_than_the_given_program(tried, given, choice):
    trials_of = [_trial("fast", secs and samples.cost(secs)) for secs in tried]
    before = None if given == "none" else _trial("it was given", given and samples.cost(given))
    last = trials_text.ranking(trials_of, before).splitlines()[-1]
    assert last.startswith(f"chosen: {choice}")


def test_the_gain_is_of_the_resource_where_most_is_saved():
    best = Times(compute=0.2, memory=0.5, network=0.1, step=0.6)
    second = Times(compute=0.2, memory=0.4, network=0.5, step=0.9)
    gain = trials.gain(best, second)
    assert gain.resource == "network"
    assert gain.times_as_fast == pytest.approx(1.5) and gain.saved_secs == pytest.approx(0.4)


def test_the_agreement_of_estimated_and_compiled_steps():
    found = agreement.of([(1.0, 2.0), (2.0, 1.0), (3.0, 3.0)])
    assert found.num_candidates == 3
    assert found.rank_correlation == pytest.approx(0.5)
    assert (found.least_ratio, found.greatest_ratio) == (0.5, 2.0)


def test_equal_steps_have_no_order():
    """Ranks 0.5, 0.5, 2 and 0, 1, 2; a constant does not correlate."""
    steps = [(1.0, 1.0), (1.0, 2.0), (2.0, 3.0)]
    for order in (steps, steps[::-1]):
        assert agreement.of(order).rank_correlation == pytest.approx(1.5 / math.sqrt(1.5 * 2))
    for equal in ([(1.0, 2.0), (1.0, 3.0)], [(1.0, 2.0), (3.0, 2.0)], [(1.0, 1.0)]):
        assert agreement.of(equal).rank_correlation is None
