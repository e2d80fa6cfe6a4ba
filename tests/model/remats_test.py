"""The least recomputation that fits, in place of AUTO."""

import itertools

import pytest

from lingvo_gshard import registry
from lingvo_gshard.layers.numerics import Remat
from lingvo_gshard.model import remats, step_products
from lingvo_gshard.model.step_memory import StepMemory
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.sharding.layout import Partitioning
from xla_spmd.mesh import Mesh

_MODEL = "toy.MoE8E4L"
_SIZES = ("task.source_vocab_size=64", "task.target_vocab_size=64")
_AUTO = ("task.encoder.remat=AUTO", "task.decoder.remat=AUTO")
_ONE_DEVICE = Partitioning(Mesh.flat(1), ())


def _params(*settings):
    return registry.get_params(_MODEL, (*_SIZES, *settings))


def test_a_fixed_stack_stays_as_it_is():
    params = _params("task.encoder.remat=BLOCK", "task.decoder.remat=AUTO")
    assert remats.automatic(params) == ["decoder"]
    assert remats.settings(params, Remat.NONE) == ["task.decoder.remat=NONE"]
    changed = remats.replaced(params, Remat.NONE).task
    assert (changed.encoder.remat, changed.decoder.remat) == (Remat.BLOCK, Remat.NONE)
    assert params.task.decoder.remat is Remat.AUTO


@pytest.mark.parametrize(("start", "first_fitting"), itertools.product(range(4), range(5)))
def test_the_first_that_fits_is_found_from_any_estimate(monkeypatch, start, first_fitting):
    monkeypatch.setattr(remats, "_first_by_estimate", lambda *_: start)
    compiled = []

    def fits(remat):
        compiled.append(remat)
        return Remat.order().index(remat) >= first_fitting

    found = remats.least(_params(*_AUTO), lambda params: [], _ONE_DEVICE, 1.0, fits)
    assert found is (Remat.order()[first_fitting] if first_fitting < 4 else None)
    assert len(set(compiled)) == len(compiled)
    if start == first_fitting:
        assert compiled == [found, *Remat.order()[start - 1 : start]]


@pytest.mark.slow
def test_the_estimate_decides_which_is_compiled_first():
    params = _params(*_AUTO)
    products = step_products.products_of(params.task, params.input.cls.batch_specs(params.input))
    memory = StepMemory(params, TaskModel(_params(), _ONE_DEVICE), products)
    for remat in Remat.order():
        capacity = memory.num_bytes(_ONE_DEVICE, {"encoder": remat, "decoder": remat})
        compiled = []
        remats.least(params, lambda _: products, _ONE_DEVICE, capacity, compiled.append)
        assert compiled[0] is remat


def test_a_pipeline_has_no_choice():
    stages = [f"task.{stack}.stages=2" for stack in ("encoder", "decoder")]
    compiled = []
    params = _params(*_AUTO, *stages)
    assert remats.least(params, None, _ONE_DEVICE, 1.0, compiled.append) is None
    assert compiled == [Remat.BLOCK]
