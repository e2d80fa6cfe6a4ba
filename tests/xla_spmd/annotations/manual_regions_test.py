"""Manual regions of programs that others wrote with GSPMD's conversions."""

import jax
import pytest

from xla_plan.program import stablehlo_program
from xla_spmd.annotations import shardy
from xla_spmd.runtime import jax_private

_ENTERED = """
  %split = stablehlo.custom_call @Sharding(%x) {mhlo.sharding = "{devices=[8,1]<=[8]}"}
      : (tensor<8x4xf32>) -> tensor<8x4xf32>
  %part = stablehlo.custom_call @SPMDFullToShardShape(%split) {mhlo.sharding = "{manual}"}
      : (tensor<8x4xf32>) -> tensor<1x4xf32>
"""
_LEFT = """
  %whole = stablehlo.custom_call @SPMDShardToFullShape(%sum)
      {mhlo.sharding = "{devices=[8,1]<=[8]}"} : (tensor<1x4xf32>) -> tensor<8x4xf32>
"""
# The region reads a value that is computed outside of it, from an argument.
_OF_AN_ARGUMENT = f"""
module @outside attributes {{mhlo.num_partitions = 8 : i32}} {{
  func.func public @main(%x: tensor<8x4xf32>, %bias: tensor<4xf32>) -> tensor<8x4xf32> {{
    %row = stablehlo.broadcast_in_dim %bias, dims = [1] : (tensor<4xf32>) -> tensor<1x4xf32>
    {_ENTERED}
    %sum = stablehlo.add %part, %row : tensor<1x4xf32>
    {_LEFT}
    return %whole : tensor<8x4xf32>
  }}
}}
"""
# The same in a loop, whose body reads a value of the block around it.
_OF_AN_OUTER_BLOCK = f"""
module @outside attributes {{mhlo.num_partitions = 8 : i32}} {{
  func.func public @main(%start: tensor<8x4xf32>, %bias: tensor<4xf32>) -> tensor<8x4xf32> {{
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %three = stablehlo.constant dense<3> : tensor<i32>
    %exp = stablehlo.exponential %bias : tensor<4xf32>
    %ends:2 = stablehlo.while(%i = %zero, %x = %start) : tensor<i32>, tensor<8x4xf32>
    cond {{
      %goes_on = stablehlo.compare LT, %i, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %goes_on : tensor<i1>
    }} do {{
      %next = stablehlo.add %i, %one : tensor<i32>
      %row = stablehlo.broadcast_in_dim %exp, dims = [1] : (tensor<4xf32>) -> tensor<1x4xf32>
      {_ENTERED}
      %sum = stablehlo.add %part, %row : tensor<1x4xf32>
      {_LEFT}
      stablehlo.return %next, %whole : tensor<i32>, tensor<8x4xf32>
    }}
    return %ends#1 : tensor<8x4xf32>
  }}
}}
"""


@pytest.mark.parametrize("text", [_OF_AN_ARGUMENT, _OF_AN_OUTER_BLOCK])
def test_a_region_takes_a_value_that_is_computed_outside(text):
    module = jax_private.stablehlo_module(text.encode())
    rewritten = shardy.of_gspmd("outside", module, 8)
    assert rewritten.operation.verify()
    (line,) = [line for line in str(rewritten).splitlines() if "sdy.manual_computation" in line]
    assert 'in_shardings=[<@mesh, [{"d"}, {}]>, <@mesh, [{}, {}]>]' in line
    assert "custom_call" not in str(rewritten)

    compiled = stablehlo_program.compile_program(
        stablehlo_program.of_module("outside", module), jax.devices()
    )
    assert compiled.gspmds_reason == ""


def test_a_part_that_has_not_entered_is_refused():
    text = f"""
    module attributes {{mhlo.num_partitions = 8 : i32}} {{
      func.func public @main(%sum: tensor<1x4xf32>) -> tensor<8x4xf32> {{
        {_LEFT}
        return %whole : tensor<8x4xf32>
      }}
    }}
    """
    module = jax_private.stablehlo_module(text.encode())
    message = (
        r"alien: .* of shape \[1, 4\] leaves a manual region that it has not entered; expected"
    )
    with pytest.raises(ValueError, match=message):
        shardy.of_gspmd("alien", module, 8)


def test_random_numbers_that_two_regions_share_are_refused():
    """Each would draw different numbers. The second region needs the result of the first."""
    text = """
    module attributes {mhlo.num_partitions = 8 : i32} {
      func.func public @main(%x: tensor<8x1xf32>) -> tensor<8x1xf32> {
        %one = stablehlo.constant dense<1.0> : tensor<f32>
        %shape = stablehlo.constant dense<1> : tensor<2xi64>
        %split = stablehlo.custom_call @Sharding(%x) {mhlo.sharding = "{devices=[8,1]<=[8]}"} : (tensor<8x1xf32>) -> tensor<8x1xf32>
        %part = stablehlo.custom_call @SPMDFullToShardShape(%split) {mhlo.sharding = "{manual}"} : (tensor<8x1xf32>) -> tensor<1x1xf32>
        %low = stablehlo.reshape %part : (tensor<1x1xf32>) -> tensor<f32>
        %drawn = stablehlo.rng %low, %one, %shape, distribution = UNIFORM : (tensor<f32>, tensor<f32>, tensor<2xi64>) -> tensor<1x1xf32>
        %first = stablehlo.custom_call @SPMDShardToFullShape(%drawn) {mhlo.sharding = "{devices=[8,1]<=[8]}"} : (tensor<1x1xf32>) -> tensor<8x1xf32>
        %again = stablehlo.custom_call @Sharding(%first) {mhlo.sharding = "{devices=[8,1]<=[8]}"} : (tensor<8x1xf32>) -> tensor<8x1xf32>
        %entered = stablehlo.custom_call @SPMDFullToShardShape(%again) {mhlo.sharding = "{manual}"} : (tensor<8x1xf32>) -> tensor<1x1xf32>
        %sum = stablehlo.add %drawn, %entered : tensor<1x1xf32>
        %second = stablehlo.custom_call @SPMDShardToFullShape(%sum) {mhlo.sharding = "{devices=[8,1]<=[8]}"} : (tensor<1x1xf32>) -> tensor<8x1xf32>
        return %second : tensor<8x1xf32>
      }
    }
    """  # noqa: E501
    module = jax_private.stablehlo_module(text.encode())
    message = r"dice: .* of shape \[1, 1\] is drawn at random in a manual region, and another"
    with pytest.raises(ValueError, match=message):
        shardy.of_gspmd("dice", module, 8)
