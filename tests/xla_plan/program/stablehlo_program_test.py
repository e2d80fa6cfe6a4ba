"""Foreign programs: this project's own, read as if somebody else had written them."""

import jax
import pytest

from lingvo_gshard.spmd import executable, lowering, specs
from tests.spmd import functions
from xla_plan.program import program_file, stablehlo_program
from xla_spmd.annotations import shardy
from xla_spmd.hlo import hlo_cost
from xla_spmd.runtime import jax_private


@pytest.fixture(scope="module")
def own():
    return executable.compile_program(
        lowering.export(functions.sgd_step(), functions.partitioning(4))
    )


def test_our_own_program_compiles_to_the_same(own):
    mesh = specs.device_mesh(own.program.partitioning, None, "test")
    module = executable.lower(own.program, mesh).compiler_ir("stablehlo")
    program = stablehlo_program.of_module(own.program.name, module)
    compiled = stablehlo_program.compile_program(program, jax.devices()[:4])

    assert compiled.report() == own.report()
    assert hlo_cost.costs(compiled.module) == hlo_cost.costs(own.module)


def test_arguments_follow_our_specs(own):
    mesh = specs.device_mesh(own.program.partitioning, None, "test")
    module = executable.lower(own.program, mesh).compiler_ir("stablehlo")
    program = stablehlo_program.of_module(own.program.name, module)
    assert program.num_partitions == 4 and program.axes == {"d": 4}

    weights, batch = own.program.args
    tensors = [*weights.Flatten(), *batch.Flatten()]
    assert [argument.array.shape for argument in program.arguments] == [t.shape for t in tensors]
    assert [argument.is_donated for argument in program.arguments] == [True, True, False, False]
    assert [argument.ways for argument in program.arguments] == [(1, 1), (1, 1), (4, 1), (4, 1)]

    # XLA counts the bytes of all arguments on a device.
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
    program = stablehlo_program.of_module("gspmd", jax_private.stablehlo_module(text.encode()))
    a, b, c = program.arguments
    assert (str(a.local), a.ways, a.is_donated) == ("bf16[8,8]", (2, 1), False)
    assert (str(b.local), b.has_sharding, b.is_donated) == ("u8[]", True, True)
    assert (str(c.local), c.has_sharding) == ("pred[9]", False)
    assert program.num_partitions == 8 and program.axes == {}
    assert program.free_results == (False, True)


_GSPMD_HLO = """HloModule f, num_partitions=8

ENTRY m {{
  x = f32[64,32] parameter(0), sharding={{devices=[8,1]<=[8]}}
  w = f32[32,16] parameter(1), sharding={{devices=[2,2,2]<=[8] last_tile_dim_replicate}}
  y = f32[64,16] dot(x, w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}{sharding}
  ROOT t = (f32[64,16], f32[64,16]) tuple(y, y), sharding={{{{devices=[8,1]<=[8]}}, {{replicated}}}}
}}
"""


@pytest.mark.parametrize(
    ("sharding", "reason"),
    [
        ("{devices=[4,2]<=[8]}", ""),
        (
            "{maximal device=3}",
            "neither replicated nor tiled over all devices of the mesh {'d': 8}",
        ),
    ],
)
def test_gspmds_annotations_are_rewritten_where_shardy_has_them(tmp_path, sharding, reason):
    path = tmp_path / "step.hlo"
    path.write_text(_GSPMD_HLO.format(sharding=f", sharding={sharding}"))
    program = program_file.read(path, "cpu")
    compiled = stablehlo_program.compile_program(program, jax.devices())
    assert reason in compiled.gspmds_reason
    assert bool(reason) == bool(compiled.gspmds_reason)
    assert compiled.report().count("all-gather") + compiled.report().count("all-to-all") > 0


def test_each_device_order_has_a_separate_mesh():
    """The device orders of an argument and of an inner annotation both get a mesh."""
    text = """
    module attributes {mhlo.num_partitions = 4 : i32} {
      func.func public @main(%x: tensor<8xf32> {mhlo.sharding = "{devices=[4]3,1,0,2}"})
          -> (tensor<8xf32> {mhlo.sharding = "{devices=[4]3,1,0,2}"}) {
        %y = stablehlo.custom_call @Sharding(%x) {mhlo.sharding = "{devices=[4]1,0,3,2}"}
            : (tensor<8xf32>) -> tensor<8xf32>
        return %y : tensor<8xf32>
      }
    }
    """
    module = jax_private.stablehlo_module(text.encode())
    rewritten = shardy.of_gspmd("orders", module, 4)
    assert rewritten.operation.verify()
    assert '@device_order_0 = <["dim0"=4], device_ids=[3, 1, 0, 2]>' in str(rewritten)
    assert '@device_order_1 = <["dim0"=4], device_ids=[1, 0, 3, 2]>' in str(rewritten)


def test_a_module_without_a_name_compiles(tmp_path):
    path = tmp_path / "nameless.mlir"
    path.write_text(
        """
        module attributes {mhlo.num_partitions = 2 : i32} {
          sdy.mesh @mesh = <["d"=2]>
          func.func public @main(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"d"}]>})
              -> tensor<8xf32> {
            %y = stablehlo.tanh %x : tensor<8xf32>
            return %y : tensor<8xf32>
          }
        }
        """
    )
    program = program_file.read(path, "cpu")
    assert (
        stablehlo_program.compile_program(program, jax.devices()[:2]).report().argument_bytes == 16
    )


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
    program = stablehlo_program.of_module("shardy", jax_private.stablehlo_module(text.encode()))
    assert program.arguments[0].ways == (4, 1) and program.num_partitions == 8


def test_a_shape_that_is_not_known_is_refused():
    text = "func.func public @main(%a: tensor<?x3xf32>) { return }"
    with pytest.raises(ValueError, match="argument 0: expected a tensor of known shape, got tens"):
        stablehlo_program.of_module("dynamic", jax_private.stablehlo_module(text.encode()))


_TWO_MESHES = """
module attributes {mhlo.num_partitions = 8 : i32} {
  sdy.mesh @flat = <["d"=8]>
  sdy.mesh @grid = <["x"=2, "d"=4]>
  sdy.mesh @one = <[], device_ids=[0]>
  func.func public @main(
      %a: tensor<16x8xf32> {sdy.sharding = #sdy.sharding<@flat, [{"d"}, {}]>},
      %b: tensor<16x8xf32> {sdy.sharding = #sdy.sharding<@grid, [{"d"}, {"x"}]>},
      %c: tensor<16x8xf32> {sdy.sharding = #sdy.sharding<@grid, [{}, {"x"}]>,
                            mhlo.memory_kind = "pinned_host"})
      -> (tensor<16x8xf32>) {
    return %a : tensor<16x8xf32>
  }
}
"""


def test_each_sharding_has_the_sizes_of_its_own_mesh():
    program = stablehlo_program.of_module("two", jax_private.stablehlo_module(_TWO_MESHES.encode()))
    assert [argument.ways for argument in program.arguments] == [(8, 1), (4, 2), (1, 2)]
    assert [argument.is_on_host for argument in program.arguments] == [False, False, True]
    # The mesh of most arguments is the program's.
    assert program.axes == {"x": 2, "d": 4} and program.num_partitions == 8


def test_meshes_of_different_numbers_of_devices_are_refused():
    module = jax_private.stablehlo_module(_TWO_MESHES.replace('"x"=2, ', '"x"=4, ').encode())
    with pytest.raises(ValueError, match="program two: its meshes have different numbers of dev"):
        stablehlo_program.of_module("two", module)


def test_other_functions_than_jits_are_refused():
    with pytest.raises(ValueError, match="program <lambda>: expected a function of jax.jit."):
        stablehlo_program.of_jitted(jax.pmap(lambda x: 2 * x), (1.0,), "tpu")


def test_programs_of_several_replicas_are_refused(tmp_path):
    hlo = (
        "HloModule pmap, replica_count=4\n"
        "sum { a = f32[] parameter(0)\n b = f32[] parameter(1)\n ROOT c = f32[] add(a, b) }\n"
        "ENTRY main { x = f32[8]{0} parameter(0)\n ROOT y = f32[8]{0} all-reduce(x), "
        "replica_groups={{0,1},{2,3}}, to_apply=sum }\n"
    )
    (tmp_path / "pmap.txt").write_text(hlo)
    # A serialized module does not store the number, but its collectives show it.
    (tmp_path / "pmap.pb").write_bytes(jax_private.hlo_from_text(hlo.encode()))
    for name in ("pmap.txt", "pmap.pb"):
        with pytest.raises(ValueError, match=f"{name}: it is for 4 replicas, expected 1"):
            program_file.read(tmp_path / name, "cpu")

    text = "module attributes {mhlo.num_replicas = 4 : i32} {"
    module = jax_private.stablehlo_module(
        _TWO_MESHES.replace("module attributes {mhlo.num_partitions = 8 : i32} {", text).encode()
    )
    with pytest.raises(ValueError, match="program two: it is for 4 replicas, expected 1"):
        stablehlo_program.of_module("two", module)
