"""Signs of a bad partitioning in programs made by hand."""

import types

import pytest

from xla_plan.cost import suspicious
from xla_plan.cost.compiled_step import CompiledStep
from xla_plan.plans.program_plan import Batch
from xla_plan.program.stablehlo_program import Argument
from xla_spmd.hlo.collectives import Collective
from xla_spmd.hlo.hlo_cost import Cost
from xla_spmd.hlo.hlo_module import Array


def _suspicious(costs=(), collectives=(), num_partitions=8):
    report = types.SimpleNamespace(collective_ops=collectives)
    step = CompiledStep(report, costs, {})
    return suspicious.describe(step, Batch(16, 8, 12), num_partitions)


@pytest.mark.parametrize("length", [8, 12])  # The source's length and the target's.
def test_a_tensor_of_the_whole_batch_is_suspicious(length):
    def found(rows, num_partitions=8):
        array = Array("f32", (4, rows, length, 8192))
        cost = Cost("i", "fusion", "call_tf/encoder/norm/mul", 0, 0, (array,), 1)
        return _suspicious((cost,), num_partitions=num_partitions)

    assert found(16) == (
        f"f32[4,16,{length},8192], the whole batch on every core, from encoder/norm",
    )
    assert found(2) == ()
    assert found(16, num_partitions=1) == ()  # A single partition is always whole.


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


def test_arguments_that_are_stored_or_gathered_whole_are_suspicious():
    def argument(name, shape, ways):
        return Argument(name, Array("f32", shape), ways, has_sharding=True, is_donated=False)

    arguments = [
        argument("embedding", (1024, 512), (1, 1)),
        argument("up", (512, 1024), (1, 8)),
        argument("gate", (512, 1024), (8, 1)),
        argument("down", (1024, 256), (8, 1)),  # Nothing gathers it.
        argument("norm", (1024,), (1,)),  # It is small.
    ]
    gathered = Array("bf16", (512, 1024))
    costs = (
        Cost("g", "all-gather-start", "up", 0, 0, (Array("bf16", (512, 128)), gathered), 1),
        Cost("f", "fusion", "down", 0, 0, (Array("f32", (1024, 256)),), 1),
    )
    step = CompiledStep(None, costs, {})
    assert suspicious.describe_arguments(step, arguments) == (
        "argument f32[1024,512] is whole on every device, 2.0 MiB: embedding",
        "argument f32[512,1024] is gathered whole on every device, 2.0 MiB: up, the first of 2",
    )
