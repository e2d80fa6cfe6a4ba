"""Estimates of the cost model against hand-worked ones."""

import functools
import itertools
import math

import pytest

from lingvo_gshard import registry
from lingvo_gshard.layers.numerics import Remat
from lingvo_gshard.model import flops, step_products
from lingvo_gshard.model.step_memory import StepMemory
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.plans import state_memory
from lingvo_gshard.plans.cost_model import CostModel
from lingvo_gshard.sharding.layout import Partitioning
from xla_plan.machines.hardware import GENERATIONS, GIB
from xla_plan.machines.networks import Torus
from xla_spmd.hlo.collectives import Collective
from xla_spmd.mesh import Mesh

_CORES = 8
_LINK = 82e9
_SIZES = ("task.source_vocab_size=4096", "task.target_vocab_size=2048", "input.target_len=64")


@pytest.fixture(scope="module")
def torus():
    chips = itertools.product(range(2), range(2))
    return Torus(GENERATIONS["v3"], tuple(chip for chip in chips for _ in range(2)))


def _made(model, *settings):
    params = registry.get_params(model, (*_SIZES, *settings))
    return params, TaskModel(params, Partitioning(Mesh.flat(1), ()))


@functools.cache
def _products(model, *settings):
    params = registry.get_params(model, (*_SIZES, *settings))
    return step_products.products_of(params.task, params.input.cls.batch_specs(params.input))


def _estimator(torus, model, *settings):
    """Returns (mesh, sharding, remat, microbatches) -> (GiB, Times)."""
    params, made = _made(model, *settings)
    memory = StepMemory(params, made, _products(model, *settings))
    costs = CostModel(params, made, _products(model, *settings), torus)

    def estimate(mesh, sharding, remat=Remat.NONE, microbatches=1, scatter_gradients=True):
        partitioning = Partitioning.parse(Mesh.parse(mesh, _CORES), sharding)
        remats = dict.fromkeys(params.task.cls.STACKS, remat)
        num_bytes = memory.num_bytes(partitioning, remats, microbatches, scatter_gradients)
        secs = costs.estimate(partitioning, remat, microbatches, scatter_gradients)
        return num_bytes / GIB, secs

    return estimate


@pytest.fixture(scope="module")
def dense(torus):
    return _estimator(torus, "toy.Dense4L")


@pytest.fixture(scope="module")
def experts(torus):
    return _estimator(torus, "toy.MoE8E4L")


def test_flops_equal_the_formula(dense):
    needed = flops.step_flops(_products("toy.Dense4L"))
    _, secs = dense("d:*", "B:d")
    # Norms are products with vectors here.
    assert secs.compute == pytest.approx(needed / _CORES / 61.5e12, rel=0.01)


def test_data_parallel_sums_every_gradient_once(dense):
    _, made = _made("toy.Dense4L")
    _, secs = dense("d:*", "B:d")
    # Rings over two links of each chip; both cores of a chip are one member.
    summed = 2 * 7 / 8 * 4 * made.task.num_weights / 2 / _LINK
    assert secs.network == pytest.approx(summed, rel=0.01)  # Without the norms' biases.


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


def test_recomputation_costs_flops_and_saves_memory(dense):
    estimates = [dense("d:*", "B:d", remat) for remat in Remat.order()]
    for (gib, secs), (next_gib, next_secs) in itertools.pairwise(estimates):
        assert gib > next_gib
        assert secs.compute < next_secs.compute


@pytest.mark.parametrize(("sharding", "parts"), [("BM:d", 2), ("B:d,m:d", 1)])
def test_split_weights_and_gradients_take_less_memory(dense, sharding, parts):
    _, made = _made("toy.Dense4L")
    (split, _), (replicated, _) = dense("d:*", sharding), dense("d:*", "B:d")
    tables = (Partitioning.parse(Mesh.flat(_CORES), rows) for rows in ("B:d", sharding))
    slots = [
        state_memory.by_role(made.state_spec, table)[state_memory.SLOTS].gib for table in tables
    ]
    whole, less = slots
    saved = 7 / 8 * 4 * made.task.num_weights / GIB
    with_m = [slot.shape for slot in made.state_spec.slots.Flatten() if "m" in slot.dims]
    assert whole - less == pytest.approx(7 / 8 * 4 * sum(map(math.prod, with_m)) / GIB)
    assert replicated - split == pytest.approx(parts * saved + whole - less)


@pytest.mark.slow
def test_a_pipeline_computes_its_bubble(torus):
    stacks = (f"task.{stack}.layers_as=LOOP" for stack in ("encoder", "decoder"))
    estimate = _estimator(torus, "toy.Dense4L", *stacks)
    _, flat = estimate("d:8", "B:d", Remat.BLOCK)
    softmax = 3 * 2 * 32 * 64 * 128 * 2048 / 61.5e12 / 4  # On half of the cores.
    for microbatches, work in ((1, 2), (8, 9 / 8)):
        _, secs = estimate("d:4,p:2", "B:d,R:p", Remat.BLOCK, microbatches)
        blocks = flat.compute - softmax / 2
        assert secs.compute == pytest.approx(work * blocks + softmax, rel=0.02)


def _sent(torus, kind, num_bytes, group):
    return torus.collective_secs(Collective(kind, 1, (group,), 1)) * num_bytes


def test_rows_of_a_stack_that_equal_the_models_change_nothing(dense):
    for remat in Remat.order():
        whole = dense("m:2,d:4", "B:d,HNV:m", remat)
        assert dense("m:2,d:4", "B:d,HNV:m,encoder.B:d,decoder.HN:m", remat) == whole


def test_stacks_of_different_tables_pass_on_activations(torus, dense):
    """Both mixtures cost as much as both tables, and the moves from encoder to decoder."""

    def network(*data_parallel):
        rows = [f"{stack}.B:d+m,{stack}.HN:-" for stack in data_parallel]
        _, secs = dense("m:2,d:4", ",".join(["B:d,HNV:m", *rows]))
        return secs.network

    mixed = network("encoder") + network("decoder")
    alike = network("encoder", "decoder") + network()
    # Source rows are gathered once forward, and once backward; the other ways need only a part.
    rows_bytes = 32 * 64 * 128 * 4 / 4
    assert mixed - alike == pytest.approx(2 * _sent(torus, "all-gather", rows_bytes, (0, 4)))
    assert mixed > alike


def test_a_two_dimensional_product_sends_only_along_rows_and_columns(torus, dense):
    params, made = _made("toy.Dense4L")
    _, secs = dense("m:2,d:4", "B:d,HNV:m,M:m,weights.M:d")
    row, column = (0, 4), (0, 1, 2, 3)

    total = 0.0
    for path, spec in made.state_spec.theta.FlattenItems():
        if len(spec.shape) == 1:
            continue  # Scales and biases of norms, which are small.

        # A weight is gathered for its product and for the gradient of the input, in 16 bits, and
        # its gradient is scattered, which takes as long as an all-reduce. Lookups are not products:
        # they are not rounded.
        is_lookup = "embedding" in path
        weight_bytes = 4 * math.prod(spec.shape)
        share_sent = 1.0 if is_lookup else 0.5
        gathered_bytes = share_sent * weight_bytes / 2
        total += (1 if is_lookup else 2) * _sent(torus, "all-gather", gathered_bytes, column)
        total += 2 * _sent(torus, "reduce-scatter", weight_bytes / _CORES, column)

        # Activations [B, L, M] are gathered for a product with M and for the weight's gradient;
        # k and v share the gathers of q. Sums over the other dim are scattered.
        is_source = path.startswith(("encoder", "source")) or path.endswith(
            ("source_attention.wk", "source_attention.wv")
        )
        length = 64 if is_source else params.input.target_len
        part_bytes = 4 * 32 * length * 128 / _CORES
        shares_input = path.endswith(("self_attention.wk", ".wv"))
        gathers = 1 if is_lookup else 0 if shares_input else 2
        total += gathers * _sent(torus, "all-gather", share_sent * 2 * part_bytes, row)
        total += 2 * _sent(torus, "reduce-scatter", part_bytes, row)
    assert secs.network == pytest.approx(total, rel=0.02)


def test_a_split_softmax_gathers_its_rows_instead_of_summing_its_gradient(torus, dense):
    params, _ = _made("toy.Dense4L")
    _, data = dense("d:8", "B:d")
    _, split = dense("d:8", "B:d,V:d,U:-")
    assert split.compute == pytest.approx(data.compute)

    # The rows of the softmax are whole on every core, and so is the sum of their gradients.
    everyone = tuple(range(8))
    vocabularies = {"source": 4096, "target": 2048}
    rows_bytes = 4 * 32 * params.input.target_len * 128
    changed = _sent(torus, "all-gather", rows_bytes, everyone)
    changed += _sent(torus, "all-reduce", rows_bytes, everyone)

    # A gradient [M, V] is no longer summed, and the embeddings' tables are gathered to be read;
    # their gradients are summed in the tables' layout, in the same time as before.
    changed -= _sent(torus, "all-reduce", 4 * 2048 * 128, everyone)
    for vocabulary in vocabularies.values():
        changed += _sent(torus, "all-gather", 4 * vocabulary * 128, everyone)
    assert split.network - data.network == pytest.approx(changed, rel=1e-3)


def test_gradients_that_are_not_scattered_take_as_much_memory_as_weights(dense):
    _, made = _made("toy.Dense4L")
    (scattered, fast), (summed, slow) = (
        dense("d:8", "B:d,m:d", scatter_gradients=scatters) for scatters in (True, False)
    )
    with_m = [spec.shape for spec in made.state_spec.theta.Flatten() if "M" in spec.dims]
    saved = 7 / 8 * 4 * sum(map(math.prod, with_m)) / GIB
    assert summed - scattered == pytest.approx(saved)
    assert slow.network >= fast.network
