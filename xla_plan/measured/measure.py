"""Measures the rates of one device: products by size, memory, attention's kernel, and starts.

A rate is measured with a chain of equal operations, each of which needs the result of the last one.
A loop runs the chain as often as it takes to outlast the clock's noise, and of several measurements
the shortest counts.
"""

import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from xla_plan.measured.rates import MeasuredRates, Rate
from xla_spmd.runtime import versions

Tell = Callable[[str], None]
Clock = Callable[[], float]
wall_clock: Clock = time.perf_counter
cpu_clock: Clock = time.process_time  # It counts all threads of this process.

_DTYPES = {"bf16": jnp.bfloat16, "f32": jnp.float32}
_PRODUCT_SIDES = (128, 256, 512, 1024, 2048, 4096, 8192)
_MEMORY_SIZES = (16, 18, 20, 22, 24, 26, 28)  # Exponents of the bytes that an operation moves.
_MEMORY_BYTES = 2**29  # More than any cache holds.
_TRANSCENDENTAL_SIZE = 22
_CHAIN = 8  # The operations of a trip, so that the loop itself hardly counts.
_STARTS = 100
_LEAST_SECS = 0.05  # Loops that take less are repeated.
_REPEATS = 3
_LONGEST_SECS = 0.2  # An operation that takes longer is the last of its kind.

# The sizes of the measured attention.
_ROWS = 4
_LENGTH = 4096
_HEADS = 16
_WIDTH = 128


def measure(tell: Tell, clock: Clock = wall_clock) -> MeasuredRates:
    """Returns the rates of JAX's first device, and passes a line for each to `tell`.

    cpu_clock suits a CPU that other processes use, too.
    """
    device = jax.devices()[0]
    start_secs = _start_secs(clock)
    tell(f"start of an instruction: {1e6 * start_secs:.3g} us")

    products = {}
    for arithmetic, dtype in _DTYPES.items():
        products[arithmetic] = _product_rates(arithmetic, dtype, start_secs, clock, tell)
    memory = _memory_rates(start_secs, clock, tell)
    transcendentals_per_sec = _transcendentals_per_sec(start_secs, clock)
    tell(f"transcendental functions: {transcendentals_per_sec / 1e9:.4g} G/s")
    attention_per_sec = None
    if device.platform == "gpu":
        attention_per_sec = _attention_per_sec(clock)
        tell(f"attention's kernel: {attention_per_sec / 1e12:.4g} Tflop/s")
    return MeasuredRates(
        device=device.device_kind,
        versions=versions.installed(versions.COMPILING),
        products=products,
        memory=memory,
        transcendentals_per_sec=transcendentals_per_sec,
        start_secs=start_secs,
        attention_per_sec=attention_per_sec,
    )


def chain_secs(step: Callable[[Any], Any], first: Any, length: int, clock: Clock) -> float:
    """Returns the seconds of one operation in a chain of `length` operations per trip of a loop.

    `step` returns a value of the type of `first`, its argument.
    """

    def trip(_: int, value: Any) -> Any:
        for _ in range(length):
            # The compiler must not fuse one operation with the next.
            value = jax.lax.optimization_barrier(step(value))
        return value

    run = jax.jit(lambda trips, value: jax.lax.fori_loop(0, trips, trip, value))

    def secs(trips: int) -> float:
        started = clock()
        jax.block_until_ready(run(trips, first))
        return clock() - started

    secs(1)  # Compiles it.
    trips = 1
    while (once := secs(trips)) < _LEAST_SECS:
        trips *= max(2, min(16, math.ceil(_LEAST_SECS / max(once, 1e-6))))

    # The difference of two loops is free of the time that a call takes. Other processes only add.
    short = min(secs(trips) for _ in range(_REPEATS))
    long = min(secs(3 * trips) for _ in range(_REPEATS))
    return max(long - short, 1e-12) / (2 * trips * length)


def _start_secs(clock: Clock) -> float:
    """Returns the seconds of a product that is too small to take any."""
    one = jnp.eye(2)
    secs = chain_secs(_three_products, (one, one), _STARTS, clock)
    return secs / 3


def _product_rates(
    arithmetic: str, dtype: Any, start_secs: float, clock: Clock, tell: Tell
) -> tuple[Rate, ...]:
    rates = []
    for side in _PRODUCT_SIDES:
        weights = _orthogonal(side).astype(dtype)
        secs = chain_secs(_three_products, (weights, weights), 2, clock) / 3
        flops = 2 * side**3
        rate = Rate(round(math.log2(flops)), flops / _without_start(secs, start_secs))
        tell(f"products of {arithmetic}, {side} x {side}: {rate.per_sec / 1e12:.4g} Tflop/s")
        rates.append(rate)
        if 8 * secs > _LONGEST_SECS:  # The next one has eight times the flops.
            break
    return tuple(rates)


def _three_products(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Multiplies in a training step's forms: the inputs, and both gradients by the weights."""
    x, weights = state
    for equation in ("ab,bc->ac", "ab,cb->ac", "ab,ac->bc"):
        x = jax.lax.optimization_barrier(jnp.einsum(equation, x, weights))
    return x, weights


def _orthogonal(side: int) -> jax.Array:
    """Returns Hadamard's matrix over its norm: a chain of products neither grows nor vanishes."""
    numbers = jnp.arange(side)
    signs = 1 - 2 * (jax.lax.population_count(numbers[:, None] & numbers) % 2)
    return signs / math.sqrt(side)


def _memory_rates(start_secs: float, clock: Clock, tell: Tell) -> tuple[Rate, ...]:
    """Returns rates of the device's memory, beyond all caches: no row is met again soon."""
    rates = []
    for size in _MEMORY_SIZES:
        # Half of an operation's bytes are read, and half are written.
        shape = (max(1, 2 * _MEMORY_BYTES // 2**size), 2**size // 8)
        rows = jnp.ones(shape, jnp.float32)
        secs = chain_secs(_next_row, (jnp.int32(0), rows), _CHAIN, clock)
        rate = Rate(size, 2**size / _without_start(secs, start_secs))
        tell(f"memory, 2^{size} bytes: {rate.per_sec / 1e9:.4g} GB/s")
        rates.append(rate)
    return tuple(rates)


def _next_row(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Changes one row in place, and returns the number of the next one, with all rows."""
    row, rows = state
    changed = rows[row] * 0.5 + 0.5
    return (row + 1) % len(rows), rows.at[row].set(changed)


def _transcendentals_per_sec(start_secs: float, clock: Clock) -> float:
    """Returns the logistic functions of a second, as in SiLU, in the memory's usual traffic."""
    values = jnp.ones(2**_TRANSCENDENTAL_SIZE, jnp.float32)
    secs = chain_secs(jax.nn.silu, values, _CHAIN, clock)
    return 2**_TRANSCENDENTAL_SIZE / _without_start(secs, start_secs)


def _attention_per_sec(clock: Clock) -> float:
    """Returns the flops of a second of cuDNN's attention: causal, forward and backward."""

    def attend(values: tuple[jax.Array, ...]) -> jax.Array:
        out = jax.nn.dot_product_attention(*values, is_causal=True, implementation="cudnn")
        return jnp.sum(out, dtype=jnp.float32)

    shape = (_ROWS, _LENGTH, _HEADS, _WIDTH)
    keys = jax.random.split(jax.random.key(0), 3)
    values = tuple(jax.random.normal(key, shape, jnp.bfloat16) for key in keys)
    secs = chain_secs(jax.grad(attend), values, 1, clock)

    # 2 products forward and 5 backward, of each query with the keys up to its own position.
    pairs = _ROWS * _HEADS * _LENGTH * (_LENGTH + 1) // 2
    return 2 * 7 * pairs * _WIDTH / secs


def _without_start(secs: float, start_secs: float) -> float:
    """Returns an operation's own time; at least a tenth, as starts vary."""
    return max(secs - start_secs, 0.1 * secs)
