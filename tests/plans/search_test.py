"""Candidates that are compiled, and how they compare."""

import pytest

from lingvo_gshard.plans import kept_plans, search
from tests.plans import tiny
from tests.xla_plan import samples


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Compiles the best candidates with plans of the given steps in turn; None does not fit."""

    def compile_with(*step_secs):
        remaining = list(step_secs)

        def planned(request, folder):
            secs = remaining.pop(0)
            return samples.plan(None if secs is None else samples.cost(secs))

        monkeypatch.setattr(kept_plans, "load_or_make", planned)
        trials = list(search.compiled(tiny.candidates(), tiny.request(), tmp_path))
        assert not remaining
        return trials

    return compile_with


def test_the_first_candidates_are_compiled(compiled):
    trials = compiled(None, 0.75, 0.5, 1.0, 1.5, 0.25)
    assert [trial.secs.step for trial in trials] == [float("inf"), 0.75, 0.5, 1.0, 1.5, 0.25]

    # The first layout did not fit with its best schedule, so it has the next one as well.
    candidates = tiny.candidates()
    chosen = [candidates[i] for i in (0, 1, 2, 4, 6, 8)]
    assert [trial.request.settings for trial in trials] == [each.settings for each in chosen]
    assert [trial.estimated_secs for trial in trials] == [each.secs for each in chosen]


def test_one_of_each_mesh_and_table_that_fits_is_compiled(compiled):
    trials = compiled(*[0.5] * 6)
    assert len({trial.request.settings[:2] for trial in trials}) == 6
