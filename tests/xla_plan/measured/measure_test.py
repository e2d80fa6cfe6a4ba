"""Measured rates of this machine's CPU, and the functions that measure them."""

import jax.numpy as jnp
import numpy as np
import pytest

from xla_plan.cost import work
from xla_plan.measured import measure
from xla_plan.measured.measure import cpu_clock
from xla_spmd.hlo import hlo_cost, hlo_module


@pytest.mark.exhaustive
@pytest.mark.slow
def test_all_rates_of_a_device_are_measured(monkeypatch):
    monkeypatch.setattr(measure, "_PRODUCT_SIDES", (128, 256))
    monkeypatch.setattr(measure, "_MEMORY_SIZES", (16, 20))
    monkeypatch.setattr(measure, "_TRANSPOSED_SIZES", (15, 17))
    monkeypatch.setattr(measure, "_MEMORY_BYTES", 2**22)
    monkeypatch.setattr(measure, "_TRANSCENDENTAL_SIZE", 14)
    monkeypatch.setattr(measure, "_LEAST_SECS", 0.002)
    monkeypatch.setattr(measure, "_REPEATS", 2)
    told = []
    rates = measure.measure(told.append, cpu_clock)

    assert rates.device == "cpu" and rates.attention_per_sec is None
    # XLA converts most transposed products of bfloat16 on CPUs to float32, but not all.
    measured = {"f32 nn", "f32 nt", "f32 tn", "f32 tt", "bf16 nn", "bf16 nt", "bf16 tt"}
    assert rates.products.keys() == measured
    for by_size in (*rates.products.values(), rates.memory, rates.transposes):
        assert len(by_size) == 2 and all(rate.per_sec > 1e6 for rate in by_size)
    # A product of 128 x 128 has 2 * 128^3 = 2^22 flops.
    assert [rate.size for rate in rates.products["f32 nn"]] == [22, 25]
    assert [rate.size for rate in rates.transposes] == [15, 17]
    assert len(told) == 1 + 2 * len(measured) + 2 + 2 + 1


def test_the_time_of_a_chain_is_the_clocks():
    """A clock that counts the operations that the loop has run, as if each took 2 seconds."""
    runs = []

    class _Clock:
        now = 0.0

        def __call__(self):
            # Each call of the loop is between two readings.
            self.now += 2.0 * sum(runs) + (1.0 if runs else 0.0)
            runs.clear()
            return self.now

    def run(trips, value):
        runs.append(3 * int(trips))
        return value

    assert measure.chain_secs(run, jnp.ones(2), 3, _Clock()) == pytest.approx(2.0)


@pytest.mark.slow
def test_rows_are_updated_in_place():
    """A chain that copied all rows would measure the copy."""
    rows = jnp.ones((64, 1024), jnp.float32)
    run = measure.chain(measure._next_row, (jnp.int32(0), rows), 2)
    costs = hlo_cost.costs(hlo_module.read(run))
    # A row of 4 KiB is read and written, with its number.
    assert max(cost.accessed_bytes for cost in costs) < 3 * 4096
    assert run.memory_analysis().alias_size_in_bytes >= rows.nbytes
    assert run.memory_analysis().temp_size_in_bytes < rows.nbytes


@pytest.mark.parametrize("side", [2, 64])
def test_chains_of_products_neither_grow_nor_vanish(side):
    weights = np.asarray(measure._orthogonal(side))
    np.testing.assert_allclose(weights @ weights.T, np.eye(side), atol=1e-5)


def test_rows_are_changed_one_by_one():
    row, rows = measure._next_row((jnp.int32(1), jnp.full((2, 3), 3.0)))
    assert row == 0
    np.testing.assert_array_equal(rows, [[3.0] * 3, [2.0] * 3])


def test_the_work_of_a_program_is_summed_by_kind_and_size(monkeypatch):
    import jax

    def step(x, w):
        y = jnp.einsum("bij,bjk->bik", x, w)
        return jnp.exp(y)

    shapes = [jax.ShapeDtypeStruct((4, 64, 64), jnp.float32)] * 2
    compiled = jax.jit(step).lower(*shapes).compile()
    sums = work.sums(hlo_cost.costs(hlo_module.read(compiled)))
    product = next(each for each in sums if each.kind == work.Work.PRODUCTS)
    # Four pairs of matrices, each with 2 * 64^3 = 2^19 flops.
    assert (product.size, product.flops, product.arithmetic) == (19, 4 * 2**19, "f32")
    assert sum(each.transcendentals for each in sums) == 4 * 64 * 64
