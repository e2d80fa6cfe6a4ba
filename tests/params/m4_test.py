"""The registered family, compared with the numbers that the paper printed."""

import functools

import pytest

from lingvo_gshard import registry
from lingvo_gshard.layers.numerics import Remat
from lingvo_gshard.model import placement
from params import bilingual
from repro.tables import capacity
from repro.tables.as_printed import DENSE, FAMILY, MODELS_OF_24_LAYERS
from tests.params import write_goldens

_RUNS = {run.model: run for run in (*FAMILY, DENSE)}
_WITH_EXPERTS = [*(run.model for run in FAMILY), *MODELS_OF_24_LAYERS]
_TWO_PLACES = "m4.MoE2048E36LTwoPlaces"


@pytest.mark.parametrize("model", _RUNS)
def test_layers_experts_cores_and_batch_are_the_papers(model):
    p = registry.get_params(model)
    run = _RUNS[model]
    assert p.task.encoder.num_layers + p.task.decoder.num_layers == run.layers
    experts = None if run.is_dense else run.cores
    assert (p.task.encoder.moe.num_experts if p.task.encoder.moe else None) == experts
    assert run.cores == write_goldens.num_partitions(model)
    assert p.input.batch_size * p.input.source_len == run.batch_tokens
    assert p.train.max_steps * run.batch_tokens >= 1e12


def test_all_registered_models_with_experts_are_in_the_family():
    registered = [name for name in registry.registered_names() if name.startswith("m4.")]
    with_experts = [name for name in registered if registry.get_params(name).task.encoder.moe]
    assert sorted([*_WITH_EXPERTS, _TWO_PLACES]) == sorted(with_experts)


@functools.cache
def _lost(num_experts, group_size, places):
    """Tokens lost with balanced random gates: with random second choices, and with all of them."""
    groups = capacity.random_groups(group_size, num_experts, 8)
    all_asking = list(map(capacity.all_asking, groups))
    return [capacity.lost(asking, num_experts, places) for asking in (groups, all_asking)]


@pytest.mark.parametrize("model", _WITH_EXPERTS)
def test_each_core_has_a_group_and_full_experts_lose_few_tokens(model):
    """Section 3.1: G is O(D), D <= S, and C is 2S/E, but at least Lingvo's 4."""
    p = registry.get_params(model)
    cores = write_goldens.num_partitions(model)
    sizes = capacity.sizes_of(p)
    assert list(sizes) == ["encoder", "decoder"]

    for stack, (num_experts, group_size, places) in sizes.items():
        tokens = p.input.batch_size * p.input.Get(p.task.cls.STACKS[stack])
        assert tokens // group_size >= cores
        assert cores <= group_size
        assert places == max(4, 2 * group_size // num_experts)
        for lost in _lost(num_experts, group_size, places):
            assert lost.tokens < 0.005
            assert lost.first < 0.01


def test_two_places_of_2048_experts_would_lose_a_twentieth_of_the_tokens():
    for lost in _lost(2048, 2048, 2):
        assert 0.05 < lost.tokens < 0.08
        assert lost.first > 0.1


def test_the_fast_600b_has_the_papers_two_places_and_is_the_same_model():
    fast = registry.get_params(_TWO_PLACES)
    assert capacity.sizes_of(fast) == dict.fromkeys(("encoder", "decoder"), (2048, 2048, 2))

    # With the usual settings of placement and of saved results, it is the family's model.
    usual = registry.get_params("m4.MoE2048E36L")
    fast.Set(mesh=usual.mesh, sharding=usual.sharding)
    for name in ("encoder", "decoder"):
        stack = fast.task.Get(name).Set(remat=Remat.BLOCK, kept_hidden_dtype=None)
        stack.moe.train_capacity.multiple_of = 4
    assert fast.ToText() == usual.ToText()


@pytest.mark.parametrize("model", _RUNS)
def test_weights_are_the_papers_within_a_few_percent(model):
    """The sizes of A.2 give up to 7 % more weights than are printed."""
    weights = placement.num_weights(registry.get_params(model))
    assert weights == pytest.approx(_RUNS[model].weights, rel=0.08)


@pytest.mark.parametrize(
    ("layers", "hidden_dim", "num_heads", "printed"),
    [(6, 8192, 16, 0.4), (24, 8192, 16, 1.3), (12, 16384, 32, 1.3), (32, 16384, 32, 3.0),
     (64, 16384, 32, 6.0)],
)  # fmt: skip
def test_heads_of_the_dense_models_size_give_the_weights_that_gpipe_printed(
    layers, hidden_dim, num_heads, printed
):
    """GPipe's T(L, H, A) of L encoder and L decoder layers, in 10^9 weights (arXiv:1811.06965)."""
    params = registry.get_params("m4.T96L")
    for name in ("encoder", "decoder"):
        stack = params.task.Get(name).Set(num_layers=layers)
        stack.dense.hidden_dim = hidden_dim
        stack.layer.attention.num_heads = num_heads
    assert placement.num_weights(params) / 1e9 == pytest.approx(printed, rel=0.08)


def test_a_bilingual_baseline_has_the_papers_weights():
    weights = placement.num_weights(bilingual.TransformerBig.params())
    assert weights == pytest.approx(0.4e9, rel=0.08)


@pytest.mark.parametrize("run", FAMILY[:-1], ids=lambda run: run.model)
def test_the_printed_rates_take_the_printed_days(run):
    """The days for 10^12 tokens at the printed rate and batch."""
    days = 1e12 / run.batch_tokens / run.steps_per_sec / 86400
    assert days == pytest.approx(run.days, rel=0.1)


@pytest.mark.parametrize("model", MODELS_OF_24_LAYERS)
def test_models_of_24_layers_differ_from_those_of_36_only_in_depth(model):
    """Section 5.1 only places them between the models of 12 and of 36 layers."""
    deeper = registry.get_params(model.replace("24L", "36L"))
    for name in ("encoder", "decoder"):
        assert deeper.task.Get(name).num_layers == 18
        deeper.task.Get(name).num_layers = 12
    assert registry.get_params(model).ToText() == deeper.ToText()

    shallow, deep = (registry.get_params(model.replace("24L", depth)) for depth in ("12L", "36L"))
    ends = placement.num_weights(shallow) + placement.num_weights(deep)
    assert placement.num_weights(registry.get_params(model)) == ends / 2
