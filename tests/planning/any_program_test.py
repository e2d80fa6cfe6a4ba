"""Plans of programs that are not this project's, from jax.jit and from files."""

import dataclasses
import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from lingvo_gshard.planning import any_program
from lingvo_gshard.planning.plan import GIB
from lingvo_gshard.planning.published import factors
from lingvo_gshard.spmd import foreign, topology
from tests.planning import foreign_models, published_steps, tiny
from tests.planning.published_steps import record

_ROLES = ("weights=params", "moments=moments", "batch=^batch")


@pytest.fixture(scope="module")
def cpu():
    """Puts the devices at hand in the place of a topology."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topology, "devices", lambda name: jax.devices())
        patch.setattr(topology, "places", lambda name: tiny.PLACES)
        patch.setattr(topology, "platform", lambda name: "cpu")
        yield


@pytest.fixture(scope="module")
def plan(cpu):
    step, args = foreign_models.plain()
    return any_program.of(
        step, args, tiny.TOPOLOGY, roles=_ROLES, categories=["mlp=mlp/", "update=momentum/"]
    )


def _file(folder, jitted, args):
    path = folder / "step.export"
    path.write_bytes(export.export(jitted, platforms=["cpu"])(*args).serialize())
    return path


def _small(axes):
    """A sum of squares, whose argument is split along `axes`."""
    jitted = jax.jit(lambda batch: jnp.sum(batch**2))
    return jitted, (foreign_models.spec((8, 4), *axes),)


def test_memory_is_that_of_each_roles_shards(plan):
    _, (state, batch) = foreign_models.plain()
    roles = plan.memory_gib.roles

    # By JAX's own shards of the arguments.
    def shard_gib(tree):
        return (
            sum(
                np.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
                for leaf in jax.tree.leaves(tree)
            )
            / GIB
        )

    assert roles["weights"].gib == roles["weights"].donated_gib == shard_gib(state["params"])
    assert roles["moments"].gib == shard_gib(state["moments"])
    assert roles["batch"].gib == shard_gib(batch) and roles["batch"].donated_gib == 0
    assert {name: role.arguments for name, role in roles.items()} == {
        "moments": 6,
        "weights": 6,
        "batch": 1,
    }
    assert plan.fits and plan.memory_gib.peak <= plan.memory_gib.capacity


def test_flops_of_products_are_those_of_the_mathematics(plan):
    m = foreign_models
    tokens = m.BATCH * m.LENGTH
    projections = 2 * tokens * 4 * m.DIM**2
    attention = 2 * tokens * 2 * m.LENGTH * m.DIM
    mlp = 2 * tokens * 2 * m.DIM * m.HIDDEN

    # Forward, once more for the gradient, and two products for each. A product whose result only
    # the output needs may be left out of the repetition.
    flops = plan.cost.flops_per_core
    per_device = m.LAYERS / 8
    expected = {"products": projections, "batched products": attention, "mlp": mlp}
    for part, once in expected.items():
        assert 3 * once * per_device <= flops[part] <= 4 * once * per_device


def test_passes_and_categories_add_up_to_the_call(plan):
    whole = plan.cost.roofline_secs.step
    by_category = plan.cost.roofline_secs_by_category
    assert sum(secs.step for secs in by_category.values()) == pytest.approx(whole)
    assert sum(secs.step for secs in plan.secs_by_pass.values()) == pytest.approx(whole)
    assert set(plan.secs_by_pass) == {"forward", "backward", "recomputed"}
    assert by_category["update"].step > 0


def test_collectives_have_their_lines(plan):
    lines = {sent.line for sent in plan.collectives}
    assert any(line and line.startswith("foreign_models.py:") for line in lines)
    counted = sum(sent.count for sent in plan.collectives)
    assert counted == sum(collective.count for collective in plan.cost.collectives)


def test_the_text_shows_roles_and_categories(plan, tmp_path):
    text = any_program.text(plan)
    for words in (
        "mesh of data 2, model 4",
        "moments",
        "batched products",
        "recomputed",
        "temporaries",
    ):
        assert words in text
    any_program.save(plan, tmp_path)
    assert json.loads((tmp_path / any_program.PLAN_JSON).read_text())["fits"] is True
    assert text in (tmp_path / "report.md").read_text()


def test_what_is_expected_of_a_step_stands_beside_the_bound(plan, monkeypatch, tmp_path):
    records = [record("a", 0.4), record("b", 0.7), record("c", 0.9)]
    path = published_steps.write(tmp_path / "bounds.json", *records)
    monkeypatch.setattr(factors, "BOUNDS", path)
    bound_secs = plan.cost.step_secs
    known = dataclasses.replace(plan, topology="v3:2x2")
    assert "bound, at the roofline: " in any_program.text(known)
    line = (
        f"expected, if a call is a training step: {bound_secs / 0.6:.3g} s a call "
        f"({bound_secs / 0.9:.3g} to {bound_secs / 0.4:.3g})"
    )
    assert line in any_program.text(known).splitlines()

    any_program.save(known, tmp_path)
    values = json.loads((tmp_path / any_program.PLAN_JSON).read_text())
    assert values["expected"]["step_secs"] == pytest.approx(bound_secs / 0.6)

    # Of another machine there is the bound alone.
    unknown = dataclasses.replace(plan, topology="v4:2x2x1")
    assert "expected on v4: unknown, for want of published steps" in any_program.text(unknown)
    any_program.save(unknown, tmp_path)
    assert json.loads((tmp_path / any_program.PLAN_JSON).read_text())["expected"] is None


def test_all_files_of_a_program_have_one_plan(cpu, tmp_path):
    jitted, args = _small(["data", "model"])
    exported = export.export(jitted, platforms=["cpu"])(*args)
    hlo = jitted.trace(*args).lower(lowering_platforms=("cpu",)).compiler_ir("hlo")
    files = {
        "step.export": exported.serialize(),
        "step.mlirbc": exported.mlir_module_serialized,
        "step.mlir": exported.mlir_module().encode(),
        "step.pb": hlo.as_serialized_hlo_module_proto(),
    }
    plans = []
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        plans.append(any_program.of_file(tmp_path / name, tiny.TOPOLOGY, None, (), ()))
    plans.append(any_program.of(jitted, args, tiny.TOPOLOGY))

    first = plans[0]
    assert first.memory_gib.roles["other arguments"].gib == 4 / GIB * 4
    for other in plans[1:]:
        assert other.memory_gib == first.memory_gib and other.cost == first.cost
        assert other.mesh == {"data": 2, "model": 4}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": "data:4,model:2"}, "--mesh=data:4,model:2: program step.export is for data:2,"),
        ({"mesh": "data:4"}, "mesh=data:4: expected 4 devices, got 8."),
        ({"roles": ["weights"]}, "--role=weights: expected LABEL=REGEX"),
        ({"roles": ["weights=("]}, "--role=weights=(: no regular expression"),
        ({"roles": ["weights=params"]}, "--role=weights=params: found in none of 1 names, such as"),
        ({"roles": ["x=batch", "y=bat"]}, "--role: 'batch' has two labels, by x=batch and y=bat."),
        ({"categories": ["mlp=/mlp/"]}, "--category=mlp=/mlp/: found in none of"),
    ],
)
def test_wrong_patterns_and_meshes_are_refused(cpu, tmp_path, options, message):
    path = _file(tmp_path, *_small(["data"]))
    given = {"mesh": None, "roles": (), "categories": ()} | options
    with pytest.raises(ValueError) as error:
        any_program.of_file(path, tiny.TOPOLOGY, **given)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_program_without_shardings_is_refused(cpu, tmp_path):
    plain = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    path = _file(tmp_path, _small([])[0], (plain,))
    with pytest.raises(ValueError, match="is partitioned for 1 devices, and topology v3:2x2 has 8"):
        any_program.of_file(path, tiny.TOPOLOGY, None, (), ())

    text = "module attributes {mhlo.num_partitions = 8 : i32} {\n  func.func public @main("
    text += "%arg0: tensor<8xf32>) -> tensor<8xf32> {\n    return %arg0 : tensor<8xf32>\n  }\n}\n"
    path.write_text(text)
    with pytest.raises(ValueError, match="step.export: no argument has a sharding; give jax.jit"):
        any_program.of_file(path, tiny.TOPOLOGY, None, (), ())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x00\x01garbage" * 40, "cannot read it"),
        (b"#!/bin/sh\necho hello\n", "this text is no program; expected a file of jax.export"),
        (b"HloModule jit_f, is_scheduled=true", "no parser for HLO's text"),
        (b"module {\n  func.func @main( {\n}\n", "cannot read it as StableHLO"),
        (b"module {\n}\n", "it has no function `main`"),
        (b"ML\xefR\rStableHLO_v9.9.9\x00\x01", "cannot read it as StableHLO"),
    ],
)
def test_a_file_that_is_no_program_is_refused_in_one_line(tmp_path, content, message):
    path = tmp_path / "program"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        foreign.read(path, "tpu")
    assert "\n" not in str(error.value)


def test_a_missing_file_and_another_platform_are_refused(tmp_path):
    with pytest.raises(ValueError, match="--program=/nowhere: there is no such file."):
        foreign.read(tmp_path.__class__("/nowhere"), "tpu")
    path = _file(tmp_path, *_small(["data"]))
    with pytest.raises(ValueError, match="exported for cpu, expected tpu alone"):
        foreign.read(path, "tpu")


def test_an_export_for_any_platform_is_read(tmp_path):
    jitted, args = _small(["data"])
    check = export.DisabledSafetyCheck.platform()
    exported = export.export(jitted, platforms=["cpu"], disabled_checks=[check])(*args)
    path = tmp_path / "step.export"
    path.write_bytes(exported.serialize())
    program = foreign.read(path, "tpu")
    assert [argument.name for argument in program.arguments] == ["batch"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v3:2x2", "h100:1x8"])
@pytest.mark.parametrize("model", ["plain", "flax", "equinox"])
def test_models_of_others_are_planned(model, name):
    if not topology.is_installed(name):
        pytest.skip("its compiler is not installed")
    if model != "plain" and importlib.util.find_spec(model) is None:
        pytest.skip(f"{model} is not installed")
    step, args = getattr(foreign_models, model)()
    plan = any_program.of(step, args, name)
    assert plan.fits and plan.cost.roofline_secs.step > 0

    # All of the state is donated, and the batch is not.
    roles = plan.memory_gib.roles
    leaves = len(jax.tree.leaves(args[0]))
    assert roles["donated arguments"].arguments == leaves
    assert roles["other arguments"].arguments == 1
    assert sum(plan.cost.flops_per_core.values()) > 0


@pytest.mark.slow
def test_an_unknown_custom_call_is_refused_in_one_line():
    if not topology.is_installed("v3:2x2"):
        pytest.skip("its compiler is not installed")

    def unknown(batch):
        return jax.ffi.ffi_call("nobodys_kernel", batch)(batch)

    with pytest.raises(ValueError, match="nobodys_kernel") as error:
        any_program.of(jax.jit(unknown), (foreign_models.spec((8, 4), "data"),), "v3:2x2")
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_what_is_too_large_has_a_plan_that_tells_by_how_much():
    if not topology.is_installed("v3:2x2"):
        pytest.skip("its compiler is not installed")
    batch = foreign_models.spec((2**16, 2**16), "data")  # 8 GiB on each core.
    plan = any_program.of(jax.jit(lambda batch: batch + 1), (batch,), "v3:2x2")
    assert not plan.fits and plan.cost is None
    assert plan.memory_gib.peak > plan.memory_gib.capacity
    assert plan.memory_gib.roles["other arguments"].gib == 8
    assert "does NOT fit, by " in any_program.text(plan)
