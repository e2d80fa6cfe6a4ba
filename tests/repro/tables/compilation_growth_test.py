"""Programs do not grow: the MoE layer on 8 to 2048 cores, and steps of 12 to 60 layers."""

import re

import pytest

from lingvo_gshard.layers.numerics import Remat
from lingvo_gshard.layers.repeat import Layers
from lingvo_gshard.plans import topology_executable
from lingvo_gshard.spmd import lowering
from repro.tables import compilation_growth, moe_layer
from xla_plan.machines import topology

# Large enough that sending tokens costs less than sending experts. With two experts per group, the
# experts' shapes differ from all of the groups' shapes.
_SMALL = moe_layer.Sizes(model_dim=32, hidden_dim=96, tokens=52, experts=2)


def _compiled(make, num_partitions):
    exported = lowering.export(make(num_partitions, _SMALL), moe_layer.partitioning(num_partitions))
    return topology_executable.compile_program(exported, topology.tpu("v3", num_partitions))


def _of_all_groups(arrays, num_partitions):
    """Returns the arrays of one core's program that hold all tokens of all groups."""
    groups_tokens = f"{num_partitions},{_SMALL.tokens}|{num_partitions * _SMALL.tokens}"
    whole = re.compile(rf"\[(?:\d+,)*(?:{groups_tokens})[,\]]")
    return [array for array in arrays if whole.search(str(array))]


def _arrays(module):
    return [array for instruction in module.instructions() for array in instruction.arrays]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("num_partitions", [8, 128, 2048])
def test_two_all_to_alls_forward_and_four_with_backward(num_partitions):
    if not topology.is_installed("v3"):
        with pytest.raises(ValueError, match="the TPU compiler is not installed"):
            _compiled(moe_layer.forward, num_partitions)
        return
    d = num_partitions
    forward = _compiled(moe_layer.forward, d)
    ops = forward.report().collective_ops
    assert [(op.kind, op.group_size) for op in ops] == [("all-to-all", d)] * 2
    both = _compiled(moe_layer.forward_and_backward, d)
    report = both.report()
    assert report.count("all-to-all") == 4
    others = [op for op in report.collective_ops if op.kind != "all-to-all"]
    # These are the gradient of the gate's replicated weights, and the auxiliary loss's sums.
    assert {op.kind for op in others} == {"all-reduce"}
    gate_bytes = 4 * _SMALL.model_dim * _SMALL.experts * d
    assert sum(op.result_bytes for op in others) <= gate_bytes + 4 * (_SMALL.experts * d + 8)
    for executable in (forward, both):
        # Random numbers, masks and gates are computed where they are used.
        assert not _of_all_groups(_arrays(executable.module), d)


@pytest.mark.slow
def test_neither_program_nor_memory_grows():
    if not topology.is_installed("v3"):
        with pytest.raises(ValueError, match="the TPU compiler is not installed"):
            _compiled(moe_layer.forward_and_backward, 8)
        return
    cores = (8, 128, 2048)
    reports = [_compiled(moe_layer.forward_and_backward, d).report() for d in cores]
    instructions = [report.num_instructions for report in reports]
    assert max(instructions) < 1.5 * min(instructions)
    # Of weights, tokens and their gradients, only the replicated gate grows with the experts.
    gates = [4 * _SMALL.model_dim * _SMALL.experts * d for d in cores]
    rest = [report.argument_bytes - gate for report, gate in zip(reports, gates, strict=True)]
    assert max(rest) < 1.5 * min(rest)


@pytest.mark.parametrize(("cores", "num_layers"), [(8, 12), (8, 36), (8, 60), (2048, 4)])
def test_the_layers_are_two_loops_and_their_groups_divide_evenly(cores, num_layers):
    request = compilation_growth.request(cores, num_layers)
    params = request.params
    assert request.partitioning.mesh.num_partitions == cores
    for stack in (params.task.encoder, params.task.decoder):
        assert stack.num_layers == num_layers // 2 and stack.moe.num_experts == cores
        assert stack.layers_as is Layers.LOOP and stack.remat is Remat.ALL_BUT_PRODUCTS
    request.check_divisible()
