"""The estimate of a program's table, against the times of hand-worked collectives."""

import jax
import jax.numpy as jnp
import pytest

from xla_plan.machines import hardware, topology
from xla_plan.machines.hardware import GIB
from xla_plan.program import argument_letters, stablehlo_program
from xla_plan.searches import table_cost
from xla_plan.searches.table_cost import TableCost
from xla_spmd.mesh import Mesh

# One host of eight H100: a ring over NVLink, and one product that takes long.
_TOPOLOGY = "h100:1x8"
_MESH = Mesh(("data", "model"), (2, 4))
_RATES = hardware.GENERATIONS["h100"]
_B, _M, _H = 8192, 8192, 16384  # Large, so that no product waits for memory.
_D, _T = ("data",), ("model",)


@pytest.fixture(autouse=True)
def places(monkeypatch):
    monkeypatch.setattr(topology, "places", lambda name: tuple((0, gpu) for gpu in range(8)))


def _cost(function, *shapes):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    program = stablehlo_program.of_jitted(jax.jit(function), args, "cpu")
    given = ["^x=B M", "^w=M H"] + ["^v=H M"] * (len(shapes) > 2)
    return TableCost(argument_letters.read(program, given), _TOPOLOGY)


def _product(x, w):
    return x @ w


def _compute_secs(ways):
    return 2 * _B * _M * _H / ways / _RATES.peak_flops


def _ring_secs(num_bytes, ways):
    """Returns the time of a ring, which passes on all parts except a member's own."""
    return num_bytes * (ways - 1) / ways / _RATES.link_bytes_per_sec


@pytest.mark.parametrize(
    ("rows", "ways", "passed_bytes", "members"),
    [
        # Data and tensor parallel: the devices do not communicate.
        ([("B", _D), ("H", _T)], 8, 0, 1),
        # Fully sharded weights: each device gathers the weights that it uses.
        ([("B", _D), ("M", _D)], 2, 4 * _M * _H, 2),
        # A sum over `model` is an all-reduce, of which each part passes twice.
        ([("B", _D), ("M", _T)], 8, 2 * 4 * _B // 2 * _H, 4),
        # Axes that do not split a dim do not help.
        ([("B", _D)], 2, 0, 1),
    ],
)
def test_a_products_time_follows_its_operands_and_result(rows, ways, passed_bytes, members):
    cost = _cost(_product, (_B, _M), (_M, _H))
    expected = _compute_secs(ways) + _ring_secs(passed_bytes, members)
    assert cost.secs(_MESH, tuple(rows)) == pytest.approx(expected, rel=1e-3)


def test_two_products_of_megatron_have_one_sum():
    def mlp(x, w, v):
        return (x @ w) @ v

    cost = _cost(mlp, (_B, _M), (_M, _H), (_H, _M))
    expected = 2 * _compute_secs(8) + _ring_secs(2 * 4 * _B // 2 * _M, 4)
    assert cost.secs(_MESH, (("B", _D), ("H", _T))) == pytest.approx(expected, rel=1e-3)


def test_memory_is_the_peak_of_each_split():
    cost = _cost(_product, (_B, _M), (_M, _H))
    whole = 4 * (_B * _M + _M * _H + _B * _H)
    assert cost.gib(_MESH, ()) == pytest.approx(whole / GIB)
    rows = (("B", _D), ("H", _T))
    split = 4 * (_B * _M // 2 + _M * _H // 4 + _B * _H // 8)
    assert cost.gib(_MESH, rows) == pytest.approx(split / GIB)

    arguments = [4 * _B * _M, 4 * _M * _H]
    expected = (arguments[0] / 2 + arguments[1] / 4) / GIB
    assert cost.argument_gib(_MESH, rows, arguments) == pytest.approx(expected)


def test_a_row_has_the_axes_that_earlier_rows_left():
    rows = (("B", ("data", "model")), ("M", ("data",)), ("H", ("model",)))
    assert table_cost.split("BM", rows) == (("data", "model"), ())
    assert table_cost.split("MH", rows) == (("data",), ("model",))
    assert table_cost.split("MM", rows) == (("data",), ())
    assert table_cost.split("_L", rows) == ((), ())
