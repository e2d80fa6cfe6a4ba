"""The planner and the flops do not depend on the names of layers' weights."""

import collections
import itertools

import pytest

from lingvo_gshard import registry
from lingvo_gshard.layers.dispatch import Dispatch
from lingvo_gshard.layers.numerics import Remat
from lingvo_gshard.model import placement
from lingvo_gshard.model.flops import step_flops
from lingvo_gshard.model.forward_pass import forward_products
from lingvo_gshard.model.step_memory import StepMemory
from lingvo_gshard.model.step_products import products_of
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.plans import candidates
from lingvo_gshard.plans.cost_model import CostModel
from lingvo_gshard.plans.request import Request
from lingvo_gshard.runs import loss_products
from lingvo_gshard.sharding.layout import Partitioning
from tests.docs import scripts
from tests.model import renamed
from xla_plan.machines import topology
from xla_plan.machines.hardware import GENERATIONS
from xla_plan.machines.networks import Torus
from xla_spmd.mesh import Mesh

_SIZES = ("task.source_vocab_size=64", "task.target_vocab_size=64")
_CORES = 8
_PLACES = tuple(chip for chip in itertools.product(range(2), range(2)) for _ in range(2))


@pytest.fixture(scope="module", autouse=True)
def _in_this_process():
    """Classes of a test cannot be sent to another process; v3:2x2 without the TPU's library."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topology, "places", lambda name: _PLACES)
        patch.setattr(loss_products, "of_experiment", _products)
        yield


def _products(params):
    return products_of(params.task, params.input.cls.batch_specs(params.input))


def _documented_layer():
    """Returns the layer of docs/own_experiment.md, whose gate is called wg."""
    names = {"__name__": __name__}
    exec(scripts.files_of_own_experiment()["my_layers.py"], names)
    return names["GatedFeedForward"]


def _params(model, change=lambda task: task, *settings):
    params = registry.get_params(model, (*_SIZES, *settings))
    params.task = change(params.task)
    return params


def _with_documented_layer(task):
    changed = task.Copy()
    layer = _documented_layer().Params().Set(hidden_dim=changed.encoder.dense.hidden_dim)
    for stack in (changed.encoder, changed.decoder):
        stack.dense = layer.Copy()
    return changed


def _estimates(params, products):
    """Returns the (bytes, seconds) of steps with several tables and remats."""
    task_model = TaskModel(params, Partitioning(Mesh.flat(1), ()))
    memory = StepMemory(params, task_model, products)
    costs = CostModel(params, task_model, products, Torus(GENERATIONS["v3"], _PLACES))
    estimates = []
    for sharding in ("BG:d", "BGE:d", "BG:d,m:d", "HNV:d"):
        partitioning = Partitioning.parse(Mesh.flat(_CORES), sharding)
        for remat in Remat.order():
            num_bytes = memory.num_bytes(partitioning, dict.fromkeys(("encoder", "decoder"), remat))
            estimates.append((num_bytes, costs.estimate(partitioning, remat).step))
    return estimates


@pytest.mark.slow
@pytest.mark.parametrize(
    "dispatch",
    [
        pytest.param(dispatch, marks=[] if dispatch is Dispatch.EINSUM else pytest.mark.slow)
        for dispatch in Dispatch
    ],
)
def test_names_of_layers_do_not_change_estimates_and_flops(dispatch):
    settings = [f"task.{side}.moe.dispatch={dispatch.name}" for side in ("encoder", "decoder")]
    known = _params("toy.MoE8E4L", lambda task: task, *settings)
    other = _params("toy.MoE8E4L", renamed.task, *settings)

    paths = TaskModel(other, Partitioning(Mesh.flat(1), ())).state_spec.theta.FlattenItems()
    own_paths = TaskModel(known, Partitioning(Mesh.flat(1), ())).state_spec.theta.FlattenItems()
    assert {path for path, _ in paths} != {path for path, _ in own_paths}
    products = _products(known)
    assert _products(other) == products and step_flops(products) > 0
    # Weights and slots are added up in another order.
    estimates = zip(_estimates(other, products), _estimates(known, products), strict=True)
    for estimate, expected in estimates:
        assert estimate == pytest.approx(expected)


@pytest.mark.slow
def test_a_search_ranks_the_same_layers_with_other_names_alike():
    found = []
    for change in (lambda task: task, renamed.task):
        params = _params("toy.Dense4L", change)
        partitioning = placement.partitioning(params, _CORES)
        request = Request("toy.Dense4L", _SIZES, params, "v3:2x2", partitioning)
        ranked = candidates.candidates(request)
        found.append({candidate.settings: candidate.secs for candidate in ranked})
    assert found[1] == pytest.approx(found[0])
    assert len(found[0]) > 50


@pytest.mark.slow
@pytest.mark.parametrize(("model", "num_dispatches"), [("toy.MoE8E4L", 4), ("toy.Dense4L", 0)])
def test_the_documented_layer_is_planned(model, num_dispatches):
    """It has three products in place of two, and a router's product is not among them."""
    params = _params(model, _with_documented_layer)
    equations = collections.Counter(
        str(product.einsum) for product in forward_products(_products(params))
    )
    num_dense = 4 if model == "toy.Dense4L" else 2
    assert equations["BLM,MH->BLH"] == 2 * num_dense
    assert equations["BLH,HM->BLM"] == num_dense
    assert equations["GSEC,GSM->GECM"] + equations["GSEC,GECM->GSM"] == num_dispatches
    assert equations["GSM,M_->GS_"] == num_dispatches / 2

    # The third product of M and H is the gate's, in the encoder's layers and the decoder's.
    batch = params.input
    tokens = batch.batch_size * (batch.source_len + batch.target_len)
    sizes = params.task.dim * params.task.encoder.dense.hidden_dim
    added = step_flops(_products(params)) - step_flops(_products(_params(model)))
    assert added == pytest.approx(6 * tokens * num_dense / 2 * sizes)

    partitioning = placement.partitioning(params, _CORES)
    request = Request(model, _SIZES, params, "v3:2x2", partitioning)
    assert len(candidates.candidates(request)) > 50
