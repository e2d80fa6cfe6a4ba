"""Model flops, by hand, for unrolled layers and for a loop."""

import functools

import pytest

from lingvo_gshard.layers.gating_layers import TopKGating
from lingvo_gshard.layers.repeat import Layers
from lingvo_gshard.model.flops import step_flops
from lingvo_gshard.model.step_products import products_of
from tests.model import small_task
from tests.model.small_task import TARGET_VOCAB, B, D, E, H, L, M, N, T


def _step_flops(params):
    return step_flops(products_of(params, small_task.batch_specs()))


@functools.cache
def _flops(layers_as, num_experts=E):
    params = small_task.task_params()
    for stack in (params.encoder, params.decoder):
        stack.Set(num_layers=4, layers_as=layers_as)
        stack.moe.num_experts = num_experts
    return _step_flops(params)


@pytest.mark.slow
def test_loop_counts_all_layers():
    assert _flops(Layers.LOOP) == _flops(Layers.UNROLLED)


@pytest.mark.slow
def test_an_only_expert_is_counted_once():
    saved = _flops(Layers.UNROLLED) - _flops(Layers.UNROLLED, num_experts=1)
    assert saved == pytest.approx(6 * B * (T + L) * 2 * (2 * M * H + M * (E - 1)))


@pytest.mark.slow
def test_counts_the_experts_of_a_token_and_shared_ones():
    params = small_task.task_params()
    flops = []
    for k, num_shared in ((2, 0), (5, 3)):
        for stack in (params.encoder, params.decoder):
            stack.moe.Set(num_shared=num_shared, gating=TopKGating.Params().Set(k=k))
        flops.append(_step_flops(params))
    assert flops[1] - flops[0] == pytest.approx(6 * B * (T + L) * 6 * 2 * M * H)


@pytest.mark.slow
def test_equals_count_by_hand():
    """Two experts for a token, four attention projections, the softmax; no embedding lookup."""
    attention = 4 * M * N * D
    ffn = 2 * M * H
    gate = M * E
    encoder = B * T * (4 * attention + 2 * ffn + 2 * (gate + 2 * ffn))
    own = B * L * (4 * attention + 2 * ffn + 2 * (gate + 2 * ffn) + 4 * attention / 2)
    memory = B * T * 4 * attention / 2
    logits = B * L * M * TARGET_VOCAB
    pairs = 2 * B * 4 * N * D * (T * T + L * L + L * T)
    want = 6 * (encoder + own + memory + logits + pairs)
    assert _flops(Layers.UNROLLED) == pytest.approx(want)
