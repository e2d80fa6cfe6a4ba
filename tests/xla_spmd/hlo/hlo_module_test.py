"""Reads programs into records."""

import jax
import jax.numpy as jnp
import pytest

from tests.xla_spmd.hlo import programs
from xla_spmd.hlo import hlo_module
from xla_spmd.hlo.hlo_module import Array


def _scaled_sum(x, y):
    with jax.named_scope("scaled"):
        return jax.jit(lambda x, y: jnp.sum(x * y, axis=1))(x, y), y.astype(jnp.bfloat16)


def test_instructions_are_linked_to_their_operands_and_computations():
    module = programs.lowered(_scaled_sum, jnp.ones((2, 3)), jnp.ones((2, 3)))
    root = module.entry.root
    assert (root.opcode, root.arrays) == ("tuple", (Array("f32", (2,)), Array("bf16", (2, 3))))
    assert root.is_tuple and root.num_bytes == 4 * 2 + 2 * 2 * 3
    fusion, converted = root.operands
    assert fusion.opcode == "fusion" and converted.opcode == "convert"
    assert [each.opcode for each in fusion.operands] == ["parameter", "parameter"]
    assert fusion.operands[1] is converted.operands[0]
    assert converted.op_name.endswith("/scaled/convert_element_type")
    (inner,) = fusion.called
    assert inner.root.opcode == "reduce" and [each.name for each in inner.root.called]
    # A computation comes after its callees.
    places = list(map(module.computations.index, (*inner.root.called, inner, module.entry)))
    assert places == sorted(places)
    assert module.num_partitions == 1


def test_a_compiled_program_is_in_the_order_it_runs():
    compiled = jax.jit(_scaled_sum).lower(jnp.ones((2, 3)), jnp.ones((2, 3))).compile()
    module = hlo_module.read(compiled)
    lines = compiled.as_text().split("ENTRY ")[1].splitlines()[1:]
    names = [
        line.split(" = ")[0].removeprefix("  ROOT ").strip(" %") for line in lines if "=" in line
    ]
    assert [each.name for each in module.entry.instructions] == names


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [("pred", 8), ("s4", 4), ("bf16", 16), ("f8e4m3fn", 8), ("c64", 64), ("u32", 32), ("token", 0)],
)
def test_sizes_of_dtypes(dtype, bits):
    array = Array(dtype, (3, 5))
    assert array.num_bits == 15 * bits
    assert hlo_module.num_bytes([array, array]) == (30 * bits + 7) // 8
    assert str(array) == f"{dtype}[3,5]"
