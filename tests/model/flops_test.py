"""Model flops: one number for one model, however its program holds the layers."""

import pytest

from lingvo_gshard.layers.repeat import Layers
from lingvo_gshard.model import flops
from tests.layers import building
from tests.model import small_task
from tests.model.small_task import TARGET_VOCAB, B, D, E, H, L, M, N, T


def _flops(layers_as):
    params = small_task.task_params()
    for stack in (params.encoder, params.decoder):
        stack.Set(num_layers=4, layers_as=layers_as)
    return flops.train_step_flops(params.Instantiate(building.Unannotated()), B, T, L)


def test_a_loop_of_layers_counts_as_all_of_them():
    assert _flops(Layers.LOOP) == _flops(Layers.UNROLLED)


def test_by_hand():
    """Two experts a token, four products of attention, three times forward; softmax, no lookup."""
    attention, ffn, gate = 4 * M * N * D, 2 * M * H, M * E
    encoder = B * T * (4 * attention + 2 * ffn + 2 * (gate + 2 * ffn))
    own = B * L * (4 * attention + 2 * ffn + 2 * (gate + 2 * ffn) + 4 * attention / 2)
    memory = B * T * 4 * attention / 2
    logits = B * L * M * TARGET_VOCAB
    pairs = 2 * B * 4 * N * D * (T * T + L * L + L * T)
    want = 6 * (encoder + own + memory + logits + pairs)
    assert _flops(Layers.UNROLLED) == pytest.approx(want)
