"""Estimates of the cost model against hand-worked ones."""

import itertools

import pytest

from lingvo_gshard import registry
from lingvo_gshard.layers.repeat import Remat
from lingvo_gshard.model import flops
from lingvo_gshard.model.translation_model import TranslationModel
from lingvo_gshard.planning.cost_model import CostModel, products
from lingvo_gshard.planning.hardware import GENERATIONS, Torus
from lingvo_gshard.planning.memory import GIB
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.sharding.mesh import Mesh

_CORES, _LINK = 8, 82e9
_SIZES = ("task.source_vocab_size=4096", "task.target_vocab_size=2048", "input.target_len=64")


@pytest.fixture(scope="module")
def torus():
    chips = itertools.product(range(2), range(2))
    return Torus(GENERATIONS["v3"], (2, 2), tuple(chip for chip in chips for _ in range(2)))


def _estimator(torus, model, *settings):
    """Returns (mesh, sharding, remat) -> (GiB, Times)."""
    params = registry.get_params(model, (*_SIZES, *settings))
    state = TranslationModel(params, Partitioning(Mesh.flat(1), ())).state_spec
    costs = CostModel(params, state, torus)

    def estimate(mesh, sharding, remat=Remat.NONE):
        return costs.estimate(Partitioning.parse(Mesh.parse(mesh, _CORES), sharding), remat)

    return estimate


@pytest.fixture(scope="module")
def dense(torus):
    return _estimator(torus, "toy.Dense4L")


@pytest.fixture(scope="module")
def experts(torus):
    return _estimator(torus, "toy.MoE8E4L")


def test_flops_are_those_of_the_mathematics(dense):
    params = registry.get_params("toy.Dense4L", _SIZES)
    task = params.task.Instantiate(Partitioning(Mesh.flat(1), ()))
    needed = flops.train_step_flops(task, 32, 64, 64)
    _, secs = dense("d:*", "B:d")
    # Norms are products with vectors here.
    assert secs.compute == pytest.approx(needed / _CORES / 61.5e12, rel=0.01)


def test_data_parallel_sums_every_gradient_once(dense):
    params = registry.get_params("toy.Dense4L", _SIZES)
    state = TranslationModel(params, Partitioning(Mesh.flat(1), ())).state_spec
    num_bytes = 4 * sum(
        _count(spec) for path, spec in state.theta.FlattenItems() if "bias" not in path
    )
    _, secs = dense("d:*", "B:d")
    # Rings over two links of each chip; both cores of a chip are one member.
    assert secs.network == pytest.approx(2 * 7 / 8 * num_bytes / 2 / _LINK)


def _count(spec):
    size = 1
    for each in spec.shape:
        size *= each
    return size


def test_tensor_parallel_sums_activations_instead(dense):
    _, data = dense("d:*", "B:d")
    _, model = dense("d:*", "HNV:d")
    rows = 32 * 64 * 128 * 4
    # Forward: 4 feed-forward, 6 attention layers and 2 embeddings; backward: the inputs of 4
    # feed-forward layers and of the softmax, of 4 self-attentions' q, k, v and of 2 source
    # attentions' q, k, v.
    sums = (4 + 6 + 2) + (4 + 1 + 4 * 3 + 2 * 3)
    assert model.network == pytest.approx(sums * 2 * 7 / 8 * rows / 2 / _LINK)
    assert model.network > data.network


def test_experts_exchange_tokens_in_sixteen_bits(experts):
    """Each of two layers moves its buffers to the experts and back, and so their gradients."""
    _, split = experts("d:*", "BGE:d")
    _, whole = experts("d:*", "BG:d")
    buffers = 2 * 4 * 2 * (32 * 64 // _CORES) * 128 * 2  # Two places a token, on each core.
    exchanged = buffers * 0.5  # On a ring of two chips half of the bytes cross the one link.
    weights = 2 * 2 * 8 * 128 * 512 * 4
    summed = 2 * 7 / 8 * weights / 2 / _LINK
    assert split.network - whole.network == pytest.approx(2 * exchanged / _LINK - summed, rel=0.01)


def test_what_is_recomputed_costs_flops_and_saves_memory(dense):
    estimates = [dense("d:*", "B:d", remat) for remat in Remat]
    (kept, most), (least, all_again), (between, some_again) = estimates
    assert kept > between > least and most.compute < some_again.compute < all_again.compute


@pytest.mark.parametrize(("sharding", "copies"), [("B:d", 1), ("BM:d", 1 / 8), ("B:d,m:d", 1)])
def test_weights_take_less_memory_where_they_are_split(dense, sharding, copies):
    (gib, _), (replicated, _) = dense("d:*", sharding), dense("d:*", "B:d")
    weights = 4 * 1_900_000 / GIB
    assert replicated - gib == pytest.approx((1 - copies) * 2 * weights, rel=0.1) or "m" in sharding
    assert gib < replicated or sharding == "B:d"


def test_a_pipeline_computes_its_bubble(torus):
    params = registry.get_params(
        "toy.Dense4L", (*_SIZES, *(f"task.{s}.layers_as=LOOP" for s in ("encoder", "decoder")))
    )
    state = TranslationModel(params, Partitioning(Mesh.flat(1), ())).state_spec
    costs = CostModel(params, state, torus)
    parts = Partitioning.parse(Mesh.parse("d:4,p:2", 8), "B:d,R:p")
    one, many = (costs.estimate(parts, Remat.BLOCK, count)[1].compute for count in (1, 8))
    _, flat = costs.estimate(Partitioning.parse(Mesh.parse("d:8", 8), "B:d"), Remat.BLOCK)
    # Stacks alone; the softmax is split over half as many cores.
    outside = 3 * 2 * 32 * 64 * 128 * 2048 / 61.5e12
    stacks = flat.compute - outside / 8
    assert one == pytest.approx(2 * stacks + outside / 4, rel=0.02)
    assert many == pytest.approx(9 / 8 * stacks + outside / 4, rel=0.02)


def test_products_have_the_letters_of_their_weights():
    params = registry.get_params("toy.MoE8E4L", _SIZES)
    state = TranslationModel(params, Partitioning(Mesh.flat(1), ())).state_spec
    found = {(each.left, each.right, each.result) for each in products(params, state.theta)}
    assert {
        ("BLM", "MND", "BLND"),
        ("BLND", "NDM", "BLM"),
        ("BLH", "HM", "BLM"),
        ("GSM", "M_", "GS_"),
        ("GSEC", "GSM", "GECM"),
        ("EGCM", "EMH", "EGCH"),
        ("EGCH", "EHM", "EGCM"),
        ("BLM", "MV", "BLV"),
        ("BLV", "VM", "BLM"),
    } < found
