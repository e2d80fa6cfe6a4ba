"""Adafactor, compared with its paper's algorithms 2 and 4 to 6 in NumPy, matrix by matrix.

E experts, M model, H hidden, N heads, D head size.
"""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import base_layer
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.optim.adafactor import Adafactor
from lingvo_gshard.sharding.layout import TensorSpec
from tests.layers import building

_SPECS = NestedMap(
    experts=base_layer.gaussian((3, 4, 5), "EMH", fan_in=4),
    experts_bias=base_layer.constant((3, 1, 5), "E_H", 0.0),
    heads=base_layer.gaussian((6, 2, 3), "MND", fan_in=6, columns=2),
    heads_bias=base_layer.constant((2, 3), "ND", 0.0),
    heads_out=base_layer.gaussian((2, 3, 6), "NDM", fan_in=6, rows=2),
    matrix=base_layer.gaussian((6, 2), "ME", fan_in=6),
    stack=[base_layer.constant((7,), "M", 1.0), base_layer.constant((), "", 0.0)],
)


def _adafactor(**changes):
    p = Adafactor.Params().Set(**changes)
    p.schedule.Set(multiplier=0.3, decay_start=2)
    return p.Instantiate()


def _zero_slots(optimizer, specs):
    return optimizer.slot_specs(specs).Transform(lambda s: tf.zeros(s.shape))


def test_slots_have_dims_of_weight_without_the_averaged_one():
    slots = dict(_adafactor().slot_specs(_SPECS).FlattenItems())
    assert {path: (spec.shape, spec.dims) for path, spec in slots.items()} == {
        "experts.column": ((3, 5), "eh"),
        "experts.row": ((3, 4), "em"),
        "experts_bias.full": ((3, 1, 5), "e_h"),
        "heads.column": ((2, 3), "nd"),
        "heads.row": ((6,), "m"),
        "heads_bias.full": ((2, 3), "nd"),
        "heads_out.column": ((6,), "m"),
        "heads_out.row": ((2, 3), "nd"),
        "matrix.column": ((2,), "e"),
        "matrix.row": ((6,), "m"),
        "stack[0].full": ((7,), "m"),
        "stack[1].full": ((), ""),
    }
    assert isinstance(slots["matrix.row"], TensorSpec)


def test_partitions_update_their_own_parts_and_exchange_only_sums():
    """The means of experts and router have the same shape, [E], but different shardings."""
    weights = NestedMap(
        experts=base_layer.gaussian((4, 8, 6), "EMH", fan_in=8),
        router=base_layer.gaussian((8, 4), "M_", fan_in=8),
    )
    optimizer = _adafactor()
    theta = weights.Transform(lambda w: TensorSpec(w.shape, "float32", w.dims))
    slots = optimizer.slot_specs(weights)

    def fn(state, gradients):
        new = optimizer.update(
            state.theta, state.slots, gradients, tf.constant(3), weight_specs=weights
        )
        return NestedMap(state=NestedMap(theta=new[0], slots=new[1]))

    # Update a state that is split; its parts must stay in place.
    state = NestedMap(theta=theta, slots=slots)
    dims = building.dims_of(state=state)
    report = building.compile_fn(fn, 2, dims, state=state, gradients=theta).report()
    assert {op.kind for op in report.collective_ops} == {"all-reduce"}


# The shape of a weight with more dims as a matrix, or as a vector.
_SHAPES = {
    "heads": (6, 2 * 3),
    "heads_out": (2 * 3, 6),
    "heads_bias": (2 * 3,),
    "experts_bias": (3 * 5,),
}


class _Oracle:
    """One weight in float64; a weight of rank 3 is a list of matrices with a common scale."""

    def __init__(self, path, weight, beta2, threshold):
        self.shape = _SHAPES.get(path, weight.shape)
        self.weight = weight.astype("float64").reshape(self.shape)
        self.beta2 = beta2
        self.threshold = threshold
        self.second = {}

    def step(self, gradient, t, rate):
        decay = min(self.beta2, 1 - t**-0.8)
        gradient = gradient.astype("float64").reshape(self.shape)
        squared = gradient**2 + 1e-30
        if gradient.ndim < 2:
            v = self._average("v", squared, decay)
        else:
            rows = self._average("rows", squared.sum(-1), decay)
            columns = self._average("columns", squared.sum(-2), decay)
            v = rows[..., None] * columns[..., None, :] / rows.sum(-1)[..., None, None]
        update = gradient / np.sqrt(v)
        update /= max(1, np.sqrt((update**2).mean()) / self.threshold)
        scale = max(1e-3, np.sqrt((self.weight**2).mean()))
        self.weight = self.weight - rate * scale * update

    def _average(self, name, value, decay):
        self.second[name] = decay * self.second.get(name, 0 * value) + (1 - decay) * value
        return self.second[name]


@pytest.mark.parametrize(
    ("beta2", "threshold"), [pytest.param(0.99, 1.0, marks=pytest.mark.slow), (0.5, 0.2)]
)
def test_steps_equal_numpy(beta2, threshold):
    rng = np.random.default_rng(3)
    optimizer = _adafactor(beta2=beta2, clipping_threshold=threshold)
    theta = _SPECS.Transform(lambda s: rng.standard_normal(s.shape).astype("float32"))
    oracles = [_Oracle(*item, beta2, threshold) for item in theta.FlattenItems()]
    slots = _zero_slots(optimizer, _SPECS)

    for step in range(6):
        scale = 30.0 if step == 3 else 1.0  # One burst, which is clipped.
        gradients = _SPECS.Transform(
            lambda s, scale=scale: (scale * rng.standard_normal(s.shape)).astype("float32")
        )
        theta, slots = optimizer.update(
            theta.Transform(tf.constant), slots, gradients, tf.constant(step), weight_specs=_SPECS
        )

        t = step + 1
        for (path, got), oracle, gradient in zip(
            theta.FlattenItems(), oracles, gradients.Flatten(), strict=True
        ):
            oracle.step(gradient, t, rate=0.3 / max(t, 2) ** 0.5)
            want = oracle.weight.reshape(got.shape)
            np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-5, err_msg=path)


def test_zero_weight_is_updated():
    optimizer = _adafactor()
    spec = NestedMap(b=base_layer.constant((5,), "M", 0.0))
    slots = _zero_slots(optimizer, spec)
    gradient = NestedMap(b=tf.constant([1.0, -2.0, 3.0, -4.0, 5.0]))
    theta = NestedMap(b=tf.zeros([5]))
    new, _ = optimizer.update(theta, slots, gradient, tf.constant(0), weight_specs=spec)
    want = -0.3 / 2**0.5 * 1e-3 * np.array([1, -1, 1, -1, 1])
    np.testing.assert_allclose(new.b, want, rtol=1e-4)


def test_zero_gradient_changes_nothing_and_stays_finite():
    optimizer = _adafactor()
    theta = _SPECS.Transform(lambda s: tf.ones(s.shape))
    slots = _zero_slots(optimizer, _SPECS)
    zeros = theta.Transform(tf.zeros_like)
    new, slots = optimizer.update(theta, slots, zeros, tf.constant(0), weight_specs=_SPECS)
    for tensor in new.Flatten():
        np.testing.assert_array_equal(tensor, np.ones(tensor.shape))
    assert all(np.isfinite(slot).all() for slot in slots.Flatten())


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("clipping_threshold", 0.0, "above 0, got 0.0"),
        ("decay_exponent", -0.8, "above 0, got -0.8"),
        ("beta2", 1.5, r"in \(0, 1\], got 1.5"),
    ],
)
def test_settings_out_of_range_are_refused(name, value, expected):
    with pytest.raises(ValueError, match=f"Adafactor: {name} must be {expected}"):
        _adafactor(**{name: value})
