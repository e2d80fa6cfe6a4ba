"""Plans made by hand, for tests of the code that reads plans."""

import dataclasses

from lingvo_gshard.planning.plan import (
    GIB,
    TRAIN,
    Batch,
    Buffer,
    CollectiveSum,
    Memory,
    Plan,
    ProgramPlan,
    StepCost,
    Times,
)

_OF_A_PROGRAM = {field.name for field in dataclasses.fields(ProgramPlan)}


def cost(step_secs: float = 0.5, network_secs: float = 0.1, instructions: int = 1000) -> StepCost:
    """Returns a step of two categories and one kind of collective."""
    local = step_secs - network_secs
    experts = Times(0.5 * local, 0.1 * local, network_secs, 0.6 * local + network_secs)
    optimizer = Times(0.0, 0.4 * local, 0.0, 0.4 * local)
    return StepCost(
        collectives=(CollectiveSum("all-to-all", 8, 2**23, "encoder/layers_1/dispatch"),),
        flops_per_core={"experts": 3e12, "optimizer": 0.0},
        roofline_secs=experts + optimizer,
        roofline_secs_by_category={"experts": experts, "optimizer": optimizer},
        network_secs_by_kind={"all-to-all": network_secs},
        recomputed_flops_per_core=6e11,
        recomputed_secs=Times(0.05 * local, 0.0, 0.25 * network_secs, 0.25 * step_secs),
        xla_optimal_secs=0.6,
        xla_optimal_secs_once=0.2,
        instructions=instructions,
        uncounted_loops=(),
    )


def program(made: StepCost | None, **changes) -> ProgramPlan:
    """Returns a program with that cost; without a cost it does not fit."""
    peak = 9.0 if made else 20.0
    fields = dict(
        batch=Batch(4096, 256, 256),  # 2**20 target tokens.
        fits=made is not None,
        memory_gib=Memory(15.48, 1.0, 2.0, 0.25, peak - 3.25, peak),
        largest_buffers=(Buffer(2**30 / GIB, "f32[8,256,32000]", "softmax"),),
        suspicious=(),
        cost=made,
        lower_secs=10.0,
        compile_secs=40.0,
        compile_cpu_secs=60.0,
    )
    return ProgramPlan(**(fields | changes))


def plan(made: StepCost | None, cores: int = 128, programs=None, **changes) -> Plan:
    """Returns a plan whose training step has that cost, with other `programs` by name."""
    of_the_step = {name: changes.pop(name) for name in _OF_A_PROGRAM & changes.keys()}
    fields = dict(
        model="m4.MoE128E12L",
        settings=("train.seed=3",),
        topology="v3:8x8",
        mesh={"d": cores},
        sharding={"B": "d", "E": "d"},
        cores=cores,
        weights=12_500_000_000,
        model_flops_per_core=2e12,
        host_peak_gib=3.5,
        programs={TRAIN: program(made, **of_the_step), **(programs or {})},
    )
    return Plan(**(fields | changes))


def without_a_step(**programs) -> Plan:
    """Returns a plan of other programs than the training step, by name."""
    return dataclasses.replace(plan(None), programs=programs)
