"""Plans of a small experiment on eight CPU devices that stand for a v3, against real arrays.

The TPU's programs are compiled for the devices at hand. Their figures are then the CPU's, and can
be compared with arrays and with the compiled program.
"""

import collections

import jax
import numpy as np
import pytest

from lingvo_gshard.input import sentences
from lingvo_gshard.layers.dispatch import Dispatch
from lingvo_gshard.layers.numerics import Remat
from lingvo_gshard.layers.repeat import Layers
from lingvo_gshard.layers.stored_weights import Numbers
from lingvo_gshard.model.flops import step_flops
from lingvo_gshard.model.step_products import products_of
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.plans import plan, run_programs, state_memory, topology_executable
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.spmd import tracer
from tests.plans import tiny
from tests.xla_spmd import compilers
from xla_plan.machines import topology
from xla_plan.machines.hardware import GIB
from xla_spmd.mesh import Mesh


@pytest.fixture(scope="module")
def made(cpu):
    """The plan of the tiny experiment, and its compiled program."""
    kept = run_programs.make_plan(tiny.request())
    return kept, cpu[-1]


@pytest.fixture(scope="module")
def model():
    return TaskModel(tiny.params(), tiny.request().partitioning)


def _state_gib(program):
    """Returns the GiB of replicated weights, experts' weights and slots."""
    roles = program.memory_gib.roles
    names = (state_memory.REPLICATED, state_memory.EXPERTS, state_memory.SLOTS)
    assert tuple(roles) == names
    return [roles[name].gib for name in names]


@pytest.mark.slow
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
    replicated_gib, experts_gib, slots_gib = _state_gib(kept.step)
    assert experts_gib == pytest.approx(gib(experts))
    assert replicated_gib + experts_gib == pytest.approx(gib(weights.values()))
    assert slots_gib == pytest.approx(gib(state.slots.Flatten()))
    assert memory.temporaries == compiled.report().temp_bytes / GIB
    arguments = compiled.report().argument_bytes / GIB
    assert arguments < memory.peak <= 1.1 * (arguments + memory.temporaries)


@pytest.mark.slow
def test_the_plans_own_facts(made, model):
    kept, _ = made
    assert kept.step.fits and kept.cores == 8 and kept.mesh == {"d": 8}
    assert kept.sharding == {"B": "d", "E": "d", "G": "d"}
    assert kept.weights == model.task.num_weights
    assert kept.tokens_per_core == 16.0
    assert kept.step.lower_secs > 0 and kept.step.compile_secs > 0 and kept.host_peak_gib > 0.1


@pytest.mark.slow
def test_collectives_come_from_the_compiled_program(made):
    kept, compiled = made
    report = compiled.report()
    for kind in ("all-to-all", "all-reduce"):
        counted = sum(each.count for each in kept.step.cost.collectives if each.kind == kind)
        assert counted == report.count(kind)
    exchanges = [each for each in kept.step.cost.collectives if each.kind == "all-to-all"]
    by_layer = [each.count for each in exchanges if "layers_1/feed_forward" in each.source]
    assert sum(by_layer) == 8  # Two MoE layers, dispatch and combine, forward and backward.
    assert kept.step.cost.instructions == report.num_instructions


@pytest.mark.slow
def test_flops_equal_the_layers(made, model):
    """Counted by hand for one core: 16 source and 16 target tokens, of 2 rows, in groups of 8."""
    kept, _ = made
    products = dict(kept.step.cost.flops_per_core)
    step, tokens, width = 3 * 2, 16 + 16, 8 * 12  # Forward, and twice that backward; M * H.
    projections = 2 * 4 * 8 * 8 * 16 + 2 * 8 * 8 * 8 * 16  # Two encoder and two decoder layers.
    assert products.pop("feed_forward") == step * tokens * 2 * width
    assert products.pop("projection") == step * projections
    assert products.pop("attention") == step * 6 * 2 * (2 * 2 * 8 * 8 * 4)
    assert products.pop("gate_projection") == step * tokens * 8 * 8
    assert products.pop("softmax") == step * 16 * 8 * 16
    assert products.pop("optimizer") == 0
    # A group has two places in each of 8 experts, so that experts compute on twice the tokens. With
    # a single expert a core, the CPU's compiler loses some names.
    experts = step * (2 * tokens) * 2 * width
    dispatch = 5 * 2 * tokens * (8 * 2) * 8  # The mask that dispatches lacks a gradient.
    assert sum(products.values()) == experts + dispatch


@pytest.mark.slow
def test_model_flops_are_less(made):
    """The mathematics does not include empty places, dispatch and combine."""
    kept, p = made[0], tiny.params()
    needed = step_flops(products_of(p.task, p.input.cls.batch_specs(p.input))) / 8
    assert kept.model_flops_per_core == needed
    assert needed < sum(kept.step.cost.flops_per_core.values()) < 2 * needed


@pytest.mark.slow
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
    assert cost.xla_optimal_secs == cost.xla_optimal_secs_once  # The program lacks loops.


def _by_category(flops_per_core):
    """Adds dispatch to experts: a CPU's compiler mixes their names up with one expert a device."""
    flops = collections.Counter(flops_per_core)
    flops["experts"] += flops.pop("dispatch_combine")
    return flops


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_loop_has_the_plan_of_the_unrolled_program(cpu):
    costs = {}
    for layers_as in Layers:
        params = tiny.params(num_layers=4)
        for name in ("encoder", "decoder"):
            params.task.Get(name).layers_as = layers_as
        costs[layers_as] = run_programs.make_plan(tiny.request(params=params)).step.cost
    loop, unrolled = costs[Layers.LOOP], costs[Layers.UNROLLED]
    looped, counts = (_by_category(cost.flops_per_core) for cost in (loop, unrolled))
    for name, count in counts.items():
        assert looped[name] == pytest.approx(count, rel=0.02), name
    for cost in (loop, unrolled):
        exchanges = [each for each in cost.collectives if each.kind == "all-to-all"]
        assert sum(each.count for each in exchanges if "feed_forward" in each.source) == 16


@pytest.mark.slow
def test_a_partitioning_over_two_axes(cpu):
    both = ("data", "experts")
    parts = Partitioning.from_dict(Mesh(both, (2, 4)), {"B": both, "E": "experts", "G": both})
    kept = run_programs.make_plan(tiny.request(partitioning=parts))
    assert kept.mesh == {"data": 2, "experts": 4}
    assert kept.sharding == {"B": "data+experts", "E": "experts", "G": "data+experts"}
    # Two experts a core instead of one.
    assert _state_gib(kept.step)[1] == pytest.approx(4 * 2 * 2 * 2 * 8 * 12 / GIB)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("layers_as", "dispatch"), [(Layers.LOOP, Dispatch.GATHER), (Layers.UNROLLED, Dispatch.EINSUM)]
)
def test_recomputation_counts_the_additional_products(tpu, layers_as, dispatch):
    """The TPU's compiler gives exact numbers; the CPU's loses names with one expert a core."""
    compilers.need("v3")
    costs = {}
    for remat in Remat.order():
        params = tiny.params(num_layers=4)
        for name in ("encoder", "decoder"):
            stack = params.task.Get(name).Set(layers_as=layers_as, remat=remat)
            stack.moe.dispatch = dispatch
        costs[remat] = run_programs.make_plan(tiny.request(params=params)).step.cost

    without = sum(costs[Remat.NONE].flops_per_core.values())
    for cost in costs.values():
        assert cost.recomputed_flops_per_core == sum(cost.flops_per_core.values()) - without
    shares = [costs[remat].recomputed_time_share for remat in Remat.order()]
    assert shares[0] == 0.0 < shares[2] < shares[1] < 1 / 3


@pytest.mark.slow
def test_a_topology_without_figures_is_refused(cpu):
    with pytest.raises(ValueError, match="no published figures are known for 'v9'"):
        run_programs.make_plan(tiny.request(topology="v9:2x2"))


_REFUSED = "RESOURCE_EXHAUSTED: Used 16.5G of 15.48G hbm"
_REFUSED_EARLY = "HLO temporaries (17.5G) exceeds available HBM (15.48G)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("details", "peak", "besides_the_state"),
    [(_REFUSED, 16.5, True), (_REFUSED_EARLY, 17.5, False)],
)
def test_a_program_that_is_too_large_gives_a_plan_that_does_not_fit(
    made, monkeypatch, details, peak, besides_the_state
):
    def refuse(exported, name):
        raise topology.OutOfMemoryError("too large") from RuntimeError(details)

    monkeypatch.setattr(tracer, "traced", lambda *_: made[1].program)
    monkeypatch.setattr(topology_executable, "compile_program", refuse)
    kept = run_programs.make_plan(tiny.request())
    assert not kept.step.fits and kept.step.cost is None
    memory = kept.step.memory_gib
    assert memory.peak == peak and memory.capacity == 15.48
    state = sum(_state_gib(kept.step))
    assert memory.temporaries == pytest.approx(peak - state if besides_the_state else peak)
    assert kept.step.largest_buffers[0].source.startswith("theta.")


def test_the_longest_search_of_a_run_is_planned(model, monkeypatch):
    monkeypatch.setattr(tracer, "traced", lambda function, recipe: recipe)
    params = tiny.params()
    longest = max(sentences.lengths(params.decode.max_source_len, "decode.max_source_len"))
    assert run_programs.export(plan.DECODE, model, params).arguments == (longest,)


def test_decoding_holds_weights_as_the_experiment_keeps_them(monkeypatch):
    def refuse(exported, name):
        raise topology.OutOfMemoryError("too large") from RuntimeError("Used 16.5G of 15.5G hbm")

    monkeypatch.setattr(tracer, "traced", lambda *_: None)
    monkeypatch.setattr(topology_executable, "compile_program", refuse)

    def expert_gib(numbers):
        params = tiny.params()
        params.decode.weights = numbers
        model = TaskModel(params, tiny.request().partitioning)
        planned = run_programs.plan_program(plan.DECODE, model, params, tiny.TOPOLOGY)
        return _state_gib(planned)[1]

    # Two layers with experts, one expert on each core: two matrices of 8 by 12.
    weights = 2 * 2 * 8 * 12
    scales = 2 * (8 + 12)
    assert expert_gib(Numbers.FLOAT32) == 4 * weights / GIB
    assert expert_gib(Numbers.BFLOAT16) == 2 * weights / GIB
    assert expert_gib(Numbers.INT8) == (weights + 4 * scales) / GIB


@pytest.mark.slow
def test_a_tpus_programs_are_planned(tpu):
    compilers.need("v3")
    kept = run_programs.make_plan(tiny.request(programs=plan.PROGRAMS))
    assert kept.all_fit and kept.step.memory_gib.capacity == 15.48
    assert kept.step.cost.xla_optimal_secs > 0
    assert kept.step.cost.flops_per_core["experts"] == 3 * 2 * (2 * 32) * 2 * 8 * 12
    # Two rows of 8 tokens a core, forward and backward; the same forward; 5 steps of 2 hypotheses.
    tokens = {"train": 3 * 2 * 8, "evaluate": 2 * 8, "decode": 5 * 2 * 2, "initialize": 0}
    for name, count in tokens.items():
        products = kept.programs[name].cost.flops_per_core
        assert products["softmax"] == 2 * count * 8 * 16, name
    gib = {name: _state_gib(program) for name, program in kept.programs.items()}
    assert gib["initialize"] == gib["evaluate"] == gib["train"]
    replicated, experts, slots = gib["train"]
    assert gib["decode"] == [replicated, experts, 0] and slots > 0
    assert kept.programs["decode"].memory_gib.peak > replicated + experts
    assert kept.programs["initialize"].memory_gib.peak >= replicated + experts + slots
