"""The MoE layer on 8 to 2048 cores: one program that does not grow, and what it sends."""

import dataclasses
import re

import pytest

from lingvo_gshard.hlo.compiled_report import CompiledReport
from lingvo_gshard.hlo.hlo_module import Array
from lingvo_gshard.planning import compilation
from lingvo_gshard.planning.compilation import Compiled, Sizes
from lingvo_gshard.spmd import program, topology

# Large enough that to send tokens costs less than to send experts. Two experts a group, so that
# no shape of experts is one of groups.
_SMALL = Sizes(model_dim=32, hidden_dim=96, tokens=52, experts=2)


def _compiled(make, num_partitions):
    exported = program.export(
        make(num_partitions, _SMALL), compilation.partitioning(num_partitions)
    )
    return topology.compile_program(exported, topology.v3(num_partitions))


def _of_all_groups(arrays, num_partitions):
    """Those of one core's arrays that hold a number for every group's every token."""
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
@pytest.mark.parametrize("num_partitions", compilation.CORES)
def test_two_all_to_alls_forward_and_four_with_backward(num_partitions):
    if not topology.is_installed():
        with pytest.raises(ValueError, match="the TPU compiler is not installed"):
            _compiled(compilation.forward, num_partitions)
        return
    d = num_partitions
    forward = _compiled(compilation.forward, d)
    ops = forward.report().collective_ops
    assert [(op.kind, op.group_size) for op in ops] == [("all-to-all", d)] * 2
    both = _compiled(compilation.forward_and_backward, d)
    report = both.report()
    assert report.count("all-to-all") == 4
    others = [op for op in report.collective_ops if op.kind != "all-to-all"]
    # The gradient of the gate's replicated weights, and what the auxiliary loss sums.
    assert {op.kind for op in others} == {"all-reduce"}
    gate_bytes = 4 * _SMALL.model_dim * _SMALL.experts * d
    assert sum(op.result_bytes for op in others) <= gate_bytes + 4 * (_SMALL.experts * d + 8)
    for executable in (forward, both):
        # Random numbers, masks and gates are made where they are used.
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
    # Weights, tokens and their gradients; the replicated gate alone has more of more experts.
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
    head, first, second, last = compilation.table(
        [_row(8, 1000, 2.0), _row(16, 1200, 5.0)]
    ).splitlines()
    assert head.split()[:3] == ["cores", "instructions", "lower"]
    assert first.split()[:4] == ["8", "1000", "0.2", "2.0"]
    assert second.endswith("1.0 MiB      3.0 MiB  0.0 MiB in 4 all-to-all")
    assert last.startswith("Largest over smallest: 1.20 instructions, 2.50 s to compile.")


def test_the_table_tells_the_familys_growth():
    rows = [_row(8, 900, 5.0), _row(128, 1000, 10.0), _row(2048, 1100, 12.0)]
    assert compilation.table(rows).endswith("\n2048 cores over 128: 1.20 s to compile.")
