"""The reading of a compiled program, and the sums of its collectives."""

import types

import pytest

from tests.xla_spmd.hlo import hlo_text, programs
from xla_plan.cost import compiled_step
from xla_plan.cost.scopes import source
from xla_plan.cost.step_cost import CollectiveSum
from xla_spmd.hlo import hlo_cost, trip_counts
from xla_spmd.hlo.collectives import Collective

_MODULE = programs.kept("tpu_step")


def _read(loops):
    """Reads the kept program as if its loops had these trip counts."""
    report = types.SimpleNamespace(loops=loops)
    return compiled_step.read(types.SimpleNamespace(module=_MODULE, report=lambda: report))


def test_a_program_is_read_with_the_cost_of_each_instruction():
    loops = trip_counts.count(_MODULE).trip_counts
    step = _read(loops)
    assert step.report.loops is loops
    assert step.costs == hlo_cost.costs(_MODULE)
    assert step.gathered_bytes == {} and step.uncounted_loops == ()


def test_loops_of_unknown_length_are_named_by_their_layers():
    instructions = {instruction.name: instruction for instruction in _MODULE.instructions()}
    loops = trip_counts.count(_MODULE).trip_counts
    first, *others = loops

    assert _read(loops | {first: None}).uncounted_loops == (source(instructions[first].op_name),)

    # Several loops of one layer count once.
    layers = {source(instructions[name].op_name) for name in loops}
    assert others and set(_read(dict.fromkeys(loops)).uncounted_loops) == layers


def test_a_user_gives_the_flops_of_kernels():
    module = hlo_text.module(
        """
        ENTRY main {
          x = f32[64]{0} parameter(0)
          flash.1 = f32[64]{0} custom-call(x), custom_call_target="tpu_custom_call"
          ROOT norm.1 = f32[64]{0} custom-call(flash.1), custom_call_target="tpu_custom_call"
        }
        """
    )
    report = types.SimpleNamespace(loops={})
    compiled = types.SimpleNamespace(module=module, report=lambda: report)
    step = compiled_step.read(compiled, {"flash": 640})
    assert [cost.flops for cost in step.costs] == [640, 0]
    assert step.uncounted_kernels == ("norm",)
    with pytest.raises(ValueError, match="'flush': the program's kernels are: flash, norm"):
        compiled_step.read(compiled, {"flush": 640})


def test_collectives_are_summed_by_kind_and_layer():
    def collective(kind, result_bytes, times, op_name):
        return Collective(kind, result_bytes, ((0, 1),), times, op_name)

    norm = "call_tf/encoder/layers_0/norm/mul"
    gate = "call_tf/encoder/layers_1/gate/Einsum"
    collectives = [
        collective("all-reduce", 100, 1, norm),
        collective("all-to-all", 50, 6, gate),
        collective("all-reduce", 25, 2, "call_tf/encoder/layers_0/norm/add"),
        collective("all-reduce", 10, 1, gate),
    ]
    assert compiled_step.sum_by_source(collectives) == (
        CollectiveSum("all-to-all", 6, 300, "encoder/layers_1/gate"),
        CollectiveSum("all-reduce", 3, 150, "encoder/layers_0/norm"),
        CollectiveSum("all-reduce", 1, 10, "encoder/layers_1/gate"),
    )
    assert compiled_step.sum_by_source([]) == ()
