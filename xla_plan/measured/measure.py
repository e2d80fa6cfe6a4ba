"""Measures the rates of one device: products by form and size, memory, transposes, and starts.

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

from xla_plan.cost import work
from xla_plan.measured.rates import MeasuredRates, Rate, product_name
from xla_spmd.hlo import hlo_cost, hlo_module
from xla_spmd.runtime import versions

Tell = Callable[[str], None]
Clock = Callable[[], float]
wall_clock: Clock = time.perf_counter
cpu_clock: Clock = time.process_time  # It counts all threads of this process.

# Where a compiler converts products of bfloat16 to float32, the ones of float32 come first.
_DTYPES = (jnp.float32, jnp.bfloat16)
_PRODUCT_SIDES = (128, 256, 512, 1024, 2048, 4096, 8192)
# Products of square matrices in all forms. Then a gradient of weights as JAX writes it, with two
# contracted dims and a transpose: compilers rewrite it after they have chosen its arithmetic.
_GRADIENT = "sba,sbc->ac"
_EQUATIONS = ("ab,bc->ac", "ab,cb->ac", "ba,bc->ac", "ba,cb->ac", _GRADIENT)
_MEMORY_SIZES = (16, 18, 20, 22, 24, 26, 28)  # Exponents of the bytes that an operation moves.
_MEMORY_BYTES = 2**29  # More than any cache holds.
_TRANSPOSED_SIZES = (16, 18, 20, 22, 24, 26)
_TRANSCENDENTAL_SIZE = 22
_CHAIN = 8  # The operations of a trip, so that the loop itself hardly counts.
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

    products: dict[str, tuple[Rate, ...]] = {}
    for dtype in _DTYPES:
        for equation in _EQUATIONS:
            form = _form(equation, dtype)
            if form not in products:
                products[form] = _product_rates(form, equation, dtype, start_secs, clock, tell)
    memory = _memory_rates(start_secs, clock, tell)
    transposes = _transpose_rates(start_secs, clock, tell)
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
        transposes=transposes,
        transcendentals_per_sec=transcendentals_per_sec,
        start_secs=start_secs,
        attention_per_sec=attention_per_sec,
    )


def chain(step: Callable[[Any], Any], first: Any, length: int) -> Any:
    """Returns a compiled run(trips, value), which donates `value`, of type `first`, of a loop.

    Each trip has a chain of `length` operations. `step` returns a value of its argument's type.
    """

    def trip(_: int, value: Any) -> Any:
        for _ in range(length):
            # The compiler must not fuse one operation with the next.
            value = jax.lax.optimization_barrier(step(value))
        return value

    def run(trips: jax.Array, value: Any) -> Any:
        return jax.lax.fori_loop(0, trips, trip, value)

    # Without donation, every call would copy the value.
    return jax.jit(run, donate_argnums=1).lower(jnp.int32(1), first).compile()


def chain_secs(run: Callable[[Any, Any], Any], first: Any, length: int, clock: Clock) -> float:
    """Returns the seconds of one operation of a chain; see `chain`."""
    value = jax.tree.map(jnp.copy, first)

    def secs(trips: int) -> float:
        nonlocal value
        started = clock()
        value = jax.block_until_ready(run(jnp.int32(trips), value))
        return clock() - started

    secs(1)  # The first call also loads the program.
    trips = 1
    while (once := secs(trips)) < _LEAST_SECS:
        trips *= max(2, min(16, math.ceil(_LEAST_SECS / max(once, 1e-6))))

    # The difference of two loops is free of the time that a call takes. Other processes only add.
    short = min(secs(trips) for _ in range(_REPEATS))
    long = min(secs(3 * trips) for _ in range(_REPEATS))
    return max(long - short, 1e-12) / (2 * trips * length)


def _secs(step: Callable[[Any], Any], first: Any, length: int, clock: Clock) -> float:
    return chain_secs(chain(step, first, length), first, length, clock)


def _start_secs(clock: Clock) -> float:
    """Returns the seconds of a product that is too small to take any."""

    def step(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, weights = state
        return x @ weights, weights

    one = jnp.eye(2)
    return _secs(step, (one, one), _CHAIN, clock)


def _form(equation: str, dtype: Any) -> str:
    """Returns the name in MeasuredRates.products of what the compiler makes of an equation."""
    weights = _orthogonal(_PRODUCT_SIDES[0]).astype(dtype)
    compiled = chain(_product(equation), (weights, weights), 1)
    (cost,) = (cost for cost in hlo_cost.costs(hlo_module.read(compiled)) if cost.flops)
    return product_name(cost.arithmetic, cost.form)


def _product(equation: str) -> Callable[[Any], Any]:
    """Returns the step of a chain that multiplies its state by square weights."""

    def step(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, weights = state
        if equation != _GRADIENT:
            return jnp.einsum(equation, x, weights), weights
        rows = (2, len(x) // 2, len(x))
        return jnp.einsum(equation, x.reshape(rows), weights.reshape(rows)).T, weights

    return step


def _product_rates(
    form: str, equation: str, dtype: Any, start_secs: float, clock: Clock, tell: Tell
) -> tuple[Rate, ...]:
    """Returns the rates of an equation's products by size."""
    rates = []
    for side in _PRODUCT_SIDES:
        weights = _orthogonal(side).astype(dtype)
        secs = _secs(_product(equation), (weights, weights), 2, clock)
        flops = 2 * side**3
        rate = Rate(round(math.log2(flops)), flops / _without_start(secs, start_secs))
        tell(f"products of {form}, {side} x {side}: {rate.per_sec / 1e12:.4g} Tflop/s")
        rates.append(rate)
        if 8 * secs > _LONGEST_SECS:  # The next one has eight times the flops.
            break
    return tuple(rates)


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
        secs = _secs(_next_row, (jnp.int32(0), rows), _CHAIN, clock)
        rate = Rate(size, 2**size / _without_start(secs, start_secs))
        tell(f"memory, 2^{size} bytes: {rate.per_sec / 1e9:.4g} GB/s")
        rates.append(rate)
    return tuple(rates)


def _next_row(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Changes one row in place, and returns the number of the next one, with all rows."""
    row, rows = state
    changed = rows[row] * 0.5 + 0.5
    return (row + 1) % len(rows), rows.at[row].set(changed)


def _transpose_rates(start_secs: float, clock: Clock, tell: Tell) -> tuple[Rate, ...]:
    """Returns rates of the bytes that transposes read and write."""

    def step(x: jax.Array) -> jax.Array:
        return x.T * 0.5 + 0.5

    rates = []
    for size in _TRANSPOSED_SIZES:
        side = 2 ** ((size - 3) // 2)
        x = jnp.ones((side, side), jnp.float32)
        secs = _secs(step, x, 2, clock)
        num_bytes = 8 * side**2
        rate = Rate(work.size_of(num_bytes), num_bytes / _without_start(secs, start_secs))
        tell(f"transposes, 2^{rate.size} bytes: {rate.per_sec / 1e9:.4g} GB/s")
        rates.append(rate)
    return tuple(rates)


def _transcendentals_per_sec(start_secs: float, clock: Clock) -> float:
    """Returns the logistic functions of a second, as in SiLU, in the memory's usual traffic."""
    values = jnp.ones(2**_TRANSCENDENTAL_SIZE, jnp.float32)
    secs = _secs(jax.nn.silu, values, _CHAIN, clock)
    return 2**_TRANSCENDENTAL_SIZE / _without_start(secs, start_secs)


def _attention_per_sec(clock: Clock) -> float:
    """Returns the flops of a second of cuDNN's attention: causal, forward and backward."""

    def attend(values: tuple[jax.Array, ...]) -> jax.Array:
        out = jax.nn.dot_product_attention(*values, is_causal=True, implementation="cudnn")
        return jnp.sum(out, dtype=jnp.float32)

    shape = (_ROWS, _LENGTH, _HEADS, _WIDTH)
    keys = jax.random.split(jax.random.key(0), 3)
    values = tuple(jax.random.normal(key, shape, jnp.bfloat16) for key in keys)
    secs = _secs(jax.grad(attend), values, 1, clock)

    # 2 products forward and 5 backward, of each query with the keys up to its own position.
    pairs = _ROWS * _HEADS * _LENGTH * (_LENGTH + 1) // 2
    return 2 * 7 * pairs * _WIDTH / secs


def _without_start(secs: float, start_secs: float) -> float:
    """Returns an operation's own time; at least a tenth, as starts vary."""
    return max(secs - start_secs, 0.1 * secs)
