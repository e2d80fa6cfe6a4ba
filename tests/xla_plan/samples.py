"""Plans made by hand, for tests of the code that reads plans."""

import dataclasses
import pathlib

from lingvo_gshard.plans.plan import TRAIN, Plan
from xla_plan.cost.memory import Buffer, Memory, RoleMemory
from xla_plan.cost.step_cost import CollectiveSum, StepCost, Times
from xla_plan.machines.hardware import GIB
from xla_plan.plans import plan_folder
from xla_plan.plans.program_plan import Batch, ProgramPlan

_OF_A_PROGRAM = {field.name for field in dataclasses.fields(ProgramPlan)}


def cost(step_secs: float = 0.5, network_secs: float = 0.1, instructions: int = 1000) -> StepCost:
    """Returns a step of two categories and one kind of collective."""
    local = step_secs - network_secs
    experts = Times(0.5 * local, 0.1 * local, network_secs, 0.6 * local + network_secs)
    optimizer = Times(0.0, 0.4 * local, 0.0, 0.4 * local)
    recomputed = Times(0.05 * local, 0.0, 0.25 * network_secs, 0.25 * step_secs)
    forward = Times(0.45 * local, 0.5 * local, 0.75 * network_secs, 0.75 * step_secs)
    return StepCost(
        collectives=(CollectiveSum("all-to-all", 8, 2**23, "encoder/layers_1/dispatch"),),
        flops_per_core={"experts": 3e12, "optimizer": 0.0},
        roofline_secs=experts + optimizer,
        roofline_secs_by_category={"experts": experts, "optimizer": optimizer},
        network_secs_by_kind={"all-to-all": network_secs},
        roofline_secs_by_pass={"forward": forward, "recomputed": recomputed},
        recomputed_flops_per_core=6e11,
        xla_optimal_secs=0.6,
        xla_optimal_secs_once=0.2,
        instructions=instructions,
        uncounted_loops=(),
    )


def memory(peak: float, capacity: float = 15.48) -> Memory:
    """Returns the memory of a state of 3.25 GiB, and of temporaries up to a peak."""
    sizes = {"replicated weights": 1.0, "expert weights": 2.0, "optimizer slots": 0.25}
    roles = {name: RoleMemory(8, gib, donated_gib=gib) for name, gib in sizes.items()}
    return Memory(capacity, roles, outputs=0.0, temporaries=max(peak - 3.25, 0.25), peak=peak)


def program(made: StepCost | None, **changes) -> ProgramPlan:
    """Returns a program with that cost; without a cost it does not fit."""
    peak = 9.0 if made else 20.0
    fields = dict(
        name=TRAIN,
        topology="v3:8x8",
        mesh={"d": 128},
        batch=Batch(4096, 256, 256),  # 2**20 target tokens.
        fits=made is not None,
        memory_gib=memory(peak),
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
    step = program(made, mesh={"d": cores}, **of_the_step)
    fields = dict(
        model="m4.MoE128E12L",
        settings=("train.seed=3",),
        sharding={"B": "d", "E": "d"},
        weights=12_500_000_000,
        model_flops_per_core=2e12,
        host_peak_gib=3.5,
        programs=_named({TRAIN: step, **(programs or {})}),
    )
    return Plan(**(fields | changes))


def without_a_step(**programs) -> Plan:
    """Returns a plan of the given programs by name, without a training step."""
    return dataclasses.replace(plan(None), programs=_named(programs))


def _named(programs: dict[str, ProgramPlan]) -> dict[str, ProgramPlan]:
    return {name: dataclasses.replace(made, name=name) for name, made in programs.items()}


def save(made: Plan, folder: pathlib.Path) -> None:
    """Saves a plan of an experiment."""
    plan_folder.save(made, folder, "")


def load(folder: pathlib.Path) -> Plan:
    """Returns a saved plan of an experiment."""
    return plan_folder.load(Plan, folder)
