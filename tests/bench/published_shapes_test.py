"""Published shapes: their work, their parts, balanced routing, and the printed tables.

T tokens, E experts, K of them for a token, C rows of an expert, M model, H hidden.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import balanced_layer, compiled_layer, published_shapes, published_times
from bench.balanced_layer import BalancedLayer
from bench.published_shapes import PRODUCTS, SHAPES, Figure, Shape
from bench.published_times import Pass, Round, Times
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.dispatch import Dispatch
from lingvo_gshard.spmd.executable import compile_program
from repro.published import mixture_layer

_TINY = BalancedLayer(tokens=6, M=5, H=7, E=3, K=2)


@pytest.mark.parametrize(
    ("name", "rows", "weights", "tflop"),
    [
        # Three matrices of 4096 x 14336 for each of 8 experts, and 8192 rows in all.
        ("megatron", 1024, 1_409_286_144, 8.658654068736),
        ("qwen3", 256, 603_979_776, 0.927712935936),
        ("sonic", 2048, 1_610_612_736, 19.791209299968),
    ],
)
def test_the_work_of_a_shape(name, rows, weights, tflop):
    layer = SHAPES[name].layer
    assert (layer.rows, layer.weight_count) == (rows, weights)

    # Nine products of all rows, three of them forward.
    assert Pass.BOTH.gflop(layer) == pytest.approx(1e3 * tflop, rel=1e-12)
    assert Pass.FORWARD.gflop(layer) == pytest.approx(1e3 * tflop / 3, rel=1e-12)
    assert Pass.BACKWARD.gflop(layer) == pytest.approx(1e3 * tflop * 2 / 3, rel=1e-12)


def test_the_settings_have_the_weights_and_places_of_the_shape():
    p = published_shapes.settings(_TINY, Dispatch.GATHER)
    capacity = p.train_capacity.Instantiate()
    assert capacity.places(p.group_size, p.num_experts, p.gating.k) == _TINY.rows == 4
    layer = compiled_layer.layer_of(p)
    experts = {name: layer.weight_specs[name].shape for name in balanced_layer.EXPERT_WEIGHTS}
    assert experts == {"wi": (3, 5, 7), "wi_gate": (3, 5, 7), "wo": (3, 7, 5)}


def test_a_part_has_the_rows_of_the_whole():
    whole = SHAPES["qwen3"]
    layer = published_shapes.part(whole, None, 32)
    assert layer == dataclasses.replace(whole.layer, tokens=1024, E=32)
    assert layer.rows == whole.layer.rows

    layer = published_shapes.part(whole, 1024, 16)
    assert (layer.tokens, layer.rows) == (128, 64)
    assert published_shapes.part(whole, None, None) == whole.layer


@pytest.mark.parametrize(
    ("tokens", "experts", "message"),
    [
        (None, 7, "--experts=7: expected from 8 to 128."),
        (None, 256, "--experts=256: expected from 8 to 128."),
        (8192, None, "--tokens=8192: expected from 1 to 4096."),
        (100, None, "--tokens=100: 128 of 128 experts cannot share the 8 choices of each token"),
    ],
)
def test_a_part_that_cannot_be(tokens, experts, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        published_shapes.part(SHAPES["qwen3"], tokens, experts)


def test_sizes_that_cannot_be_balanced():
    with pytest.raises(ValueError, match="tokens=7: 14 choices cannot be shared evenly by 3"):
        dataclasses.replace(_TINY, tokens=7)
    with pytest.raises(ValueError, match="E=3: expected from K=4 to M=5 experts"):
        dataclasses.replace(_TINY, K=4)


def test_memory_decides_how_many_experts_fit():
    layer = published_shapes.part(SHAPES["megatron"], 1024, None)
    # Two processes' weights and one's gradients, of 5.25 GiB each.
    assert 3 * 5.25 < published_shapes.needed_gib(layer, 2) < 4 * 5.25
    assert published_shapes.fitting_experts(layer, 12.0, 2) == 4
    assert published_shapes.fitting_experts(layer, 1.0, 2) is None


@pytest.mark.parametrize("layer", [_TINY, BalancedLayer(tokens=64, M=32, H=3, E=16, K=8)])
def test_routing_is_balanced(layer):
    x, _ = balanced_layer.inputs(layer)
    logits = x @ balanced_layer.router(layer)
    np.testing.assert_array_equal(logits, x[:, : layer.E])

    # Chosen and other experts, and a token's choices, are further apart than rounding can move.
    ranked = np.argsort(-logits, 1)
    chosen = ranked[:, : layer.K]
    counts = np.bincount(chosen.ravel(), minlength=layer.E)
    np.testing.assert_array_equal(counts, np.full(layer.E, layer.rows))
    in_order = np.take_along_axis(logits, ranked, 1)
    assert (in_order[:, layer.K - 1] - in_order[:, layer.K :].max(1, initial=-9)).min() > 1


def _reference(theta, x):
    """Every expert computes all tokens; the gates of the best K are normalized."""
    logits = x @ theta["wg"]
    gates = jax.nn.softmax(logits)
    lowest = jnp.sort(gates, axis=-1)[:, -_TINY.K, None]
    gates = jnp.where(gates >= lowest, gates, 0)
    gates /= gates.sum(-1, keepdims=True)
    gate = jnp.einsum("TM,EMH->TEH", x, theta["wi_gate"])
    hidden = jax.nn.silu(gate) * jnp.einsum("TM,EMH->TEH", x, theta["wi"])
    return jnp.einsum("TE,TEH,EHM->TM", gates, hidden, theta["wo"])


@pytest.mark.slow
def test_the_program_computes_the_layer_and_its_gradients():
    params = published_shapes.settings(_TINY, Dispatch.GATHER)
    theta = compiled_layer.weights_of(_TINY, "float32")
    batch = compiled_layer.batch_of(_TINY, "float32")
    program = compiled_layer.program_of(params, _TINY.tokens, "float32", Pass.BOTH)
    seed = NestedMap(seed=np.array([1, 0], np.int32))
    result = compile_program(program)(NestedMap(theta), batch, seed)

    y, pull_back = jax.vjp(_reference, theta, batch.x[0])
    d_theta, d_x = pull_back(batch.d_y[0])
    np.testing.assert_allclose(result.y[0], y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(result.x[0], d_x, rtol=1e-5, atol=1e-5)
    for name, expected in d_theta.items():
        assert np.abs(expected).max() > 0.01
        np.testing.assert_allclose(result.theta[name], expected, rtol=1e-5, atol=1e-5)


def test_libraries_compute_the_same_products():
    weights = compiled_layer.weights_of(_TINY, "float32")
    libraries = ("NumPy", "XLA", "ragged_dot")
    products = compiled_layer.products_of(_TINY, "float32", weights, libraries)
    sizes = {"E": 3, "C": 4, "M": 5, "H": 7}
    for product in PRODUCTS:
        last, whole, ragged = (products[library][product.equation]() for library in libraries)
        _, result = product.equation.split("->")
        assert whole.shape == ragged.shape == tuple(sizes[letter] for letter in result)
        np.testing.assert_allclose(ragged, whole, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(last, whole[-1], rtol=1e-5, atol=1e-5)


def _shape(**changes):
    record = mixture_layer.LayerRecord("id", mixture_layer.PUBLISHED[0].layer, 12e-3, "a page")
    whole = BalancedLayer(tokens=4096, M=4096, H=14_336, E=8, K=2)
    figure = Figure("an H100", record, forward_secs=4e-3)
    return dataclasses.replace(Shape("mixtral", whole, (figure,)), **changes)


_PART = BalancedLayer(tokens=1024, M=4096, H=14_336, E=4, K=2)


def _round(secs, **changes):
    # 721.6 GFLOP forward.
    timed = Round(
        {"gather": Times(10 * secs, 30 * secs)},
        Times(15 * secs, 33 * secs),
        {"NumPy": [2.0, 3.0, 3.0, 2.0, 2.0, 3.0], "XLA": [2.5] * 6},
    )
    return dataclasses.replace(timed, **changes)


def test_the_layer_in_words():
    text = published_times.described(_shape(note="A note."), _PART)
    assert text.splitlines() == [
        "mixtral: M=4096, H=14336, 4 of 8 experts, 2 for each token, 1024 of 4096 tokens, "
        "512 rows for each expert",
        "published for the whole shape in bfloat16: 12.00 ms, 722 TFLOP/s; an H100; a page",
        "A note.",
    ]


_LAYER_ROWS = """\
1 gather forward 10 72 70% 75% 15 1.50 4.00
1 gather backward 20 72 70% 75% 18 0.90 8.00
1 gather both 30 72 70% 75% 33 1.10 12.00
2 gather forward 20 36 35% 38% 30 1.50 4.00
2 gather backward 40 36 35% 38% 36 0.90 8.00
2 gather both 60 36 35% 38% 66 1.10 12.00"""

_PRODUCTS = """\
product                           sizes  times  NumPy GFLOP/s  XLA GFLOP/s
ECM,EMH->ECH   512 x 4096, 4096 x 14336      2            120           96
ECH,EHM->ECM  512 x 14336, 14336 x 4096      1             80           96
ECM,EHM->ECH   512 x 4096, 14336 x 4096      1             80           96
ECH,EMH->ECM  512 x 14336, 4096 x 14336      2            120           96
ECM,ECH->EMH    512 x 4096, 512 x 14336      2            120           96
ECH,ECM->EHM    512 x 14336, 512 x 4096      1             80           96"""


def test_the_tables():
    rounds = [_round(1.0), _round(2.0)]
    layers, products = published_times.text(_shape(), _PART, rounds).split("\n\n")
    header, *rows = layers.splitlines()
    assert re.split(r"  +", header) == [
        "round",
        "dispatch",
        "pass",
        "ours s",
        "GFLOP/s",
        "of NumPy's rate",
        "of XLA's rate",
        "torch s",
        "torch / ours",
        "published ms",
    ]
    assert [" ".join(row.split()) for row in rows] == _LAYER_ROWS.splitlines()
    assert products == _PRODUCTS


def test_columns_without_a_peer_or_a_published_time_are_left_out():
    timed = _round(1.0, torch=None, products={"XLA": [2.5] * 6})
    header, *_ = published_times.text(_shape(figures=()), _PART, [timed]).splitlines()
    assert header.split("  ")[-1] == "of XLA's rate"
    assert "torch" not in header and "NumPy" not in header
