"""Repairs see the placements of the program that XLA partitions."""

import pytest

from xla_spmd import stablehlo
from xla_spmd.repairs import placements
from xla_spmd.runtime import jax_private

# The conversion to HLO folds the reshapes and the broadcast, at which the propagation would stop.
_FOLDED = """
module attributes {mhlo.num_partitions = 4 : i32} {
  sdy.mesh @mesh = <["x"=2, "y"=2]>
  func.func public @main(%rows: tensor<6xf32>) -> tensor<9x2xf32> {
    %split = sdy.sharding_constraint %rows <@mesh, [{"x"}]> : tensor<6xf32>
    %one = stablehlo.reshape %split : (tensor<6xf32>) -> tensor<6x1xf32>
    %same = stablehlo.broadcast_in_dim %one, dims = [0, 1] : (tensor<6x1xf32>) -> tensor<6x1xf32>
    %back = stablehlo.reshape %same : (tensor<6x1xf32>) -> tensor<6xf32>
    %wide = stablehlo.broadcast_in_dim %back, dims = [0] : (tensor<6xf32>) -> tensor<6x2xf32>
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %padded = stablehlo.pad %wide, %zero, low = [0, 0], high = [3, 0], interior = [0, 0]
        : (tensor<6x2xf32>, tensor<f32>) -> tensor<9x2xf32>
    return %padded : tensor<9x2xf32>
  }
}
"""
# It becomes a slice.
_BECOMES_ANOTHER = """
module attributes {mhlo.num_partitions = 4 : i32} {
  sdy.mesh @mesh = <["x"=2, "y"=2]>
  func.func public @main(%rows: tensor<6x2xf32>) -> tensor<3x2xf32> {
    %split = sdy.sharding_constraint %rows <@mesh, [{"y"}, {}]> : tensor<6x2xf32>
    %two = stablehlo.constant dense<2> : tensor<i32>
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %cut = stablehlo.dynamic_slice %split, %two, %zero, sizes = [3, 2]
        : (tensor<6x2xf32>, tensor<i32>, tensor<i32>) -> tensor<3x2xf32>
    return %cut : tensor<3x2xf32>
  }
}
"""
# One tensor enters a manual computation, and two leave it.
_MANUAL = """
module attributes {mhlo.num_partitions = 4 : i32} {
  sdy.mesh @mesh = <["x"=2, "y"=2]>
  func.func public @main(%rows: tensor<8x4xf32>) -> (tensor<8x4xf32>, tensor<8x4xf32>) {
    %sine = stablehlo.sine %rows : tensor<8x4xf32>
    %both:2 = sdy.manual_computation(%sine) in_shardings=[<@mesh, [{"x"}, {"y"}]>]
        out_shardings=[<@mesh, [{"x"}, {"y"}]>, <@mesh, [{"y"}, {"x"}]>] manual_axes={"x", "y"}
        (%part: tensor<4x2xf32>) {
      sdy.return %part, %part : tensor<4x2xf32>, tensor<4x2xf32>
    } : (tensor<8x4xf32>) -> (tensor<8x4xf32>, tensor<8x4xf32>)
    %reversed = stablehlo.reverse %both#1, dims = [0] : tensor<8x4xf32>
    return %both#0, %reversed : tensor<8x4xf32>, tensor<8x4xf32>
  }
}
"""
# Between the two products, Shardy adds up over x.
_CHAINED = """
module attributes {mhlo.num_partitions = 4 : i32} {
  sdy.mesh @mesh = <["x"=2, "y"=2]>
  func.func public @main(%a: tensor<8x8xf32>, %b: tensor<8x8xf32>, %c: tensor<8x8xf32>)
      -> tensor<8x8xf32> {
    %left = sdy.sharding_constraint %a <@mesh, [{}, {"x"}]> : tensor<8x8xf32>
    %middle = sdy.sharding_constraint %b <@mesh, [{"x"}, {}]> : tensor<8x8xf32>
    %first = stablehlo.dot_general %left, %middle, contracting_dims = [1] x [0]
        : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
    %right = sdy.sharding_constraint %c <@mesh, [{}, {"y"}]> : tensor<8x8xf32>
    %second = stablehlo.dot_general %right, %first, contracting_dims = [1] x [0]
        : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
    return %second : tensor<8x8xf32>
  }
}
"""


@pytest.mark.parametrize(
    ("text", "name", "operand", "result"),
    [
        (_FOLDED, "stablehlo.pad", ('"x"', ""), ('"x"', "")),
        (_BECOMES_ANOTHER, "stablehlo.dynamic_slice", ('"y"', ""), ("", "")),
        (_MANUAL, "stablehlo.sine", ('"x"', '"y"'), ('"x"', '"y"')),
        (_MANUAL, "stablehlo.reverse", ('"y"', '"x"'), ('"y"', '"x"')),
    ],
)
def test_placements_are_those_of_the_program_that_xla_reads(text, name, operand, result):
    module = jax_private.stablehlo_module(text.encode())
    written = str(module)
    with module.context:
        views = stablehlo.walk(module.body)
        (operation,) = [view.operation for view in views if view.operation.name == name]
        ((place,),) = placements.propagated(module, [operation])
    assert place.operands[0].axes == operand
    assert place.results[0].axes == result
    assert str(module) == written


def test_products_that_fit_together_read_each_others_sums():
    module = jax_private.stablehlo_module(_CHAINED.encode())
    with module.context:
        views = stablehlo.walk(module.body)
        products = [v.operation for v in views if v.operation.name == "stablehlo.dot_general"]
        (first,), (second,) = placements.matched(module, products)
    assert [split.axes for split in first.operands] == [('"y"', '"x"'), ('"x"', "")]
    assert [split.axes for split in second.operands] == [("", '"y"'), ('"y"', "")]
