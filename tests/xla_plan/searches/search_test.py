"""Searches over the splits of programs that are not this project's."""

import dataclasses
import importlib.util
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType

import xla_plan
from tests import exhaustive
from tests.plans import tiny
from tests.xla_plan import foreign_models
from xla_plan.machines import topology
from xla_plan.plans import programs
from xla_plan.plans.programs import Options
from xla_plan.program import argument_letters, reannotated, stablehlo_program
from xla_plan.searches import search, table_trials, trials_text
from xla_plan.searches.table_trials import TableTrial, Task
from xla_plan.searches.tables import Table
from xla_spmd.mesh import Mesh


@pytest.fixture
def devices(monkeypatch):
    """Returns a function that replaces a topology by some of the devices at hand."""

    def use(count):
        monkeypatch.setattr(topology, "devices", lambda name: jax.devices()[:count])
        monkeypatch.setattr(topology, "places", lambda name: tiny.PLACES[:count])
        monkeypatch.setattr(topology, "platform", lambda name: "cpu")

    use(8)
    return use


def _perceptron(rows=64):
    """A step of two layers without any sharding, with its arguments."""

    def loss(params, batch):
        return jnp.mean((jnp.tanh(batch @ params["up"]) @ params["down"] - batch) ** 2)

    def step(params, batch):
        value, gradients = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    params = {
        "up": jax.ShapeDtypeStruct((32, 128), jnp.float32),
        "down": jax.ShapeDtypeStruct((128, 32), jnp.float32),
    }
    batch = jax.ShapeDtypeStruct((rows, 32), jnp.float32)
    return jax.jit(step, donate_argnums=0), (params, batch)


def _numbers(args):
    """Returns arrays for the ShapeDtypeStructs, with numbers as small as weights."""
    leaves, tree = jax.tree.flatten(args)
    generator = np.random.default_rng(0)
    arrays = [(0.1 * generator.normal(size=leaf.shape)).astype(leaf.dtype) for leaf in leaves]
    return jax.tree.unflatten(tree, arrays)


def _check_same_numbers(step, args, found):
    """Runs a program unchanged, and with the splits of each trial, on the devices at hand."""
    plain = jax.jit(step.__wrapped__)
    numbers = _numbers(args)
    expected = plain(*numbers)
    for trial in found.trials:
        shape = trial.table.mesh.shape
        auto = (AxisType.Auto,) * len(shape)
        count = math.prod(shape.values())
        mesh = jax.make_mesh(
            tuple(shape.values()), tuple(shape), axis_types=auto, devices=jax.devices()[:count]
        )
        shardings = reannotated.in_shardings(step, args, mesh, trial.splits)
        split = jax.jit(step.__wrapped__, in_shardings=shardings)
        for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(split(*numbers)), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


@pytest.mark.slow
def test_a_replicated_step_gets_a_table_that_computes_the_same(devices, tmp_path):
    step, args = _perceptron()
    lines = []
    found = search.search(step, args, tiny.TOPOLOGY, progress=lines.append)
    assert found.is_replicated and "64" in lines[0]
    assert "--letters='.*/up=C A'" in lines[0]

    # Each device would do all the work; now it does its part of the batch or of the hidden dim.
    best = found.best
    given = sum(found.given.plan.cost.flops_per_core.values())
    assert sum(best.plan.cost.flops_per_core.values()) == pytest.approx(given / 8, rel=0.01)
    assert best.secs.step < found.given.secs.step
    assert {letter for letter, _ in best.table.rows} & {"A", "B"}
    _check_same_numbers(step, args, found)

    text = xla_plan.search_text(found)
    assert "as it was given, replicated" in text and "jax.make_mesh((" in text

    # The printed text is Python, whose patterns match whole paths.
    pasted = {"jax": jax}
    exec(text[text.index("mesh = jax") :], pasted)
    matching = [spec for pattern, spec in pasted["specs"].items() if re.fullmatch(pattern, "batch")]
    assert matching == [reannotated.partition_spec(best.splits["batch"])]
    assert pasted["mesh"].shape == best.table.mesh.shape
    search.save(found, tmp_path)
    record = json.loads((tmp_path / search.SEARCH_JSON).read_text())
    assert record["trials"][0]["table"] == best.table.name
    assert text in (tmp_path / "report.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("count", [*exhaustive.only(1, 2, 4), 8])
@pytest.mark.parametrize("model", ["flax", *exhaustive.only("plain", "equinox")])
def test_tables_of_other_libraries_models_compute_the_same(devices, model, count):
    if model != "plain" and importlib.util.find_spec(model) is None:
        pytest.skip(f"{model} is not installed")
    devices(count)
    step, args = getattr(foreign_models, model)()
    # Without the mesh of eight, and its shardings of the results.
    bare = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), args)
    step = jax.jit(step.__wrapped__, donate_argnums=0)
    found = search.search(step, bare, tiny.TOPOLOGY)
    assert found.trials and all(trial.plan.fits for trial in found.trials)
    _check_same_numbers(step, bare, found)


@pytest.mark.slow
def test_a_file_has_the_search_of_its_function(devices, tmp_path):
    step, args = _perceptron()
    path = tmp_path / "step.export"
    path.write_bytes(export.export(step, platforms=["cpu"])(*args).serialize())
    options = {"axes": ["rows", "cols"], "letters": ["up=M H"], "mesh": "rows:4,cols:2"}
    found = search.search(step, args, tiny.TOPOLOGY, **options)
    request = search.Request(
        path=path,
        topology=tiny.TOPOLOGY,
        letters=options["letters"],
        axes=options["axes"],
        options=Options(mesh=options["mesh"]),
        folder=tmp_path,
        progress=lambda line: None,
    )
    assert search.save_search(request).splitlines()[-1] == "}"
    assert {tuple(t.table.mesh.shape.items()) for t in found.trials} == {(("rows", 4), ("cols", 2))}
    assert found.letters.arguments == (("H", "M"), ("M", "H"), ("B", "M"))
    saved = json.loads((tmp_path / search.SEARCH_JSON).read_text())
    assert [t["table"] for t in saved["trials"]] == [t.table.name for t in found.trials]
    best_secs = saved["trials"][0]["plan"]["cost"]["roofline_secs"]
    assert best_secs == dataclasses.asdict(found.best.plan.cost.roofline_secs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": "data:4"}, "mesh=data:4: expected 4 devices, got 8."),
        ({"mesh": "a:2,b:2,c:2"}, "--mesh=a:2,b:2,c:2: a search takes one or two axes"),
        ({"mesh": "a:4,b:2", "axes": ["a", "c"]}, "a search takes one or two axes, the same as"),
        ({"axes": ["a", "b", "c"]}, "--axes=a,b,c: expected one or two names of axes."),
        ({"axes": ["a", "a"]}, "--axes=a,a: expected one or two names of axes."),
        ({"letters": ["wi=M H"]}, "--letters=wi=M H: found in none of 3 arguments, such as"),
    ],
)
def test_wrong_axes_and_meshes_are_refused(devices, options, message):
    step, args = _perceptron()
    with pytest.raises(ValueError) as error:
        search.search(step, args, tiny.TOPOLOGY, **options)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_indivisible_sizes_and_other_numbers_of_devices_are_refused(devices):
    step, args = _perceptron(rows=27)
    letters = ["up=_ _"]
    with pytest.raises(ValueError, match=r"no mesh of 8 devices divides the letters .* are B 27\."):
        search.search(step, args, tiny.TOPOLOGY, letters=[*letters, "down=_ _", "batch=B _"])

    devices(4)
    step, args = foreign_models.plain()
    with pytest.raises(ValueError, match="is partitioned for 8 devices, and topology v3:2x2 has 4"):
        search.search(step, args, tiny.TOPOLOGY)


def test_a_table_that_the_compiler_refuses_is_reported(devices, monkeypatch):
    step, args = _perceptron()
    found = search.search(step, args, tiny.TOPOLOGY, mesh="data:8")
    make = programs.make

    def refuse(program, *others):
        if program.arguments[-1].ways[0] == 8:
            raise ValueError("the compiler cannot.\nA second line.")
        return make(program, *others)

    monkeypatch.setattr(programs, "make", refuse)
    chosen = Table(Mesh(("data",), (8,)), (("B", ("data",)),), secs=1.0, gib=1.0)
    task = Task(found.program, found.letters, tiny.TOPOLOGY, Options())
    trial = table_trials.compile_table(task, chosen)
    assert (trial.plan, trial.refusal) == (None, "the compiler cannot.")
    line = trials_text.trial_line(trial)
    assert line == "mesh=data:8 B:data: refused: the compiler cannot."
    assert isinstance(trial, TableTrial) and trial.secs.step == math.inf


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v3:2x2", *exhaustive.only("h100:1x8")])
def test_a_better_table_than_the_given_one_is_found_for_machines(name):
    if not topology.is_installed(name):
        pytest.skip("its compiler is not installed")
    step, args = foreign_models.plain()
    found = search.search(step, args, name)
    assert found.best is not None and found.best.plan.fits
    assert found.best.secs.step < found.given.secs.step


def test_tables_of_two_meshes_that_give_devices_the_same_parts_are_alike(devices):
    step, args = _perceptron()
    program = stablehlo_program.of_jitted(step, args, "cpu")
    letters = argument_letters.read(program, ["up=M H", "down=H M", "batch=B M"])
    task = Task(program, letters, tiny.TOPOLOGY, Options())

    def table(shape, rows):
        return Table(Mesh(tuple(shape), tuple(shape.values())), rows, 0.0, 0.0)

    flat = table({"data": 8, "model": 1}, (("B", ("data",)),))
    both = table({"data": 2, "model": 4}, (("B", ("data", "model")),))
    swapped = table({"data": 2, "model": 4}, (("B", ("model", "data")),))
    part = table({"data": 2, "model": 4}, (("B", ("model",)),))
    assert table_trials.are_alike(task, flat, both)
    assert not table_trials.are_alike(task, flat, swapped)
    assert not table_trials.are_alike(task, flat, part)
