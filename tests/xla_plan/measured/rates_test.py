"""Times by measured rates, against sums by hand; files of rates."""

import dataclasses
import json

import pytest

from tests.xla_plan import samples
from xla_plan.cost.work import WorkSum
from xla_plan.measured import rates
from xla_plan.measured.rates import MeasuredRates, Rate

_RATES = MeasuredRates(
    device="NVIDIA H100 80GB HBM3",
    versions={"jax": "1.2.3"},
    products={"bf16": (Rate(20, 1e12), Rate(30, 5e12)), "f32": (Rate(20, 2e12),)},
    memory=(Rate(10, 1e9), Rate(20, 2e9)),
    transposes=(Rate(20, 5e8),),
    transcendentals_per_sec=1e9,
    start_secs=1e-6,
    attention_per_sec=3e12,
)


def _predicted(*work, **changes):
    return rates.predict(work, dataclasses.replace(_RATES, **changes))


def test_products_have_the_rate_of_their_size():
    of_25 = WorkSum(
        "products", "bf16", 25, runs=10, flops=6e12, accessed_bytes=0, transcendentals=0
    )
    found = _predicted(of_25)
    assert found.products == pytest.approx(6e12 / 3e12)  # Halfway between both sizes.
    assert found.starts == pytest.approx(10e-6)
    assert found.secs == pytest.approx(2.0 + 10e-6)

    small = dataclasses.replace(of_25, size=3)
    large = dataclasses.replace(of_25, size=99)
    assert _predicted(small).products == pytest.approx(6.0)
    assert _predicted(large).products == pytest.approx(6e12 / 5e12)


def test_the_longest_of_three_times_counts():
    work = WorkSum("others", "", 20, runs=4, flops=0, accessed_bytes=4 * 2**20, transcendentals=0)
    assert _predicted(work).others == pytest.approx(4 * 2**20 / 2e9)
    heavy = dataclasses.replace(work, transcendentals=1e8)
    assert _predicted(heavy).others == pytest.approx(0.1)
    product = dataclasses.replace(work, kind="products", arithmetic="bf16", flops=1e6)
    assert _predicted(product).products == pytest.approx(4 * 2**20 / 2e9)


def test_arithmetic_that_was_not_measured_has_the_rate_of_the_most_similar():
    def secs(arithmetic):
        work = WorkSum("products", arithmetic, 20, 1, 2e12, accessed_bytes=0, transcendentals=0)
        return _predicted(work).products

    assert secs("f32 highest") == secs("f32") == pytest.approx(1.0)
    assert secs("int8") == secs("bf16") == pytest.approx(2.0)


def test_a_product_has_the_rate_of_its_form():
    products = {"bf16 nn": (Rate(20, 4e12),), "bf16 tt": (Rate(20, 1e12),)}

    def secs(form):
        work = WorkSum("products", "bf16", 20, 1, 4e12, 0.0, 0.0, form)
        return _predicted(work, products=products).products

    assert secs("nn") == pytest.approx(1.0)
    assert secs("tt") == pytest.approx(4.0)
    assert secs("tn") == secs("") == pytest.approx(1.0)  # Neither was measured.


def test_transposes_have_a_rate_of_their_own():
    work = WorkSum("others", "", 20, 1, 0.0, 2**20, 0.0)
    assert _predicted(work).others == pytest.approx(2**20 / 2e9)
    work = dataclasses.replace(work, form="transposing")
    assert _predicted(work).others == pytest.approx(2**20 / 5e8)


def test_attention_has_its_own_rate_if_it_was_measured():
    work = WorkSum("attention", "bf16", 20, 1, 6e12, accessed_bytes=0, transcendentals=0)
    assert _predicted(work).attention == pytest.approx(2.0)
    assert _predicted(work, attention_per_sec=None).attention == pytest.approx(6.0)


def test_collectives_keep_the_plans_time():
    cost = dataclasses.replace(samples.cost(0.5, 0.2), overlapped_secs=0.15)
    assert rates.described(cost, _RATES).endswith(" 0.05 s a call (network 0.05)")


def test_a_file_has_all_rates(tmp_path):
    path = tmp_path / "h100.json"
    rates.save(_RATES, path)
    assert rates.load(path) == _RATES
    assert rates.load(path, "h100:16x8") == _RATES
    with pytest.raises(ValueError, match=r"rates of NVIDIA H100 80GB HBM3, expected rates of a100"):
        rates.load(path, "a100:1x8")


def test_a_wrong_file_is_named_in_one_line(tmp_path):
    path = tmp_path / "rates.json"
    with pytest.raises(ValueError, match="no such file; `xla_plan calibrate --out=.*` makes one"):
        rates.load(path)

    path.write_text("{}")
    with pytest.raises(ValueError, match="damaged or outdated .KeyError"):
        rates.load(path)

    rates.save(_RATES, path)
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"start_secs": 0.5}))
    with pytest.raises(ValueError, match="its digest does not match its contents"):
        rates.load(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"memory": ()},
        {"transposes": ()},
        {"products": {}},
        {"start_secs": -1.0},
        {"transcendentals_per_sec": 0.0},
    ],
)
def test_rates_that_cannot_be_are_refused(changes):
    with pytest.raises(ValueError, match="expected rates"):
        dataclasses.replace(_RATES, **changes)


def test_the_line_of_a_plan():
    work = WorkSum("products", "bf16", 20, 1, 2e12, accessed_bytes=0, transcendentals=0)
    cost = dataclasses.replace(samples.cost(0.5, 0.25), work=(work,))
    assert rates.described(cost, _RATES) == (
        "by rates measured on NVIDIA H100 80GB HBM3: 2.25 s a call (products 2, starts 1e-06, "
        "network 0.25)"
    )
