"""Candidates that are compiled, and how they compare."""

import math

import pytest

from lingvo_gshard.planning import kept_plans
from lingvo_gshard.planning.estimate import agreement
from lingvo_gshard.planning.plan import Times
from lingvo_gshard.planning.tables import search
from tests.planning import plans, tiny


@pytest.fixture
def compile_best(monkeypatch, tmp_path):
    """Compiles the best candidates with plans of such steps in turn; None does not fit."""

    def compile_with(*step_secs):
        remaining = list(step_secs)

        def planned(request, folder):
            secs = remaining.pop(0)
            return plans.plan(None if secs is None else plans.cost(secs))

        monkeypatch.setattr(kept_plans, "load_or_make", planned)
        told = []
        ranked = search.compile_best(tiny.candidates(), tiny.request(), tmp_path, told.append)
        assert not remaining
        return ranked, told

    return compile_with


def test_the_first_candidates_are_compiled_and_ranked(compile_best):
    ranked, told = compile_best(None, 0.75, 0.5, 1.0, 1.5, 0.25)
    assert [trial.secs.step for trial in ranked] == [0.25, 0.5, 0.75, 1.0, 1.5, float("inf")]

    # The first layout did not fit with its best schedule, so it has the next one as well.
    candidates = tiny.candidates()
    compiled = [candidates[i] for i in (0, 1, 2, 4, 6, 8)]
    assert [trial.request.settings for trial in told] == [each.settings for each in compiled]
    assert [trial.estimated_secs for trial in told] == [each.secs for each in compiled]


def test_one_of_each_mesh_and_table_that_fits_is_compiled(compile_best):
    ranked, _ = compile_best(*[0.5] * 6)
    assert len({trial.request.settings[:2] for trial in ranked}) == 6


def test_the_agreement_of_estimated_and_compiled_steps():
    found = agreement.of([(1.0, 2.0), (2.0, 1.0), (3.0, 3.0)])
    assert found.num_candidates == 3
    assert found.rank_correlation == pytest.approx(0.5)
    assert (found.least_ratio, found.greatest_ratio) == (0.5, 2.0)


def test_equal_steps_have_no_order():
    """Ranks 0.5, 0.5, 2 and 0, 1, 2; without variance there is no correlation."""
    steps = [(1.0, 1.0), (1.0, 2.0), (2.0, 3.0)]
    for order in (steps, steps[::-1]):
        assert agreement.of(order).rank_correlation == pytest.approx(1.5 / math.sqrt(1.5 * 2))
    for equal in ([(1.0, 2.0), (1.0, 3.0)], [(1.0, 2.0), (3.0, 2.0)], [(1.0, 1.0)]):
        assert agreement.of(equal).rank_correlation is None


def test_the_gain_is_that_of_the_resource_where_most_is_saved():
    best = Times(compute=0.2, memory=0.5, network=0.1, step=0.6)
    second = Times(compute=0.2, memory=0.4, network=0.5, step=0.9)
    gain = search.gain(best, second)
    assert gain.resource == "network"
    assert gain.times_as_fast == pytest.approx(1.5) and gain.saved_secs == pytest.approx(0.4)
