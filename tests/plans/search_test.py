"""Candidates that are compiled, and how they compare."""

import pytest

from lingvo_gshard.plans import kept_plans, search
from tests.plans import tiny
from tests.xla_plan import samples


@pytest.fixture
def compile_best(monkeypatch, tmp_path):
    """Compiles the best candidates with plans of the given steps in turn; None does not fit."""

    def compile_with(*step_secs):
        remaining = list(step_secs)

        def planned(request, folder):
            secs = remaining.pop(0)
            return samples.plan(None if secs is None else samples.cost(secs))

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
