"""A training step on one device, beside its time by rates that were measured on the device.

python -m bench.calibrated_step
python -m bench.calibrated_step --rates=h100.json --dim=4096 --length=2048

The step is a decoder of four layers in plain JAX, with AdamW. On a CPU all times are CPU time.
"""

import jax
import numpy as np
from absl import flags

from lingvo_gshard import cli
from repro.published.dense_decoder import splits, step
from repro.published.dense_decoder.sizes import Model, Run
from xla_plan.cost import work
from xla_plan.measured import measure, rates
from xla_plan.measured.measure import Clock
from xla_plan.measured.rates import MeasuredRates
from xla_spmd.files import storage
from xla_spmd.hlo import hlo_cost, hlo_module
from xla_spmd.runtime import environment

_RATES = flags.DEFINE_string(
    "rates", None, "A file of `xla_plan calibrate`; by default, this command measures first."
)
_DIM = flags.DEFINE_integer("dim", 512, "The model's dim; hidden layers have 4 * dim.")
_LENGTH = flags.DEFINE_integer("length", 128, "The tokens of each of two rows.")
_DTYPE = flags.DEFINE_string("dtype", "float32", "The activations' dtype.")
_STEPS = flags.DEFINE_integer("steps", 6, "The measured steps, after a first one.")

_HEAD_DIM = 64
_VOCAB = 1024


def main() -> None:
    """Prints the predicted time by kind of work, the measured times, and the ratio."""
    environment.prepare(1)
    clock = measure.cpu_clock if jax.default_backend() == "cpu" else measure.wall_clock
    measured = _rates(clock)
    model = Model(
        layers=4,
        M=_DIM.value,
        H=4 * _DIM.value,
        N=_DIM.value // _HEAD_DIM,
        D=_HEAD_DIM,
        vocab=_VOCAB,
    )
    run = Run(rows=2, length=_LENGTH.value, remat="none", dtype=_DTYPE.value)
    mesh = jax.make_mesh(
        (1, 1, 1),
        splits.AXES,
        axis_types=(jax.sharding.AxisType.Auto,) * 3,
        devices=jax.devices()[:1],
    )
    types = step.arguments(model, run, mesh)
    compiled = step.train_step(model, run, mesh).lower(*types).compile()

    predicted = rates.predict(work.sums(hlo_cost.costs(hlo_module.read(compiled))), measured)
    print(f"predicted: {1e3 * predicted.secs:.1f} ms", predicted)
    secs = _measured_secs(compiled, _arguments(model, types), clock)
    print("measured:", ", ".join(f"{1e3 * each:.1f}" for each in secs), "ms")
    print(f"predicted over the least measured: {predicted.secs / min(secs):.2f}")


def _rates(clock: Clock) -> MeasuredRates:
    if _RATES.value is not None:
        return rates.load(storage.path(_RATES.value))
    return measure.measure(print, clock)


def _arguments(model: Model, types):
    """Returns a state with random weights and empty slots, and tokens, as the types place them."""
    state, tokens = types
    weights = step.initial_weights(model, 0)
    zeros = jax.tree.map(np.zeros_like, weights)
    values = {"params": weights, "slots": {"mean": zeros, "square": zeros}, "step": np.int32(0)}
    numbers = np.random.default_rng(0).integers(0, _VOCAB, tokens.shape, np.int32)
    return jax.tree.map(
        lambda value, spec: jax.device_put(value, spec.sharding), (values, numbers), (state, tokens)
    )


def _measured_secs(compiled, arguments, clock: Clock) -> list[float]:
    """Returns the seconds of each step after the first."""
    state, tokens = arguments
    secs = []
    for _ in range(1 + _STEPS.value):
        started = clock()
        state, loss = compiled(state, tokens)
        jax.block_until_ready((state, loss))
        secs.append(clock() - started)
    return secs[1:]


def run() -> None:
    """The console entry."""
    cli.run("calibrated_step", main)


if __name__ == "__main__":
    run()
