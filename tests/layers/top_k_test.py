"""The k best experts against literal loops over the papers' equations, and on several devices.

B batch, L length, M model, H hidden, G groups, S tokens of a group, E experts, C capacity.
"""

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.dispatch import Dispatch, combine_weights
from lingvo_gshard.layers.gating import Capacity, SecondExpert
from lingvo_gshard.layers.gating_layers import Scores, Top2Gating, TopKGating
from lingvo_gshard.layers.moe import MoELayer
from lingvo_gshard.layers.moe_sizes import train_places
from lingvo_gshard.layers.routing import statistics
from lingvo_gshard.optim.adafactor import Adafactor
from lingvo_gshard.optim.adamw import AdamW
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import TensorSpec
from tests import exhaustive
from tests.layers import building
from tests.spmd import functions

G, S, E = 3, 11, 5
_SEED = np.array([3, 4], np.int32)


def _gated(logits_GSE, valid_GS, capacity, bias_E=None, **settings):
    p = TopKGating.Params().Set(num_experts=E, **settings)
    layer = p.Instantiate(building.Unannotated(), "moe.gate")
    theta = NestedMap() if bias_E is None else NestedMap(bias=tf.constant(bias_E, tf.float32))
    logits_GSE = tf.constant(logits_GSE, tf.float32)
    valid_GS = tf.constant(valid_GS, tf.float32)
    return layer.FProp(theta, logits_GSE, valid_GS, capacity, Context(Mode.EVAL))


def _loop(scores_SE, ranked_SE, valid_S, capacity, k, normalized, scale):
    """The choices of one group, one after the other: weights [S, E, C], chosen [S, E], dropped."""
    weights_SEC = np.zeros((len(scores_SE), E, capacity))
    chosen_SE = np.zeros((len(scores_SE), E))
    next_E = [0] * E
    dropped = 0
    best = [sorted(range(E), key=lambda e: (-row[e], e))[:k] for row in ranked_SE]
    for i in range(k):
        for s in np.flatnonzero(valid_S):
            e = best[s][i]
            gate = scores_SE[s][e] * scale
            if normalized:
                gate /= sum(scores_SE[s][other] for other in best[s])
            chosen_SE[s, e] = 1
            if next_E[e] < capacity:
                weights_SEC[s, e, next_E[e]] = gate
            else:
                dropped += 1
            next_E[e] += 1
    return weights_SEC, chosen_SE, dropped


@pytest.mark.parametrize(("k", "capacity"), [(1, 2), (3, 2), (5, 11)])
@pytest.mark.parametrize(
    ("scores", "normalized", "scale", "biased"),
    [
        (Scores.SOFTMAX, True, 1.0, False),
        (Scores.SOFTMAX, False, 1.0, True),
        (Scores.SIGMOID, True, 2.5, True),
        (Scores.SIGMOID, False, 0.5, False),
    ],
)
def test_choices_equal_a_literal_loop(k, capacity, scores, normalized, scale, biased):
    rng = np.random.default_rng(k)
    logits_GSE = rng.standard_normal((G, S, E))
    valid_GS = rng.random((G, S)) < 0.8
    bias_E = 0.3 * rng.standard_normal(E) if biased else None
    rate = 0.1 if biased else 0.0
    got = _gated(
        logits_GSE,
        valid_GS,
        capacity,
        bias_E,
        k=k,
        scores=scores,
        normalized=normalized,
        scale=scale,
        bias_rate=rate,
        z_loss_weight=0.7,
    )

    exp_GSE = np.exp(logits_GSE)
    scores_GSE = exp_GSE / (1 + exp_GSE)
    if scores is Scores.SOFTMAX:
        scores_GSE = exp_GSE / exp_GSE.sum(-1, keepdims=True)
    ranked_GSE = scores_GSE + bias_E if biased else scores_GSE
    groups = [
        _loop(*group, capacity, k, normalized, scale)
        for group in zip(scores_GSE, ranked_GSE, valid_GS, strict=True)
    ]
    weights_GSEC = np.stack([weights for weights, _, _ in groups])
    np.testing.assert_allclose(combine_weights(got, capacity), weights_GSEC, rtol=1e-5, atol=1e-7)

    # The statistics.
    sent_GSE = weights_GSEC.any(-1)
    sent_E = sent_GSE.sum((0, 1))
    num_tokens = valid_GS.sum()
    gates_GSE = scores_GSE / scores_GSE.sum(-1, keepdims=True)
    entropy_GS = -np.sum(gates_GSE * np.log(gates_GSE), -1)
    l_aux = []
    for (_, chosen_SE, _), gates_SE, valid_S in zip(groups, gates_GSE, valid_GS, strict=True):
        share_E = chosen_SE.sum(0) / k / valid_S.sum()
        l_aux.append(np.mean(share_E * gates_SE[valid_S].mean(0)))
    want = {
        "load_E": sent_E / sent_E.mean(),
        "max_load": sent_E.max() / sent_E.mean(),
        "idle_experts": np.sum(sent_E == 0),
        "overflow": np.sum(valid_GS & ~sent_GSE.any(-1)) / num_tokens,
        "dropped_choices": sum(dropped for _, _, dropped in groups) / num_tokens / k,
        "entropy": entropy_GS[valid_GS].mean(),
        "aux_loss": np.mean(l_aux),
        "router_loss": 0.7 * np.mean(np.log(exp_GSE.sum(-1))[valid_GS] ** 2),
    }
    routing = statistics(got.routing.by_name())
    assert routing.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(routing[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_experts_whose_scores_are_all_zero_have_gates_of_zero():
    got = _gated(np.full((1, 2, E), -200.0), np.ones((1, 2)), 2, k=2, scores=Scores.SIGMOID)
    assert [choice.gate_GS.numpy().tolist() for choice in got.choices] == [[[0, 0]]] * 2
    assert got.routing.aux_loss == 0 and got.routing.entropy == 0


def test_only_padding_has_finite_losses():
    settings = {"k": 2, "z_loss_weight": 1.0, "scores": Scores.SIGMOID}
    routing = _gated(np.ones((1, 3, E)), np.zeros((1, 3)), 2, **settings).routing
    by_name = statistics(routing.by_name())
    assert {name: np.sum(value) for name, value in by_name.items()} == {
        name: E if name == "idle_experts" else 0 for name in by_name
    }


def _gatings():
    yield Top2Gating.Params().Set(second_expert=SecondExpert.ALL)
    yield TopKGating.Params().Set(k=2)
    yield TopKGating.Params().Set(k=3, scores=Scores.SIGMOID)


@pytest.mark.parametrize("p", _gatings())
def test_means_over_microbatches_equal_the_batchs(p):
    """Groups of 4 microbatches with 13, 9, 1 and 0 tokens, most of which choose alike."""
    rng = np.random.default_rng(5)
    logits_GSE = rng.standard_normal((4, 13, E)).astype("float32")
    logits_GSE[:, :, 0] += np.float32([2.0, 1.0, 0.0, 0.0])[:, None]
    counts_G = np.array([13, 9, 1, 0])
    valid_GS = (np.arange(13) < counts_G[:, None]).astype("float32")
    layer = p.Set(num_experts=E, z_loss_weight=0.5).Instantiate(building.Unannotated(), "gate")

    def fields(groups, **changes):
        context = Context(Mode.EVAL, **changes)
        gates = layer.FProp(NestedMap(), logits_GSE[groups], valid_GS[groups], 4, context)
        return NestedMap(gates.routing.by_name()).Transform(np.asarray)

    whole = fields(slice(None))
    mean_tokens = tf.constant(counts_G.mean(), tf.float32)
    parts = [fields(slice(i, i + 1), mean_tokens=mean_tokens) for i in range(4)]
    means = parts[0].Transform(lambda *values: np.mean(values, 0), *parts[1:])
    assert whole.sent_E.sum() == 4 * means.sent_E.sum() > 0

    got = statistics(means)
    want = statistics(whole)
    assert got.keys() == want.keys() and want["max_load"] > 1.05
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6, err_msg=name)
    z_GS = np.log(np.exp(logits_GSE.astype("float64")).sum(-1))
    np.testing.assert_allclose(
        got["router_loss"], 0.5 * np.mean(z_GS[valid_GS > 0] ** 2), rtol=1e-5
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gating.k": 6}, "moe.gate: k must be from 1 to num_experts, which is 5, got 6."),
        (
            {"gating.z_loss_weight": -0.1},
            "moe.gate: z_loss_weight must be 0 or more, got -0.1.",
        ),
        ({"num_shared": -1}, "moe: num_shared must be 0 or more, got -1."),
        (
            {"dispatch": Dispatch.RAGGED, "hidden_dropout.rate": 0.1},
            "moe: dispatch=RAGGED has no dropout within experts; hidden_dropout.rate must be 0, "
            "got 0.1.",
        ),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    p = MoELayer.Params().Set(dim=4, hidden_dim=6, num_experts=E)
    p.Set(gating=TopKGating.Params().Set(k=2)).Set(**settings)
    with pytest.raises(ValueError) as error:
        p.Instantiate(building.Unannotated(), "moe")
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("settings", "want"), [({}, 8), ({"factor": 2.0}, 2), ({"multiple_of": 5}, 10)]
)
def test_capacity_follows_k_unless_a_factor_is_set(settings, want):
    p = MoELayer.Params().Set(num_experts=16, gating=TopKGating.Params().Set(k=8))
    p.train_capacity = Capacity.Params().Set(**settings)
    assert train_places(p, 16) == want


@pytest.mark.slow
def test_biases_balance_as_a_simulation_of_their_steps_does():
    """DeepSeek-V3, 2.1.2: after each step a bias moves by its rate, with any optimizer."""
    rng = np.random.default_rng(0)
    rate = 0.02
    p = MoELayer.Params().Set(dim=4, hidden_dim=6, num_experts=E, group_size=S)
    p.gating = TopKGating.Params().Set(k=2, scores=Scores.SIGMOID, bias_rate=rate)
    layer = p.Instantiate(building.Unannotated(), "moe")
    theta = building.random_theta(layer)
    theta.gate.bias[:] = 0
    # A mean, so that some experts have far more tokens than others.
    x_BLM = (rng.standard_normal((12, S, 4)) + 0.8).astype("float32")
    valid_BL = (rng.random((12, S)) < 0.9).astype("float32")
    want_E = np.zeros(E)
    loads = []

    optimizer = AdamW.Params().Set(**{"schedule.multiplier": 0.01}).Instantiate()
    slots = optimizer.slot_specs(layer.weight_specs).Transform(lambda spec: tf.zeros(spec.shape))
    for step in range(10):
        # The simulation, with the unchanged router.
        scores_NE = 1 / (1 + np.exp(-(x_BLM @ theta.wg)[valid_BL > 0]))
        chosen_N2 = np.argsort(-(scores_NE + want_E))[:, :2]
        count_E = np.bincount(chosen_N2.ravel(), minlength=E)
        want_E -= rate * np.sign(count_E - count_E.mean())
        loads.append(count_E.max() / count_E.mean())

        weights = theta.Transform(tf.constant)
        leaves = weights.Flatten()
        with tf.GradientTape() as tape:
            tape.watch(leaves)
            context = Context(Mode.TRAIN, tf.constant(_SEED))
            y, routing = layer.FProp(weights, tf.constant(x_BLM), valid_BL, context)
            loss = 0.01 * tf.reduce_sum(tf.square(y)) + routing.router_loss
        gradients = weights.Pack(tape.gradient(loss, leaves))
        new, slots = optimizer.update(
            weights, slots, gradients, tf.constant(step), weight_specs=layer.weight_specs
        )
        theta = new.Transform(lambda weight: weight.numpy())
        np.testing.assert_allclose(theta.gate.bias, want_E, atol=1e-6)
        assert routing.router_loss == 0
    assert max(loads[-3:]) < 1.3 < 1.5 < loads[0]


def test_biases_have_no_slots():
    """So an optimizer's steps, such as its decay, do not reach them."""
    layer = _recipe(8, Dispatch.EINSUM).Instantiate(building.Unannotated(), "moe")
    for optimizer in (AdamW, Adafactor):
        specs = optimizer.Params().Instantiate().slot_specs(layer.weight_specs)
        assert specs.gate.bias.Flatten() == [] and specs.wg.Flatten()


B, L, M, H = 16, 6, 5, 7
_SPECS = NestedMap(
    x_BLM=functions.f32((B, L, M), "BLM"),
    valid_BL=functions.f32((B, L), "BL"),
    out_BLM=functions.f32((B, L, M), "BLM"),
    seed=TensorSpec((2,), "int32", "_"),
)


def _recipe(num_experts, dispatch):
    """All settings at once: three of the experts by sigmoids and biases, a shared one, z-loss."""
    gating = TopKGating.Params().Set(
        k=3, scores=Scores.SIGMOID, bias_rate=0.1, z_loss_weight=0.1, scale=2.0
    )
    return MoELayer.Params().Set(
        dim=M,
        hidden_dim=H,
        num_experts=num_experts,
        num_shared=1,
        group_size=L,
        gating=gating,
        dispatch=dispatch,
    )


def forward_backward(layer):
    """A function from theta and a batch to y, the routing and the gradients."""

    def fn(theta, batch):
        leaves = [*theta.Flatten(), batch.x_BLM]
        with tf.GradientTape() as tape:
            tape.watch(leaves)
            context = Context(Mode.TRAIN, batch.seed)
            y_BLM, routing = layer.FProp(theta, batch.x_BLM, batch.valid_BL, context)
            losses = routing.aux_loss + routing.router_loss
            loss = tf.reduce_sum(y_BLM * batch.out_BLM) + losses
        *d_theta, d_x_BLM = tape.gradient(loss, leaves)
        return NestedMap(
            y_BLM=y_BLM,
            routing=NestedMap(statistics(routing.by_name())),
            d_theta=theta.Pack(d_theta),
            d_x_BLM=d_x_BLM,
        )

    return fn


def _arrays():
    rng = np.random.default_rng(7)
    return NestedMap(
        x_BLM=rng.standard_normal((B, L, M)).astype("float32"),
        valid_BL=(rng.random((B, L)) < 0.8).astype("float32"),
        out_BLM=rng.standard_normal((B, L, M)).astype("float32"),
        seed=_SEED,
    )


@functools.cache
def _trained(partitions, dispatch, num_experts=8):
    parts = functions.partitioning(partitions) if isinstance(partitions, int) else partitions
    layer = _recipe(num_experts, dispatch).Instantiate(Annotator(parts), "moe")
    specs = building.theta_specs(layer)
    dims = building.dims_of(d_theta=specs) | {"y_BLM": "BLM", "d_x_BLM": "BLM"}
    executable = building.compile_fn(
        forward_backward(layer), parts, dims, theta=specs, batch=_SPECS
    )
    return executable, executable(building.random_theta(layer), _arrays())


@functools.cache
def _eager(dispatch, num_experts=8):
    """The results of one device, operation by operation."""
    layer = _recipe(num_experts, dispatch).Instantiate(building.Unannotated(), "moe")
    theta = building.random_theta(layer).Transform(tf.constant)
    return forward_backward(layer)(theta, _arrays().Transform(tf.constant))


_RARE = [case for case in itertools.product((1, 2, 4), Dispatch) if case != (2, Dispatch.RAGGED)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("partitions", "dispatch"),
    [
        (2, Dispatch.RAGGED),
        *[(8, dispatch) for dispatch in Dispatch],
        *[pytest.param(*case, marks=exhaustive.RARE) for case in _RARE],
    ],
)
def test_partitioned_equals_unpartitioned(partitions, dispatch):
    executable, got = _trained(partitions, dispatch)
    want = _eager(dispatch)
    building.assert_close(got, want)
    trivial = [path for path, array in want.FlattenItems() if not np.abs(array).max()]
    dropless = ["routing.dropped_choices", "routing.overflow"]
    assert set(trivial) <= {"routing.idle_experts", *dropless}
    assert (set(dropless) <= set(trivial)) == (dispatch is Dispatch.RAGGED)
    if partitions > 1:
        report = executable.report()
        counts = (report.count("all-to-all"), report.count("all-gather"))
        assert counts == ((2, 1) if dispatch is Dispatch.RAGGED else (4, 0))


def test_dropless_training_equals_buffers_with_room_for_all():
    params = _recipe(8, Dispatch.EINSUM)
    params.train_capacity.factor = 8.0  # C is S.
    layer = params.Instantiate(building.Unannotated(), "moe")
    theta = building.random_theta(layer).Transform(tf.constant)
    want = forward_backward(layer)(theta, _arrays().Transform(tf.constant))
    building.assert_close(_eager(Dispatch.RAGGED), want, atol=1e-5)


@pytest.mark.slow
def test_dropless_training_with_copies_of_the_experts():
    """Four experts on eight devices: parts of the tokens add up their gradients."""
    got = _trained(building.REPLICATED_EXPERTS, Dispatch.RAGGED, 4)[1]
    building.assert_close(got, _eager(Dispatch.RAGGED, 4))
