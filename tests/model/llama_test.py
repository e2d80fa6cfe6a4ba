"""Whole language models with Llama's settings, against Hugging Face: logits and searches.

hugging_face/llama.py computed the numbers. A weight there is transposed: [out, in].
"""

import pathlib

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard import registry
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.activations import Activation
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.norms import RMSNorm
from lingvo_gshard.layers.positions import RotaryPositions
from lingvo_gshard.model.language_model import LanguageModelTask
from tests.layers import building

V, M, H, N, D, NUM_LAYERS, K = 29, 12, 20, 3, 4, 2, 4
_FOLDER = pathlib.Path(__file__).parent / "hugging_face"
_STEPS = 14


def _task(is_tied):
    p = LanguageModelTask.Params().Set(
        vocab_size=V, dim=M, aux_loss_weight=0.0, tied_softmax=is_tied
    )
    p.embedding.Set(scaled=False, sinusoids=False)
    p.decoder.Set(num_layers=NUM_LAYERS, moe=None)
    p.decoder.dense.Set(hidden_dim=H, activation=Activation.SILU, gated=True)
    p.decoder.layer.norm = RMSNorm.Params().Set(epsilon=1e-5)
    rotary = RotaryPositions.Params().Set(max_timescale=500.0)
    p.decoder.layer.attention.Set(num_heads=N, head_dim=D, positions=rotary)
    return p.Instantiate(building.Unannotated())


def _layer(stored, number):
    def weight(name):
        return stored[f"model.layers.{number}.{name}.weight"]

    def heads_out(name):
        return weight(f"self_attn.{name}_proj").T.reshape(M, N, D)

    return NestedMap(
        self_norm=NestedMap(scale=weight("input_layernorm")),
        self_attention=NestedMap(
            wq=heads_out("q"),
            wk=heads_out("k"),
            wv=heads_out("v"),
            wo=weight("self_attn.o_proj").T.reshape(N, D, M),
        ),
        feed_forward_norm=NestedMap(scale=weight("post_attention_layernorm")),
        feed_forward=NestedMap(
            wi_gate=weight("mlp.gate_proj").T,
            wi=weight("mlp.up_proj").T,
            wo=weight("mlp.down_proj").T,
        ),
    )


def _theta(task, stored):
    layers = [_layer(stored, number) for number in range(NUM_LAYERS)]
    theta = NestedMap(
        embedding=NestedMap(table=stored["model.embed_tokens.weight"]),
        decoder=NestedMap(layers=layers, norm=NestedMap(scale=stored["model.norm.weight"])),
    )
    if "softmax" in task.weight_specs:
        theta.softmax = stored["lm_head.weight"].T
    given = dict(theta.FlattenItems())
    paths = [path for path, _ in task.weight_specs.FlattenItems()]
    assert sorted(given) == sorted(paths)
    return task.weight_specs.Pack(tf.constant(given[path]) for path in paths)


def _prompts(stored):
    ids = stored["prompts"].astype(np.int32)
    positions = np.tile(np.arange(ids.shape[1], dtype=np.int32), (len(ids), 1))
    is_token = positions < stored["prompt_lengths"][:, None]
    return NestedMap(
        ids=ids,
        segment_ids=is_token.astype(np.int32),
        positions=positions,
        seeds=np.zeros((len(ids), 2), np.int32),
    ).Transform(tf.constant)


def _decode(beam_size):
    p = registry.get_params("toy.LmDense4L").decode
    return p.Set(
        beam_size=beam_size, num_best=beam_size, length_norm_alpha=0.0, max_target_len=_STEPS
    )


def _model(name):
    stored = dict(np.load(_FOLDER / f"{name}.npz"))
    task = _task(is_tied=name == "llama_tied")
    return task, _theta(task, stored), stored


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_logits(name):
    task, theta, stored = _model(name)
    ids = stored["ids"].astype(np.int32)
    features = NestedMap(
        ids=ids,
        segment_ids=np.ones_like(ids),
        positions=np.tile(np.arange(ids.shape[1], dtype=np.int32), (len(ids), 1)),
    ).Transform(tf.constant)
    logits, _ = task.FProp(theta, features, Context(Mode.EVAL))
    np.testing.assert_allclose(logits, stored["logits"], rtol=1e-5, atol=1e-5)


def _predicted(beam_size):
    task, theta, stored = _model("llama")
    decode = _decode(beam_size)

    @tf.function(jit_compile=True, autograph=False)
    def predict(features):
        return task.Predict(theta, features, decode)

    return predict(_prompts(stored)).Transform(lambda x: x.numpy()), stored


@pytest.mark.slow
def test_beam_search():
    found, stored = _predicted(K)
    np.testing.assert_array_equal(found.ids, stored["beam"])
    np.testing.assert_allclose(found.scores, stored["scores"], rtol=1e-4, atol=1e-5)
