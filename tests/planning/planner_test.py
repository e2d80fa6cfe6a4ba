"""Plans of a small experiment on eight CPU devices that stand for a v3, against real arrays.

The planner compiles for the devices at hand; the figures of the TPU are then those of the CPU and
can be compared with arrays and with the compiled program.
"""

import collections
import dataclasses
import types

import jax
import numpy as np
import pytest

from lingvo_gshard import registry
from lingvo_gshard.hlo.collectives import Collective
from lingvo_gshard.hlo.hlo_cost import Cost
from lingvo_gshard.hlo.hlo_module import Array
from lingvo_gshard.input import packing, sentences
from lingvo_gshard.layers.dispatch import Dispatch
from lingvo_gshard.layers.repeat import Layers
from lingvo_gshard.model import flops, placement
from lingvo_gshard.model.spec import Mode
from lingvo_gshard.model.translation_model import TranslationModel
from lingvo_gshard.planning import compiled_step, hardware, plan, planner, programs, report
from lingvo_gshard.planning.compiled_step import CompiledStep
from lingvo_gshard.planning.memory import GIB
from lingvo_gshard.planning.plan import Batch
from lingvo_gshard.planning.planner import Request
from lingvo_gshard.runs import run
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.spmd import lowering, saved_executable, topology, tracer
from lingvo_gshard.spmd.executable import compile_program
from tests.planning import plans
from tests.spmd import compilers

_PLACES = tuple((x, y) for x in range(2) for y in range(2) for _ in range(2))
_TINY = {
    "task.dim": 8,
    "task.source_vocab_size": 24,
    "task.target_vocab_size": 16,
    "input.batch_size": 16,
    "input.source_len": 8,
    "input.target_len": 8,
    "eval_input.batch_size": 16,
    "eval_input.source_len": 8,
    "eval_input.target_len": 8,
    "decode.batch_size": 16,
    "decode.max_source_len": 8,
    "decode.max_target_len": 5,
    "decode.beam_size": 2,
}


def _params(num_layers=2):
    params = registry.get_params("toy.MoE8E4L").Set(**_TINY)
    for name in ("encoder", "decoder"):
        stack = params.task.Get(name).Set(dim=8, num_layers=num_layers)
        stack.dense.hidden_dim = 12
        stack.layer.attention.Set(num_heads=2, head_dim=4)
        stack.moe.Set(hidden_dim=12, num_experts=8, group_size=8, dispatch=Dispatch.EINSUM)
    return params


def _request(**changes):
    parts = placement.partitioning(_params(), 8)
    asked = Request("toy.MoE8E4L", (), _params(), "v3:2x2", parts).step_only()
    return dataclasses.replace(asked, **changes)


_COMPILE_PROGRAM, _PLACES_OF = topology.compile_program, topology.places


@pytest.fixture(scope="module")
def cpu():
    """Puts the devices at hand in a topology's place; returns the list of compiled programs."""
    compiled = []

    def compile_here(exported, name):
        assert name == "v3:2x2"
        compiled.append(compile_program(exported))
        return compiled[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topology, "compile_program", compile_here)
        patch.setattr(topology, "places", lambda name: _PLACES)
        yield compiled


@pytest.fixture
def tpu(monkeypatch):
    """Restores the TPU compiler, which `cpu` replaces for the whole module."""
    monkeypatch.setattr(topology, "compile_program", _COMPILE_PROGRAM)
    monkeypatch.setattr(topology, "places", _PLACES_OF)


@pytest.fixture(scope="module")
def made(cpu):
    """The plan of the tiny experiment, and its compiled program."""
    kept = planner.make(_request())
    return kept, cpu[-1]


@pytest.fixture(scope="module")
def model():
    return TranslationModel(_params(), _request().partitioning)


def test_memory_is_the_size_of_the_arrays(made, model):
    kept, compiled = made
    specs = model.state_spec
    state = compiled.place("state", specs.Transform(lambda s: np.zeros(s.shape, s.dtype)))

    def gib(tree):
        first = jax.devices()[0]
        shards = [shard for leaf in tree for shard in leaf.addressable_shards]
        return sum(shard.data.nbytes for shard in shards if shard.device == first) / GIB

    weights = dict(state.theta.FlattenItems())
    experts = [leaf for path, leaf in weights.items() if path.endswith(("feed_forward.wi", "wo"))]
    experts = [leaf for leaf in experts if leaf.shape[0] == 8 and leaf.ndim == 3]
    experts = [leaf for leaf in experts if 12 in leaf.shape]
    memory = kept.step.memory_gib
    assert memory.expert_weights == pytest.approx(gib(experts))
    assert memory.replicated_weights + memory.expert_weights == pytest.approx(gib(weights.values()))
    assert memory.optimizer_slots == pytest.approx(gib(state.slots.Flatten()))
    assert memory.temporaries == compiled.report().temp_bytes / GIB
    arguments = compiled.report().argument_bytes / GIB
    assert arguments < memory.peak <= 1.1 * (arguments + memory.temporaries)


def test_the_plans_own_facts(made, model):
    kept, _ = made
    assert kept.step.fits and kept.cores == 8 and kept.mesh == {"d": 8}
    assert kept.sharding == {"B": "d", "E": "d", "G": "d"}
    assert kept.weights == model.task.num_weights
    assert kept.tokens_per_core == 16.0
    assert kept.step.lower_secs > 0 and kept.step.compile_secs > 0 and kept.host_peak_gib > 0.1


def test_collectives_are_those_of_the_compiled_program(made):
    kept, compiled = made
    report = compiled.report()
    for kind in ("all-to-all", "all-reduce"):
        counted = sum(each.count for each in kept.step.cost.collectives if each.kind == kind)
        assert counted == report.count(kind)
    exchanges = [each for each in kept.step.cost.collectives if each.kind == "all-to-all"]
    by_layer = [each.count for each in exchanges if "layers_1/feed_forward" in each.source]
    assert sum(by_layer) == 8  # Two MoE layers, dispatch and combine, forward and backward.
    assert kept.step.cost.instructions == report.num_instructions


def test_flops_are_those_of_the_layers(made, model):
    """Counted by hand for one core: 16 source and 16 target tokens, of 2 rows, in groups of 8."""
    kept, _ = made
    products = dict(kept.step.cost.flops_per_core)
    step, tokens, width = 3 * 2, 16 + 16, 8 * 12  # Forward, and twice that backward; M * H.
    projections = 2 * 4 * 8 * 8 * 16 + 2 * 8 * 8 * 8 * 16  # Of two encoder and two decoder layers.
    assert products.pop("dense") == step * (tokens * 2 * width + projections)
    assert products.pop("attention") == step * 6 * 2 * (2 * 2 * 8 * 8 * 4)
    assert products.pop("gate") == step * tokens * 8 * 8
    assert products.pop("softmax") == step * 16 * 8 * 16
    assert products.pop("optimizer") == 0
    # A group has two places in each of 8 experts, so that experts compute on twice the tokens. With
    # a single expert a core, the CPU's compiler loses some names.
    experts = step * (2 * tokens) * 2 * width
    dispatch = 5 * 2 * tokens * (8 * 2) * 8  # The mask that dispatches has no gradient.
    assert sum(products.values()) == experts + dispatch


def test_model_flops_are_less(made, model):
    """The mathematics asks for no empty places, no dispatch and no combine."""
    kept, p = made[0], _params().input
    needed = flops.train_step_flops(model.task, p.batch_size, p.source_len, p.target_len) / 8
    assert kept.model_flops_per_core == needed
    assert needed < sum(kept.step.cost.flops_per_core.values()) < 2 * needed


def test_the_roofline_adds_up(made):
    cost = made[0].step.cost
    by_category = cost.roofline_secs_by_category.values()
    for part in ("compute", "memory", "network", "step"):
        whole = getattr(cost.roofline_secs, part)
        assert whole == pytest.approx(sum(getattr(each, part) for each in by_category))
    secs = cost.roofline_secs
    local, rounding = secs.step - secs.network, 1 + 1e-9
    assert max(secs.compute, secs.memory) <= local * rounding
    assert local <= (secs.compute + secs.memory) * rounding
    assert secs.network == pytest.approx(sum(cost.network_secs_by_kind.values()))
    assert cost.xla_optimal_secs == cost.xla_optimal_secs_once  # It has no loops.


def _by_category(flops_per_core):
    """Adds dispatch to experts: a CPU's compiler mixes their names up with one expert a device."""
    flops = collections.Counter(flops_per_core)
    flops["experts"] += flops.pop("dispatch_combine")
    return flops


@pytest.mark.slow
def test_the_plan_of_a_loop_is_that_of_the_unrolled_program(cpu):
    costs = {}
    for layers_as in Layers:
        params = _params(num_layers=4)
        for name in ("encoder", "decoder"):
            params.task.Get(name).layers_as = layers_as
        costs[layers_as] = planner.make(_request(params=params)).step.cost
    loop, unrolled = costs[Layers.LOOP], costs[Layers.UNROLLED]
    looped, counts = (_by_category(cost.flops_per_core) for cost in (loop, unrolled))
    for name, count in counts.items():
        assert looped[name] == pytest.approx(count, rel=0.02), name
    for cost in (loop, unrolled):
        exchanges = [each for each in cost.collectives if each.kind == "all-to-all"]
        assert sum(each.count for each in exchanges if "feed_forward" in each.source) == 16


@pytest.mark.slow
def test_another_partitioning(cpu):
    both = ("data", "experts")
    parts = Partitioning.from_dict(Mesh(both, (2, 4)), {"B": both, "E": "experts", "G": both})
    kept = planner.make(_request(partitioning=parts))
    assert kept.mesh == {"data": 2, "experts": 4}
    assert kept.sharding == {"B": "data+experts", "E": "experts", "G": "data+experts"}
    # Two experts a core instead of one.
    assert kept.step.memory_gib.expert_weights == pytest.approx(4 * 2 * 2 * 2 * 8 * 12 / GIB)


def test_impossible_requests_are_refused(cpu, tmp_path):
    with pytest.raises(ValueError, match="task.source_vocab_size is taken from the data.*--set"):
        planner.request("toy.MoE8E4L", "v3:2x2", (), None)
    with pytest.raises(ValueError, match="16 partitions .* do not divide .*num_experts = 8"):
        sixteen = Partitioning.parse(Mesh.flat(16), "BGE:d")
        planner.planned(_request(partitioning=sixteen), tmp_path)
    with pytest.raises(ValueError, match="8 partitions .* divide the decoder's groups .* = 4"):
        params = _params()
        params.task.decoder.moe.group_size = 32
        planner.planned(_request(params=params), tmp_path)
    with pytest.raises(ValueError, match="no published figures are known for 'v9'"):
        planner.make(_request(topology="v9:2x2"))


_REFUSED = "RESOURCE_EXHAUSTED: Used 16.5G of 15.48G hbm"
_REFUSED_EARLY = "HLO temporaries (17.5G) exceeds available HBM (15.48G)"


@pytest.mark.parametrize(
    ("details", "peak", "besides_the_state"),
    [(_REFUSED, 16.5, True), (_REFUSED_EARLY, 17.5, False)],
)
def test_a_program_that_is_too_large_gives_a_plan_that_does_not_fit(
    made, monkeypatch, details, peak, besides_the_state
):
    def refuse(exported, name):
        raise topology.OutOfMemoryError("too large") from RuntimeError(details)

    monkeypatch.setattr(lowering, "export", lambda *_: made[1].program)
    monkeypatch.setattr(topology, "compile_program", refuse)
    kept = planner.make(_request())
    assert not kept.step.fits and kept.step.cost is None
    memory = kept.step.memory_gib
    assert memory.peak == peak and memory.capacity == 15.48
    state = memory.replicated_weights + memory.expert_weights + memory.optimizer_slots
    assert memory.temporaries == pytest.approx(peak - state * besides_the_state)
    assert kept.step.largest_buffers[0].source.startswith("theta.")


def test_partitions_lie_where_the_mesh_puts_them(cpu):
    torus = hardware.network("v3:2x2", Mesh(("d",), (8,), (7, 6, 5, 4, 3, 2, 0, 1)))
    assert torus.sizes == (2, 2)
    assert torus.places[:2] == (_PLACES[7], _PLACES[6]) and torus.places[6] == _PLACES[0]


def _suspicious(costs=(), collectives=()):
    report = types.SimpleNamespace(collective_ops=collectives)
    return compiled_step.suspicious(CompiledStep(report, costs, {}), Batch(16, 8, 12))


@pytest.mark.parametrize("length", [8, 12])  # The source's length and the target's.
def test_a_tensor_of_the_whole_batch_is_suspicious(length):
    def found(rows):
        array = Array("f32", (4, rows, length, 8192))
        cost = Cost("i", "fusion", "call_tf/encoder/norm/mul", 0, 0, (array,), 1)
        return _suspicious(costs=(cost,))

    assert found(16) == (
        f"f32[4,16,{length},8192], the whole batch on every core, from encoder/norm",
    )
    assert found(2) == ()


def test_a_large_gather_is_suspicious_and_a_sum_is_not():
    def ops(size):
        kinds = ("all-gather", "all-to-all", "all-reduce", "reduce-scatter", "collective-permute")
        name = "call_tf/encoder/norm/mul"
        return [Collective(kind, size, ((0, 1),), times=2, op_name=name) for kind in kinds]

    assert _suspicious(collectives=ops(2**20)) == (
        "all-gather of 2.0 MiB a step from encoder/norm",
        "collective-permute of 2.0 MiB a step from encoder/norm",
    )
    assert _suspicious(collectives=ops(2**18)) == ()


def _small_m4():
    """Returns m4.MoE128E36L with four narrow layers in each stack."""
    params = registry.get_params("m4.MoE128E36L").Set(
        **{
            "task.dim": 128,
            "task.source_vocab_size": 512,
            "task.target_vocab_size": 256,
            "input.batch_size": 256,
            "input.source_len": 32,
            "input.target_len": 32,
        }
    )
    for name in ("encoder", "decoder"):
        stack = params.task.Get(name).Set(dim=128, num_layers=4)
        stack.dense.hidden_dim = stack.moe.hidden_dim = 128
        stack.layer.attention.Set(num_heads=2, head_dim=32)
    parts = placement.partitioning(params, 128)
    return Request("m4.MoE128E36L", (), params, "v3:8x8", parts).step_only()


@pytest.mark.slow
def test_the_family_gathers_no_weights_experts_or_tokens(tpu, monkeypatch):
    """Neither by all-gathers nor by all-reduces, the TPU compiler's way from 64 partitions on."""
    compilers.need("v3")
    monkeypatch.setattr(compiled_step, "_LARGE_BYTES", 1)  # Narrow layers have small weights.
    kept = planner.make(_small_m4())
    assert {each.kind for each in kept.step.cost.collectives} == {"all-to-all", "all-reduce"}
    assert kept.step.suspicious == ()


@pytest.mark.slow
def test_weights_that_are_gathered_are_suspicious(tpu):
    """The same model with all weights split over M."""
    compilers.need("v3")
    parts = Partitioning.from_dict(Mesh.flat(128), dict.fromkeys("BEGM", "d"))
    kept = planner.make(dataclasses.replace(_small_m4(), partitioning=parts))
    assert any("all-reduce in place of an all-gather" in each for each in kept.step.suspicious)


@pytest.mark.slow
def test_a_tpus_programs_are_planned(tpu):
    compilers.need("v3")
    kept = planner.make(_request(programs=plan.PROGRAMS))
    assert kept.all_fit and kept.step.memory_gib.capacity == 15.48
    assert kept.step.cost.xla_optimal_secs > 0
    assert kept.step.cost.flops_per_core["experts"] == 3 * 2 * (2 * 32) * 2 * 8 * 12
    # Two rows of 8 tokens a core, forward and backward; the same forward; 5 steps of 2 hypotheses.
    tokens = {"train": 3 * 2 * 8, "evaluate": 2 * 8, "decode": 5 * 2 * 2, "initialize": 0}
    for name, count in tokens.items():
        products = kept.programs[name].cost.flops_per_core
        assert products["softmax"] == 2 * count * 8 * 16, name
    state = kept.step.memory_gib
    for name in ("initialize", "evaluate"):
        assert kept.programs[name].memory_gib.optimizer_slots == state.optimizer_slots > 0
    assert kept.programs["decode"].memory_gib.optimizer_slots == 0
    weights = state.replicated_weights + state.expert_weights
    assert kept.programs["decode"].memory_gib.peak > weights
    assert kept.programs["initialize"].memory_gib.peak >= weights + state.optimizer_slots


@pytest.fixture
def asked(monkeypatch):
    """Makes plans at once in place of processes; returns the list of requests."""
    requests = []

    def make(function, request):
        assert function is planner.make
        requests.append(request)
        made = plans.plan(plans.cost(), settings=request.settings)
        programs = dict.fromkeys(request.programs, made.step)
        return dataclasses.replace(made, programs=programs)

    monkeypatch.setattr(planner, "in_own_process", make)
    monkeypatch.setattr(report, "draw", lambda *_: None)  # It takes its time.
    return requests


def test_a_plan_is_made_once(asked, tmp_path):
    first = planner.planned(_request(), tmp_path)
    assert planner.planned(_request(), tmp_path) == first == plan.load(tmp_path)
    assert len(asked) == 1
    other = _request(params=_params().Set(**{"input.batch_size": 64}))
    planner.planned(other, tmp_path)
    planner.planned(dataclasses.replace(other, topology="v3:4x4"), tmp_path)
    assert len(asked) == 3


def test_programs_that_a_kept_plan_lacks_are_added(asked, tmp_path):
    planner.planned(_request(), tmp_path)
    everything = _request(programs=plan.PROGRAMS)
    whole = planner.planned(everything, tmp_path)
    assert [each.programs for each in asked] == [(name,) for name in plan.PROGRAMS]
    assert tuple(whole.programs) == plan.PROGRAMS
    assert planner.planned(_request(), tmp_path) == planner.planned(everything, tmp_path) == whole
    assert len(asked) == 4


def test_every_program_is_reported_and_the_pictures_are_drawn_once(asked, monkeypatch, tmp_path):
    reported, drawn = [], []
    monkeypatch.setattr(report, "write", lambda made, _: reported.append(list(made.programs)))
    monkeypatch.setattr(report, "draw", lambda made, _: drawn.extend(made.values()))
    planner.planned(_request(programs=plan.PROGRAMS), tmp_path)
    assert reported == [list(plan.PROGRAMS[:n]) for n in (1, 2, 3, 4)]
    assert [list(made.programs) for made in drawn] == [["train"]]


def test_programs_that_were_planned_before_a_mistake_are_kept(asked, monkeypatch, tmp_path):
    make = planner.in_own_process

    def fails(function, request):
        if request.programs == ("evaluate",):
            raise ValueError("evaluate: B=30 is not divisible by the 8 partitions")
        return make(function, request)

    everything = _request(programs=plan.PROGRAMS)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="^evaluate: B=30"):
        patch.setattr(planner, "in_own_process", fails)
        planner.planned(everything, tmp_path)
    assert list(plan.load(tmp_path).programs) == ["train", "initialize"]
    planner.planned(everything, tmp_path)
    assert [each.programs for each in asked] == [(name,) for name in plan.PROGRAMS]


@pytest.fixture
def training(cpu):
    """A run on two cores whose calls have two training steps."""
    params = _params().Set(**{"train.iterations_per_loop": 2, "train.max_steps": 4})
    parts = placement.partitioning(params, 2)
    return _request(params=params, partitioning=parts)


@pytest.mark.slow
def test_the_trainers_program_is_saved(training, tmp_path, monkeypatch):
    """It is found by what it computes, and so is the same program, whatever its partitioning."""
    folder, params = tmp_path / "executables", training.params
    params.Set(mesh="e:*,m:2", sharding="BGE:e,H:m,m:e")
    asked = dataclasses.replace(training, partitioning=placement.partitioning(params, 4))
    text = planner.save_training(asked, folder)
    assert text.startswith("saved the compiled program train_2 ")
    assert text.endswith(f"`trainer --executables={folder}` loads it")
    estimator = run.make_estimator(params, str(tmp_path / "run"), 4, str(folder))
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)  # Nothing is compiled from here on.
    p = params.input
    batch = packing.batch_specs(p.batch_size, packing.RowShape(p.source_len, p.target_len))
    loaded = estimator._programs.get(Mode.TRAIN, batch, 2)
    assert loaded.program.name == "train_2" and loaded.report().count("all-to-all") > 0


def test_the_longest_search_of_a_run_is_planned(training, model, monkeypatch):
    monkeypatch.setattr(tracer, "traced", lambda function, *args: args[-1])
    params = training.params
    longest = max(sentences.lengths(params.decode.max_source_len))
    assert programs.export(plan.DECODE, model, params) == longest


@pytest.fixture
def exported(monkeypatch):
    """Exports nothing; returns the numbers of steps that were asked for."""
    numbers = []

    def export(name, model, params, num_steps):
        numbers.append(num_steps)
        return types.SimpleNamespace(name=f"{name}_{num_steps}")

    monkeypatch.setattr(programs, "export", export)
    return numbers


def _compiled(program, peak_gib):
    peak_bytes = peak_gib * 2**30
    return types.SimpleNamespace(
        name=program.name, report=lambda: types.SimpleNamespace(peak_bytes=peak_bytes)
    )


def test_a_program_is_saved_for_each_number_of_steps(training, exported, tmp_path, monkeypatch):
    training.params.train.max_steps = 7
    names = []
    monkeypatch.setattr(topology, "compile_program", lambda program, _: _compiled(program, 1))
    monkeypatch.setattr(saved_executable, "save", lambda made, folder: names.append(made.name))
    text = planner.save_training(training, tmp_path)
    assert exported == [2, 1] and names == ["train_2", "train_1"]
    assert text.startswith("saved the compiled programs train_2, train_1 ")


def test_a_program_that_is_too_large_is_not_saved(training, exported, tmp_path, monkeypatch):
    def refuse(program, name):
        raise topology.OutOfMemoryError(f"topology {name}: too large")

    monkeypatch.setattr(topology, "compile_program", refuse)
    with pytest.raises(ValueError, match="^topology v3:2x2: too large$"):
        planner.save_training(training, tmp_path / "executables")
    assert not (tmp_path / "executables").exists()


def test_a_program_that_is_compiled_and_does_not_fit_is_not_saved(
    training, exported, tmp_path, monkeypatch
):
    """As for GPUs, whose compiler takes programs of any size."""
    monkeypatch.setattr(topology, "compile_program", lambda program, _: _compiled(program, 17))
    with pytest.raises(ValueError, match=r"^train_2 needs 17\.00 of 15\.48 GiB: not saved\.$"):
        planner.save_training(training, tmp_path / "executables")
    assert not (tmp_path / "executables").exists()


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_kept_plan_that_is_damaged_is_made_again(asked, tmp_path, damage):
    whole = planner.planned(_request(), tmp_path)
    file = tmp_path / "plan.json"
    file.unlink() if damage == "missing" else file.write_text(file.read_text()[:-9])
    assert planner.planned(_request(), tmp_path) == whole == plan.load(tmp_path)
    assert len(asked) == 2


def test_an_interrupted_plan_is_made_again_and_others_are_kept(asked, monkeypatch, tmp_path):
    planner.planned(_request(), tmp_path / "first")

    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(plan, "save", killed)
        planner.planned(_request(), tmp_path / "second")
    planner.planned(_request(), tmp_path / "first")
    assert len(asked) == 2
    planner.planned(_request(), tmp_path / "second")
    assert len(asked) == 3
