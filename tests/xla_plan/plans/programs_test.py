"""Plans of programs that are not this project's, from jax.jit and from files."""

import contextlib
import dataclasses
import importlib.util
import os
import pathlib
import subprocess
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental import pallas

import xla_plan
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.plans import run_programs
from lingvo_gshard.plans.plan import TRAIN
from lingvo_gshard.spmd import executable, specs
from tests import exhaustive, without
from tests.plans import tiny
from tests.xla_plan import foreign_models
from tests.xla_spmd import compilers
from xla_plan.machines import topology
from xla_plan.machines.hardware import GIB
from xla_plan.plans import own_process, plan_folder, program_text, programs
from xla_plan.plans.programs import FileRequest, Options
from xla_plan.program import program_file, stablehlo_program
from xla_spmd.hlo.hlo_module import Array

_ROOT = pathlib.Path(__file__).parents[2]
_ROLES = ("weights=params", "moments=moments", "batch=^batch")


@contextlib.contextmanager
def _cpu():
    """Replaces a topology by the devices at hand."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topology, "devices", lambda name: jax.devices())
        patch.setattr(topology, "places", lambda name: tiny.PLACES)
        patch.setattr(topology, "platform", lambda name: "cpu")
        yield


@pytest.fixture
def cpu():
    with _cpu():
        yield


@pytest.fixture(scope="module")
def plan():
    step, args = foreign_models.plain()
    with _cpu():
        return programs.of(
            step, args, tiny.TOPOLOGY, roles=_ROLES, categories=["mlp=mlp/", "update=momentum/"]
        )


def _file(folder, jitted, args):
    path = folder / "step.export"
    path.write_bytes(export.export(jitted, platforms=["cpu"])(*args).serialize())
    return path


def _of_file(path, name=tiny.TOPOLOGY, **options):
    """Returns the plan of the program in a file, for options by name."""
    return programs.of_file(FileRequest(path, name, Options(**options)))


def _files(jitted, args):
    """A program in each format, for the CPU."""
    exported = export.export(jitted, platforms=["cpu"])(*args)
    hlo = jitted.trace(*args).lower(lowering_platforms=("cpu",)).compiler_ir("hlo")
    return {
        "step.export": exported.serialize(),
        "step.mlirbc": exported.mlir_module_serialized,
        "step.mlir": exported.mlir_module().encode(),
        "step.pb": hlo.as_serialized_hlo_module_proto(),
        "step.txt": hlo.as_hlo_module().to_string().encode(),
    }


def _small(axes):
    """A sum of squares, whose argument is split along `axes`."""
    jitted = jax.jit(lambda batch: jnp.sum(batch**2))
    return jitted, (foreign_models.spec((8, 4), *axes),)


def test_memory_is_the_size_of_each_role_s_shards(plan):
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


def test_flops_of_products_equal_the_formula(plan):
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
    by_pass = plan.cost.roofline_secs_by_pass
    assert sum(secs.step for secs in by_pass.values()) == pytest.approx(whole)
    assert set(by_pass) == {"forward", "backward", "recomputed"}
    assert by_category["update"].step > 0


def test_collectives_have_their_lines(plan):
    lines = {collective.line for collective in plan.cost.collectives}
    assert any(line and line.startswith("foreign_models.py:") for line in lines)


def test_the_text_shows_roles_and_categories(plan, tmp_path):
    text = program_text.text(plan)
    for words in (
        "mesh of data 2, model 4",
        "moments",
        "batched products",
        "recomputed",
        "temporaries",
    ):
        assert words in text


def test_all_files_of_a_program_have_one_plan(cpu, tmp_path):
    jitted, args = _small(["data", "model"])
    plans = []
    for name, content in _files(jitted, args).items():
        (tmp_path / name).write_bytes(content)
        plans.append(_of_file(tmp_path / name))
    plans.append(xla_plan.plan(jitted, args, tiny.TOPOLOGY))

    first = plans[0]
    assert first.memory_gib.roles["other arguments"].gib == 4 / GIB * 4
    for other in plans[1:]:
        assert other.memory_gib == first.memory_gib and other.cost == first.cost
        assert other.mesh == {"data": 2, "model": 4}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": "data:4,model:2"}, "--mesh=data:4,model:2: program step.export is for data:2,"),
        ({"roles": ["weights"]}, "--role=weights: expected LABEL=REGEX"),
        ({"roles": ["weights=params"]}, "--role=weights=params: found in none of 1 names, such as"),
        ({"roles": ["x=batch", "y=bat"]}, "--role: 'batch' has two labels, by x=batch and y=bat."),
        ({"categories": ["mlp=/mlp/"]}, "--category=mlp=/mlp/: found in none of"),
        ({"kernel_flops": ["flash=3"]}, "flops of a kernel 'flash': the program's kernels are: no"),
    ],
)
def test_wrong_patterns_and_meshes_are_refused(cpu, tmp_path, options, message):
    path = _file(tmp_path, *_small(["data"]))
    with pytest.raises(ValueError) as error:
        _of_file(path, **options)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_program_without_shardings_is_refused(cpu, tmp_path):
    plain = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    path = _file(tmp_path, _small([])[0], (plain,))
    with pytest.raises(ValueError, match="step.export: no argument has a sharding; give jax.jit"):
        _of_file(path)

    text = "module attributes {mhlo.num_partitions = 8 : i32} {\n  func.func public @main("
    text += "%arg0: tensor<8xf32>) -> tensor<8xf32> {\n    return %arg0 : tensor<8xf32>\n  }\n}\n"
    path.write_text(text)
    with pytest.raises(ValueError, match="step.export: no argument has a sharding; give jax.jit"):
        _of_file(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty."),
        (b"\x00\x01garbage" * 40, "it is not a file of jax.export, or was cut short; JAX"),
        (
            b"#!/bin/sh\necho hello\n",
            "this text is not a program; JAX .* reads a file of jax.export,",
        ),
        (
            b"HloModule f, is_scheduled=true\n\nENTRY m {\n  ROOT p = f32[] parameter(0)\n}\n",
            "this HLO is compiled already; give its source.",
        ),
        (b"module {\n  func.func @main( {\n}\n", '"-":2:19: expected non-function type; JAX'),
        (
            b"ML\xefR\rStableHLO_v9.9.9\x00\x01",
            "it is of StableHLO 9.9.9, expected 1.* or older; J",
        ),
    ],
)
def test_a_file_of_another_kind_is_refused_in_one_line(tmp_path, capfd, content, message):
    path = tmp_path / "program"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        program_file.read(path, "tpu")
    assert "\n" not in str(error.value) and not capfd.readouterr().err


def test_files_that_were_cut_short_are_refused_in_one_line(tmp_path, capfd):
    for name, content in _files(*_small(["data"])).items():
        path = tmp_path / name
        path.write_bytes(content[: len(content) // 2])
        with pytest.raises(ValueError, match=f"{name}: .*; JAX .* reads a file of") as error:
            program_file.read(path, "cpu")
        assert "\n" not in str(error.value) and not capfd.readouterr().err


def test_an_export_of_another_version_is_refused(tmp_path, monkeypatch):
    path = _file(tmp_path, *_small(["data"]))
    monkeypatch.setattr(export, "minimum_supported_calling_convention_version", 7)
    monkeypatch.setattr(export, "maximum_supported_calling_convention_version", 8)
    message = r"it has version \d+ of jax.export's calling convention, expected 7 to 8; JAX"
    with pytest.raises(ValueError, match=message):
        program_file.read(path, "cpu")


def test_lowered_text_keeps_the_names_of_arguments_and_any_tree_has_bytecode(tmp_path):
    jitted, (batch,) = _small(["data"])
    step = jax.jit(lambda pair: jitted(pair.one))
    args = (_Unserializable(batch),)
    lowered = step.trace(*args).lower(lowering_platforms=("cpu",))
    exported = export.export(step, platforms=["cpu"])(*args)
    with pytest.raises(ValueError, match="serial"):
        exported.serialize()

    text = tmp_path / "step.mlir"
    text.write_text(lowered.as_text(debug_info=True))
    bytecode = tmp_path / "step.mlirbc"
    bytecode.write_bytes(exported.mlir_module_serialized)
    for path in (text, bytecode):
        (argument,) = program_file.read(path, "cpu").arguments
        assert argument.name == "pair.one" and argument.has_sharding


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class _Unserializable:
    """A tree that jax.export does not know, as an optimizer's state is."""

    one: Any


def test_a_file_takes_a_device_order_like_a_mesh(cpu, tmp_path):
    path = _file(tmp_path, *_small(["data"]))
    order = (7, 6, 5, 4, 3, 2, 1, 0)
    plain = _of_file(path)
    kept = _of_file(path, device_order=order)
    assert kept.memory_gib == plain.memory_gib
    with pytest.raises(ValueError, match="must order 0 to 7"):
        _of_file(path, device_order=(0, 0))


def test_slices_that_cannot_be_timed_are_refused_before_they_are_compiled(
    cpu, tmp_path, monkeypatch
):
    path = _file(tmp_path, *_small(["data"]))
    monkeypatch.setattr(topology, "compile_program", lambda *_: pytest.fail("it was compiled"))
    with pytest.raises(ValueError, match="no rate is published for the network between slices"):
        _of_file(path, "v4:2x2x1x2slices")


def test_arguments_in_the_hosts_memory_are_not_counted_on_the_device():
    moments = stablehlo_program.Argument(
        "moments", Array("f32", (1024, 1024)), (8, 1), True, False, True
    )
    weights = dataclasses.replace(moments, name="weights", is_on_host=False)
    program = stablehlo_program.StablehloProgram("step", None, 8, {"d": 8}, (weights, moments), ())
    (role,) = programs._memory_by_role(program, ()).values()
    assert role.arguments == 2
    assert role.gib == role.host_gib == 4 * 1024 * 1024 / 8 / GIB


def test_missing_and_large_files_are_refused_before_reading(tmp_path):
    with pytest.raises(ValueError, match="--program=/nowhere: there is no such file."):
        program_file.read(pathlib.Path("/nowhere"), "tpu")
    with pytest.raises(ValueError, match="this is a folder, expected a file."):
        program_file.read(tmp_path, "tpu")

    sparse = tmp_path / "sparse"
    with sparse.open("wb") as file:
        file.truncate(5 * 2**30)
    with pytest.raises(ValueError, match="5.0 GiB are too large for a program, at most 2 GiB are"):
        program_file.read(sparse, "tpu")


def test_another_platform_is_refused(tmp_path):
    path = _file(tmp_path, *_small(["data"]))
    with pytest.raises(ValueError, match="exported for cpu, expected tpu alone"):
        program_file.read(path, "tpu")


def test_the_types_of_an_exports_trees_need_not_be_known(tmp_path):
    jitted, (batch,) = _small(["data"])
    step = jax.jit(lambda pair: jitted(pair.one))
    export.register_pytree_node_serialization(
        _Pair, serialized_name="Pair", serialize_auxdata=bytes, deserialize_auxdata=_unknown
    )
    path = _file(tmp_path, step, (_Pair(batch),))
    with pytest.raises(ValueError, match="a library that is not here"):
        export.deserialize(bytearray(path.read_bytes()))
    assert [argument.name for argument in program_file.read(path, "cpu").arguments] == ["pair.one"]


@jax.tree_util.register_pytree_with_keys_class
class _Pair:
    def __init__(self, one):
        self.one = one

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("one"), self.one)], b""

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def _unknown(_):
    raise ValueError("a library that is not here")


def test_the_memory_that_hlo_gives_to_results_is_donated(tmp_path):
    jitted = jax.jit(lambda state, batch: (state + batch.sum(), batch), donate_argnums=0)
    args = (foreign_models.spec((8, 4), "data"), foreign_models.spec((6, 5)))
    for name, content in _files(jitted, args).items():
        path = tmp_path / name
        path.write_bytes(content)
        program = program_file.read(path, "cpu")
        donated = [argument.name for argument in program.arguments if argument.is_donated]
        assert (name, donated) == (name, ["state"])
        # Four rows of four numbers on each of the two devices along `data`.
        report = stablehlo_program.compile_program(program, jax.devices()).report()
        assert report.alias_bytes == 4 * 4 * 4


def test_a_plan_is_kept_until_something_changes(cpu, tmp_path, monkeypatch):
    made = []
    make = programs.make

    def counted(*args):
        made.append(args)
        return make(*args)

    monkeypatch.setattr(programs, "make", counted)
    monkeypatch.setattr(own_process, "call", lambda function, request: function(request))
    path = _file(tmp_path, *_small(["data"]))

    def load_or_make(**options):
        request = FileRequest(path, tiny.TOPOLOGY, Options(**options))
        return programs.load_or_make(request, tmp_path / "PLAN")

    first = load_or_make()
    assert load_or_make() == first and len(made) == 1
    weights = load_or_make(roles=["x=batch"])
    assert weights.memory_gib.roles.keys() == {"x"} and len(made) == 2
    assert load_or_make(roles=["x=batch"]) == weights and len(made) == 2

    # Another program, other options, a damaged plan.
    _file(tmp_path, *_small(["data", "model"]))
    second = load_or_make()
    assert second.memory_gib != first.memory_gib and len(made) == 3
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=8192")
    load_or_make()
    assert len(made) == 4
    plan_json = tmp_path / "PLAN" / plan_folder.PLAN_JSON
    plan_json.write_text(plan_json.read_text()[:-9])
    assert load_or_make().memory_gib == second.memory_gib and len(made) == 5
    # One digit, which is JSON like any other.
    plan_json.write_text(plan_json.read_text().replace('"capacity": 1', '"capacity": 2'))
    assert load_or_make().memory_gib == second.memory_gib and len(made) == 6
    (tmp_path / "PLAN" / "fingerprint").write_bytes(b"\xff")
    assert load_or_make().memory_gib == second.memory_gib and len(made) == 7


@pytest.mark.slow
def test_a_compiler_that_dies_ends_no_other_process(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "of_file", _abort)
    path = tmp_path / "step.hlo"
    path.write_text("HloModule f")
    with pytest.raises(ValueError, match="step.hlo: the process that compiled it died; .*damaged"):
        programs.load_or_make(FileRequest(path, tiny.TOPOLOGY), tmp_path / "PLAN")


def _abort(request):
    os.abort()


def test_arguments_that_are_whole_on_every_device_are_suspicious(cpu):
    weights = foreign_models.spec((1024, 512))
    batch = foreign_models.spec((1024, 1024), "data")
    jitted = jax.jit(lambda weights, batch: (batch @ weights).sum())
    described = programs.of(jitted, (weights, batch), tiny.TOPOLOGY).suspicious
    assert described == ("argument f32[1024,512] is whole on every device, 2.0 MiB: weights",)


@pytest.mark.slow
def test_the_command_imports_neither_models_nor_their_packages(tmp_path):
    compilers.need("v5e")
    path = tmp_path / "cut.export"
    path.write_bytes(b"\0" * 64)
    done = _plan_without_models(path, tmp_path)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(
        f"plan program: --program={path}: it is not a file of jax.export, or was cut"
    )


def _plan_without_models(path, folder):
    others = ("tensorflow", "orbax", "grain", "matplotlib", "sentencepiece")
    refused = (*others, "lingvo_gshard", "params", "data_prep")
    flags = (f"--program={path}", "--topology=v5e:2x4", f"--out={folder / 'PLAN'}")
    command = without.command(refused, "xla_plan.plan_program", *flags)
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=_ROOT)


def test_an_export_for_any_platform_is_read(tmp_path):
    jitted, args = _small(["data"])
    check = export.DisabledSafetyCheck.platform()
    exported = export.export(jitted, platforms=["cpu"], disabled_checks=[check])(*args)
    path = tmp_path / "step.export"
    path.write_bytes(exported.serialize())
    program = program_file.read(path, "tpu")
    assert [argument.name for argument in program.arguments] == ["batch"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("plain", "v3:2x2"),
        ("plain", "h100:1x8"),
        ("flax", "v3:2x2"),
        pytest.param("flax", "h100:1x8", marks=pytest.mark.exhaustive),
        ("equinox", "v3:2x2"),
        pytest.param("equinox", "h100:1x8", marks=pytest.mark.exhaustive),
    ],
)
def test_models_of_other_libraries_are_planned(model, name):
    compilers.need(name)
    if model == "plain" and topology.is_gpu(name) and jax.__version__.startswith("0.10."):
        pytest.skip("XLA of JAX 0.10 finds no tiles for a product of it on GPUs")
    if model != "plain" and importlib.util.find_spec(model) is None:
        pytest.skip(f"{model} is not installed")
    step, args = getattr(foreign_models, model)()
    plan = programs.of(step, args, name)
    assert plan.fits and plan.cost.roofline_secs.step > 0

    # All of the state is donated, and the batch is not.
    roles = plan.memory_gib.roles
    leaves = len(jax.tree.leaves(args[0]))
    assert roles["donated arguments"].arguments == leaves
    assert roles["other arguments"].arguments == 1
    assert sum(plan.cost.flops_per_core.values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v3:2x2", *exhaustive.only("h100:1x8")])
def test_a_keras_model_that_jax_splits_is_planned(tmp_path, name):
    compilers.need(name)
    # TensorFlow lowers for the CPU alone, to operations that any platform can run.
    check = export.DisabledSafetyCheck.platform()
    step, args = foreign_models.keras()
    exported = export.export(step, platforms=["cpu"], disabled_checks=[check])(*args)
    path = tmp_path / "keras.export"
    path.write_bytes(exported.serialize())
    plan = _of_file(path, name, categories=["layers=MatMul"])

    # Six products of the batch: forward, and for the gradients of the weights and the hidden layer.
    m = foreign_models
    product = 2 * m.BATCH * m.DIM * m.HIDDEN / 8
    assert sum(plan.cost.flops_per_core.values()) >= 5 * product
    roles = plan.memory_gib.roles
    assert roles["donated arguments"].arguments == 4 and roles["other arguments"].arguments == 1
    assert plan.cost.collectives and plan.cost.roofline_secs_by_category["layers"].step > 0


def _need_one_device(name):
    compilers.need(name)
    try:
        topology.devices(name)
    except ValueError as error:
        pytest.skip(f"the compiler of JAX 0.10 has no slice of one chip: {error}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v5e:1x1", "h100:1x1"])
def test_a_keras_model_lowered_by_tensorflow_is_planned(tmp_path, name):
    _need_one_device(name)
    plans = []
    for stage in ("stablehlo", "stablehlo_serialized", "hlo", "hlo_serialized"):
        path = tmp_path / stage
        path.write_bytes(foreign_models.keras_ir(stage))
        plans.append(_of_file(path, name, roles=["weights=XLA_Args.[1-4]"]))

    first = plans[0]
    for plan in plans:
        assert plan.memory_gib == first.memory_gib
        # Forms differ in operations that compute nothing.
        same_size = dataclasses.replace(plan.cost, instructions=first.cost.instructions)
        assert same_size == first.cost
    # The variables keep their memory, and the loss is the only result.
    m = foreign_models
    weights = 4 * (2 * m.DIM * m.HIDDEN + m.DIM + m.HIDDEN) / GIB
    role = first.memory_gib.roles["weights"]
    assert role.donated_gib == role.gib == weights and first.memory_gib.outputs < 2**20 / GIB
    # The products: forward, and the gradients of the weights and of the layers' inputs.
    assert sum(first.cost.flops_per_core.values()) == 5 * 2 * m.BATCH * m.DIM * m.HIDDEN


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v3:2x2", *exhaustive.only("h100:1x8")])
def test_our_own_step_has_the_plan_of_its_experiment(tmp_path, name):
    compilers.need(name)
    request = tiny.request(topology=name)
    expected = run_programs.make_plan(request).step
    program = run_programs.export(
        TRAIN, TaskModel(request.params, request.partitioning), request.params
    )
    mesh = specs.device_mesh(request.partitioning, topology.devices(name), "test")
    module = executable.lower(program, mesh).compiler_ir("stablehlo")
    path = tmp_path / "own.mlir"
    path.write_text(module.operation.get_asm(enable_debug_info=True))
    plan = _of_file(path, name)

    held = expected.memory_gib
    assert plan.fits and plan.memory_gib.capacity == held.capacity
    assert plan.memory_gib.peak == held.peak and plan.memory_gib.temporaries == held.temporaries
    state_gib = sum(role.gib for role in held.roles.values())
    step_number_gib = 4 / GIB
    donated_gib = plan.memory_gib.roles["donated arguments"].gib
    assert donated_gib == pytest.approx(state_gib + step_number_gib)
    assert plan.largest_buffers == expected.largest_buffers

    # All fields agree except the parts: kinds of operations here, and Figure 8's there. Sums may
    # differ by their order.
    costs = [dataclasses.asdict(cost) for cost in (plan.cost, expected.cost)]
    for cost in costs:
        cost["flops"] = sum(cost.pop("flops_per_core").values())
        # In a file, the scopes of TensorFlow's gradients have a different form.
        for name in ("roofline_secs_by_category", "collectives"):
            del cost[name]
    whole = [cost.pop("roofline_secs") for cost in costs]
    assert costs[0] == costs[1] and whole[0] == pytest.approx(whole[1], rel=1e-12)


@pytest.mark.slow
def test_the_user_can_give_a_kernel_s_flops():
    _need_one_device("v5e:1x1")

    def product(x, y, z):
        z[...] = jnp.dot(x[...], y[...], preferred_element_type=jnp.float32)

    result = jax.ShapeDtypeStruct((256, 128), jnp.float32)
    call = pallas.pallas_call(product, out_shape=result, name="product")
    step = jax.jit(lambda x, y: call(x, y))
    shapes = ((256, 512), (512, 128))
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    unknown = programs.of(step, args, "v5e:1x1").cost
    assert unknown.uncounted_kernels == ("product",)
    assert sum(unknown.flops_per_core.values()) == 0

    flops = 2 * 256 * 512 * 128
    known = programs.of(step, args, "v5e:1x1", kernel_flops=[f"product={flops}"]).cost
    assert known.uncounted_kernels == () and sum(known.flops_per_core.values()) == flops


@pytest.mark.slow
def test_an_unknown_custom_call_is_refused_in_one_line():
    compilers.need("v3")

    def unknown(batch):
        return jax.ffi.ffi_call("nobodys_kernel", batch)(batch)

    with pytest.raises(ValueError, match="nobodys_kernel") as error:
        programs.of(jax.jit(unknown), (foreign_models.spec((8, 4), "data"),), "v3:2x2")
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_program_that_does_not_fit_has_a_plan_with_the_excess():
    compilers.need("v3")
    batch = foreign_models.spec((2**16, 2**16), "data")  # 8 GiB on each core.
    plan = programs.of(jax.jit(lambda batch: batch + 1), (batch,), "v3:2x2")
    assert not plan.fits and plan.cost is None
    assert plan.memory_gib.peak > plan.memory_gib.capacity
    assert plan.memory_gib.roles["other arguments"].gib == 8
    assert "does NOT fit, by " in program_text.text(plan)
