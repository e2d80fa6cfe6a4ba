"""Alternatives to a request, and the reason if one of them cannot be planned."""

import pytest

from lingvo_gshard.plans import kept_plans, plan, trials
from tests.plans import tiny
from tests.xla_plan import samples


@pytest.fixture
def planned(monkeypatch):
    """Makes plans at once; returns the requests, by the names of their folders."""
    requests = {}

    def load_or_make(request, folder):
        requests[folder.name] = request
        if "input.batch_size=4" in request.settings:
            raise ValueError("B=4 is not divisible by the 8 partitions\nand more")
        return samples.plan(samples.cost(), settings=request.settings)

    monkeypatch.setattr(kept_plans, "load_or_make", load_or_make)
    return requests


def test_a_trial_is_a_training_step_with_more_settings(planned, tmp_path):
    request = tiny.request(settings=("train.seed=3",), programs=plan.PROGRAMS)
    settings = ("mesh=data:8", "sharding=BG:data")
    trial = trials.compile_trial(request, settings, tmp_path)

    assert trial.name == "mesh=data:8 sharding=BG:data"
    assert trial.folder == tmp_path / "mesh_data_8_sharding_BG_data"
    assert trial.fits and trial.secs.step == pytest.approx(0.5)
    assert planned[trial.folder.name].programs == (plan.TRAIN,)

    # The trial's own request is for the same programs, which the best one is planned with.
    assert trial.request.programs == plan.PROGRAMS
    assert trial.request.settings == ("train.seed=3", *settings)
    assert trial.request.partitioning.mesh.shape == {"data": 8}


def test_a_trial_may_have_a_name(planned, tmp_path):
    trial = trials.compile_trial(tiny.request(), ["task.dim=4"], tmp_path, "half: of M, (small)")
    assert trial.name == "half: of M, (small)"
    assert list(planned) == [trial.folder.name] == ["half_of_M_small"]


def test_a_refusal_has_its_reason_in_one_line(planned, tmp_path):
    trial = trials.compile_trial(tiny.request(), ["input.batch_size=4"], tmp_path)
    assert trial.plan is None and not trial.fits
    assert trial.refusal == "B=4 is not divisible by the 8 partitions"
    assert trial.secs.step == float("inf")
