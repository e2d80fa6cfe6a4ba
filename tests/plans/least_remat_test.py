"""Plans of experiments with remat=AUTO, from plans made by hand."""

import dataclasses

import pytest

from lingvo_gshard import registry
from lingvo_gshard.layers.numerics import Remat
from lingvo_gshard.model import placement, remats
from lingvo_gshard.plans import commands, kept_plans, least_remat, plan, plan_pictures
from tests.plans import tiny
from tests.xla_plan import samples
from xla_plan.plans import own_process

_AUTO = ("task.encoder.remat=AUTO", "task.decoder.remat=AUTO")


def _request(*settings, programs=(plan.TRAIN,)):
    return tiny.request(programs=programs).changed(settings)


@pytest.fixture
def planned(monkeypatch):
    """Makes plans at once; returns the planned programs with their remats, and a set that fits."""
    made = []
    fitting = set()

    def make(function, request):
        made.append((request.programs, placement.remat(request.params)))
        cost = samples.cost() if fitting & {placement.remat(request.params)} else None
        programs = {name: samples.program(cost, name=name) for name in request.programs}
        changes = {"settings": request.settings, "remat": placement.remat(request.params)}
        return dataclasses.replace(samples.plan(cost), programs=programs, **changes)

    monkeypatch.setattr(own_process, "call", make)
    monkeypatch.setattr(plan_pictures, "draw_step", lambda *_: None)
    monkeypatch.setattr(remats, "_first_by_estimate", lambda *_: 1)
    monkeypatch.setattr(least_remat.loss_products, "of_experiment", lambda params: [])
    return made, fitting


@pytest.mark.slow
def test_the_trial_that_fits_is_the_plan(planned, tmp_path):
    made, fitting = planned
    fitting |= {"ALL_BUT_PRODUCTS", "BLOCK"}
    request = _request(*_AUTO, programs=(plan.TRAIN, plan.DECODE))
    told = []
    for _ in range(2):
        told.clear()
        commands.plan_model(request, tmp_path, False, told.append)

    # Each was compiled once, and decoding for the one that fits.
    assert made == [
        ((plan.TRAIN,), "ALL_BUT_PROJECTIONS"),
        ((plan.TRAIN,), "ALL_BUT_PRODUCTS"),
        ((plan.DECODE,), "ALL_BUT_PRODUCTS"),
    ]
    first, second, text = told
    assert first == "remat=ALL_BUT_PROJECTIONS: does not fit, 20.00 of 15.48 GiB"
    assert second == "remat=ALL_BUT_PRODUCTS: fits, 9.00 GiB, 500 ms a step"
    assert "\ngradients recompute activations by remat=ALL_BUT_PRODUCTS\n" in text

    # The settings of the plan make the same experiment.
    kept = samples.load(tmp_path)
    assert kept.settings[-1] == "task.decoder.remat=ALL_BUT_PRODUCTS"
    assert kept.remat == "ALL_BUT_PRODUCTS" and kept.all_fit
    params = registry.get_params(tiny.MODEL, kept.settings)
    assert placement.remat(params) == "ALL_BUT_PRODUCTS"


def test_a_fixed_stack_stays_as_it_is(planned, tmp_path):
    made, fitting = planned
    text = "BLOCK (encoder), NONE (decoder)"
    fitting |= {"BLOCK (encoder), ALL_BUT_PROJECTIONS (decoder)", text}
    request = _request("task.encoder.remat=BLOCK", "task.decoder.remat=AUTO")
    found = least_remat.resolved(request, tmp_path)
    assert placement.remat(found.params) == text
    assert kept_plans.load_or_make(found, tmp_path).remat == text and len(made) == 2


def test_nothing_fits_and_remedies_follow(planned, tmp_path):
    made, _ = planned
    told = []
    commands.plan_model(_request(*_AUTO), tmp_path, False, told.append)
    tried = [remat for _, remat in made[:3]]
    assert tried == ["ALL_BUT_PROJECTIONS", "ALL_BUT_PRODUCTS", "BLOCK"]
    assert "remat=BLOCK\n" in told[3] and "does NOT fit" in told[3]
    # Whole blocks are computed again already.
    assert [line.split(":")[0].strip() for line in told[5:7]] == [
        "activations in bfloat16",
        "groups of half as many tokens",
    ]


def test_decoding_alone_needs_no_trial(planned, tmp_path):
    made, _ = planned
    found = least_remat.resolved(_request(*_AUTO, programs=(plan.DECODE,)), tmp_path)
    assert found.params.task.decoder.remat is Remat.BLOCK and not made
