"""Foreign programs: this project's own, read as if somebody else had written them."""

import jax
import pytest

from lingvo_gshard.hlo import hlo_cost
from lingvo_gshard.spmd import executable, foreign, jax_private, lowering, specs
from tests.spmd import functions


@pytest.fixture(scope="module")
def own():
    return executable.compile_program(
        lowering.export(functions.sgd_step(), functions.partitioning(4))
    )


def test_our_own_program_compiles_to_the_same(own):
    mesh = specs.device_mesh(own.program.partitioning, None, "test")
    module = executable.lower(own.program, mesh).compiler_ir("stablehlo")
    program = foreign.of_module(own.program.name, module)
    compiled = foreign.compile_program(program, jax.devices()[:4])

    assert compiled.report() == own.report()
    assert hlo_cost.costs(compiled.module) == hlo_cost.costs(own.module)


def test_arguments_are_those_of_our_specs(own):
    mesh = specs.device_mesh(own.program.partitioning, None, "test")
    module = executable.lower(own.program, mesh).compiler_ir("stablehlo")
    program = foreign.of_module(own.program.name, module)
    assert program.num_partitions == 4 and program.axes == {"d": 4}

    weights, batch = own.program.args
    tensors = [*weights.Flatten(), *batch.Flatten()]
    assert [argument.array.shape for argument in program.arguments] == [t.shape for t in tensors]
    assert [argument.is_donated for argument in program.arguments] == [True, True, False, False]
    assert [argument.ways for argument in program.arguments] == [(1, 1), (1, 1), (4, 1), (4, 1)]

    # XLA counts what all arguments take on a device.
    num_bytes = sum(4 * a.local.shape[0] * a.local.shape[1] for a in program.arguments)
    assert num_bytes == own.report().argument_bytes


def test_gspmds_shardings_are_read_too():
    text = """
    module attributes {mhlo.num_partitions = 8 : i32} {
      func.func public @main(
          %a: tensor<16x8xbf16> {mhlo.sharding = "{devices=[2,1,4]<=[8] last_tile_dim_replicate}"},
          %b: tensor<ui8> {mhlo.sharding = "{replicated}", jax.buffer_donor = true},
          %c: tensor<9xi1>) -> (tensor<16x8xbf16> {mhlo.sharding = "{replicated}"}, tensor<9xi1>) {
        return %a, %c : tensor<16x8xbf16>, tensor<9xi1>
      }
    }
    """
    program = foreign.of_module("gspmd", jax_private.stablehlo_module(text.encode()))
    a, b, c = program.arguments
    assert (str(a.local), a.ways, a.is_donated) == ("bf16[8,8]", (2, 1), False)
    assert (str(b.local), b.has_sharding, b.is_donated) == ("u8[]", True, True)
    assert (str(c.local), c.has_sharding) == ("pred[9]", False)
    assert program.num_partitions == 8 and program.axes == {}
    assert program.free_results == (False, True)


def test_parts_of_axes_and_several_axes_split_a_dim():
    text = """
    module {
      sdy.mesh @mesh = <["x"=2, "y"=4]>
      func.func public @main(
          %a: tensor<16x9xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x", "y":(1)2}, {?}]>})
          -> tensor<16x9xf32> {
        return %a : tensor<16x9xf32>
      }
    }
    """
    program = foreign.of_module("shardy", jax_private.stablehlo_module(text.encode()))
    assert program.arguments[0].ways == (4, 1) and program.num_partitions == 8


def test_a_shape_that_is_not_known_is_refused():
    text = "func.func public @main(%a: tensor<?x3xf32>) { return }"
    with pytest.raises(ValueError, match="argument 0: expected a tensor of known shape, got tens"):
        foreign.of_module("dynamic", jax_private.stablehlo_module(text.encode()))
