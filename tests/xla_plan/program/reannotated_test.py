"""Programs with new annotations compute the same results and have the requested shardings."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from xla_plan.program import reannotated, stablehlo_program
from xla_spmd import stablehlo
from xla_spmd.mesh import Mesh
from xla_spmd.runtime import jax_private

_MESH = Mesh(("x", "y"), (2, 4))


def _reannotated(program, arguments, results, constraints=()):
    return reannotated.reannotated(program, _MESH, arguments, results, constraints)


def _program(**options):
    def step(state, batch):
        return state - jnp.sum(batch, 0), jnp.mean(batch)

    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def spec(shape, *axes):
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    jitted = jax.jit(step, donate_argnums=0, **options)
    return stablehlo_program.of_jitted(jitted, (spec((8,)), spec((16, 8), "data")), "cpu")


@pytest.mark.parametrize("says_results", [False, True])
def test_results_in_donated_memory_are_split_as_their_arguments(says_results):
    sharding = NamedSharding(
        AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,)), PartitionSpec()
    )
    given = _program(**({"out_shardings": (sharding, None)} if says_results else {}))
    program = _reannotated(given, [(("y",),), (("x",), ())], [((),), ()])

    state, batch = program.arguments
    assert (state.ways, batch.ways) == ((4,), (2, 1))
    assert program.axes == {"x": 2, "y": 4} and program.num_partitions == 8
    # XLA chose the sharding of the mean before, and still does.
    assert given.free_results[1] and program.free_results == (False, True)
    main = str(program.module)
    assert main[main.index("-> (") :].startswith(
        '-> (tensor<8xf32> {jax.result_info = "result[0]", sdy.sharding = #sdy.sharding<@mesh, '
        '[{"y"}]>}'
    )
    # The given program is unchanged.
    assert given.arguments[0].ways == (1,) and "data" in str(given.module)


@pytest.mark.parametrize(
    "constraint",
    [
        "sdy.sharding_constraint %a <@m, [{}, {}]> : tensor<16x8xf32>",
        'stablehlo.custom_call @Sharding(%a) {mhlo.sharding = "{replicated}"} : '
        "(tensor<16x8xf32>) -> tensor<16x8xf32>",
    ],
)
def test_constraints_of_both_partitioners_are_replaced(constraint):
    text = f"""
    module {{
      sdy.mesh @m = <["d"=8]>
      func.func public @main(%a: tensor<16x8xf32>) -> tensor<16x8xf32> {{
        %b = {constraint}
        return %b : tensor<16x8xf32>
      }}
    }}
    """
    program = stablehlo_program.of_module("text", jax_private.stablehlo_module(text.encode()))
    changed = _reannotated(program, [((), ())], [((), ())], [(("y", "x"), ())])
    (operation, _) = stablehlo.walk(changed.module.body.operations[1].regions[0].blocks[0])
    assert operation.operation.name == "sdy.sharding_constraint"
    assert str(operation.operation.attributes["sharding"]) == (
        '#sdy.sharding<@mesh, [{"y", "x"}, {}]>'
    )
    assert "mhlo.sharding" not in str(changed.module)


def test_shardings_follow_jaxs_names_of_arguments():
    def function(state, batch):
        return state["w"][0] + batch

    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    args = ({"w": [jnp.zeros((4, 8)), jnp.zeros(3)]}, jnp.zeros((4, 8)))
    specs = {"state['w'][0]": (("x",), ("y",)), "batch": (("y", "x"), ())}
    state, batch = reannotated.in_shardings(jax.jit(function), args, mesh, specs)
    assert state["w"][0].spec == PartitionSpec("x", "y")
    assert state["w"][1].spec == PartitionSpec()
    assert batch.spec == PartitionSpec(("y", "x"))
