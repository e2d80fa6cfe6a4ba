"""The trainer's own training programs, compiled and saved for `trainer --executables`."""

import pathlib

from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.plans import run_programs, topology_executable
from lingvo_gshard.plans.plan import TRAIN
from lingvo_gshard.plans.request import Request
from lingvo_gshard.spmd import saved_executable
from lingvo_gshard.train.loop import group_sizes
from xla_plan.machines import hardware
from xla_plan.machines.hardware import GIB


def save(request: Request, folder: pathlib.Path) -> list[str]:
    """Saves in `folder` the training programs that the trainer would compile; returns their names.

    Raises ValueError if one needs more memory than a device has or cannot be serialized.
    """
    model = TaskModel(request.params, request.partitioning)
    capacity_gib = hardware.generation(request.topology).capacity_gib

    # A program is a loop of iterations_per_loop steps; the last call may have fewer.
    train = request.params.train
    numbers_of_steps = dict.fromkeys(group_sizes(0, train.max_steps, train.iterations_per_loop))

    # Executables are large: each is saved before the next is made.
    names = []
    for num_steps in numbers_of_steps:
        program = run_programs.export(TRAIN, model, request.params, num_steps)
        compiled = topology_executable.compile_program(program, request.topology)

        # The compiler for GPUs accepts programs of any size.
        needed_gib = compiled.report().peak_bytes / GIB
        if needed_gib > capacity_gib:
            raise ValueError(
                f"{program.name} needs {needed_gib:.2f} of {capacity_gib:.2f} GiB: not saved."
            )

        saved_executable.save(compiled, folder)
        names.append(program.name)
    return names
