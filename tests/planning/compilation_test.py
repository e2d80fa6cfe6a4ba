"""The MoE layer on 8 to 2048 cores, and steps of 12 to 60 layers: programs that do not grow."""

import dataclasses
import re

import pytest

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.hlo.compiled_report import CompiledReport
from lingvo_gshard.hlo.hlo_module import Array
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.repeat import Layers, Remat
from lingvo_gshard.planning import compilation, planner
from lingvo_gshard.planning.compilation import Compiled, Sizes
from lingvo_gshard.spmd import lowering, topology
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from tests.planning import plans

# Large enough that sending tokens costs less than sending experts. With two experts a group, no
# shape of experts is also a shape of groups.
_SMALL = Sizes(model_dim=32, hidden_dim=96, tokens=52, experts=2)


def _forward(num_partitions, sizes):
    """Returns the layer's training pass alone."""
    layer = compilation._layer(num_partitions, sizes)

    def fn(theta, batch):
        y_BLM, _ = layer.FProp(theta, batch.x_BLM, batch.valid_BL, Context(Mode.TRAIN, batch.seed))
        return NestedMap(y_BLM=y_BLM)

    args = (compilation._theta(layer), compilation._batch(num_partitions, sizes))
    return AnnotatedFn("moe", fn, ("theta", "batch"), args, {"y_BLM": "BLM"})


def _compiled(make, num_partitions):
    exported = lowering.export(
        make(num_partitions, _SMALL), compilation.partitioning(num_partitions)
    )
    return topology.compile_program(exported, topology.v3(num_partitions))


def _of_all_groups(arrays, num_partitions):
    """Returns the arrays of one core's program that hold all tokens of all groups."""
    groups_tokens = f"{num_partitions},{_SMALL.tokens}|{num_partitions * _SMALL.tokens}"
    whole = re.compile(rf"\[(?:\d+,)*(?:{groups_tokens})[,\]]")
    return [array for array in arrays if whole.search(str(array))]


def _arrays(module):
    instructions = (i for each in module.computations for i in each.instructions)
    return [array for instruction in instructions for array in instruction.arrays]


def test_a_tensor_of_all_groups_is_seen():
    seen = [(8, 52), (416,), (1, 8, 52, 32)]
    others = [(1, 52), (52, 8), (8, 520), (16, 52), (18, 52)]
    arrays = [Array("u32", shape) for shape in (*seen, *others)]
    assert _of_all_groups(arrays, 8) == arrays[: len(seen)]


@pytest.mark.slow
@pytest.mark.parametrize("num_partitions", [8, 128, 2048])
def test_two_all_to_alls_forward_and_four_with_backward(num_partitions):
    if not topology.is_installed():
        with pytest.raises(ValueError, match="the TPU compiler is not installed"):
            _compiled(_forward, num_partitions)
        return
    d = num_partitions
    forward = _compiled(_forward, d)
    ops = forward.report().collective_ops
    assert [(op.kind, op.group_size) for op in ops] == [("all-to-all", d)] * 2
    both = _compiled(compilation.forward_and_backward, d)
    report = both.report()
    assert report.count("all-to-all") == 4
    others = [op for op in report.collective_ops if op.kind != "all-to-all"]
    # The gradient of the gate's replicated weights, and the sums in the auxiliary loss.
    assert {op.kind for op in others} == {"all-reduce"}
    gate_bytes = 4 * _SMALL.model_dim * _SMALL.experts * d
    assert sum(op.result_bytes for op in others) <= gate_bytes + 4 * (_SMALL.experts * d + 8)
    for executable in (forward, both):
        # Random numbers, masks and gates are computed where they are used.
        assert not _of_all_groups(_arrays(executable.module), d)


@pytest.mark.slow
def test_neither_program_nor_memory_grows():
    if not topology.is_installed():
        with pytest.raises(ValueError, match="the TPU compiler is not installed"):
            compilation.measure(8, _SMALL)
        return
    rows = [compilation.measure(d, _SMALL) for d in (8, 128, 2048)]
    instructions = [row.report.num_instructions for row in rows]
    assert max(instructions) < 1.5 * min(instructions)
    # Weights, tokens and their gradients; only the replicated gate grows with the experts.
    gates = [4 * _SMALL.model_dim * _SMALL.experts * row.num_partitions for row in rows]
    rest = [row.report.argument_bytes - gate for row, gate in zip(rows, gates, strict=True)]
    assert max(rest) < 1.5 * min(rest)


def _row(num_partitions, num_instructions, compile_cpu_secs):
    report = CompiledReport(
        **{field.name: 0 for field in dataclasses.fields(CompiledReport)}
        | {"collectives": (("all-to-all", 4), ("all-gather", 0)), "collective_ops": ()}
        | {"num_instructions": num_instructions, "argument_bytes": 2**20, "temp_bytes": 3 * 2**20}
    )
    return Compiled(num_partitions, 0.25, compile_cpu_secs, report)


def test_the_table_gives_the_growth():
    rows = [_row(8, 1000, 5.0), _row(128, 1200, 10.0), _row(2048, 1100, 12.0)]
    head, first, second, _, growth, family = compilation.cores_table(rows).splitlines()
    assert head.split()[:3] == ["cores", "instructions", "lower"]
    assert first.split()[:4] == ["8", "1000", "0.2", "5.0"]
    assert second.split()[4:] == ["1.0", "3.0", "0.0", "MiB", "in", "4", "all-to-all"]
    assert growth.startswith("Largest over smallest: 1.20 instructions, 2.40 s to compile.")
    assert family == "2048 cores over 128: 1.20 s to compile."


@pytest.mark.parametrize("num_layers", compilation.LAYERS)
def test_the_layers_are_two_loops_and_their_groups_divide_evenly(num_layers):
    request = compilation.layers_request(num_layers)
    params = request.params
    for stack in (params.task.encoder, params.task.decoder):
        assert stack.num_layers == num_layers // 2
        assert stack.layers_as is Layers.LOOP and stack.remat is Remat.ALL_BUT_PRODUCTS
    planner._check_groups(params, request.partitioning)


def test_the_table_of_layers_gives_the_growth():
    made = [
        plans.plan(plans.cost(instructions=count), compile_cpu_secs=secs)
        for count, secs in ((1000, 20.0), (1100, 22.0), (1200, 29.0))
    ]
    head, *rows, last = compilation.layers_table(made).splitlines()
    assert head.split() == ["layers", "instructions", "lower", "s", "compile", "CPU", "s"]
    assert [row.split()[:2] for row in rows] == [["12", "1000"], ["36", "1100"], ["60", "1200"]]
    assert last == "60 layers over 12: x1.45 to compile"


@pytest.mark.slow
def test_sixty_layers_cost_little_more_than_twelve():
    if not topology.is_installed():
        with pytest.raises(ValueError, match="the TPU compiler is not installed"):
            next(compilation.measure_layers())
        return
    made = list(compilation.measure_layers())
    assert made[-1].compile_cpu_secs <= 1.5 * made[0].compile_cpu_secs
    assert made[-1].cost.instructions <= 1.5 * made[0].cost.instructions
