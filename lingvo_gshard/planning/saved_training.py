"""Compiles for a topology the programs that the trainer calls, and saves their executables."""

import functools
import pathlib

from lingvo_gshard.model.translation_model import TranslationModel
from lingvo_gshard.planning import planner
from lingvo_gshard.planning.planner import Request
from lingvo_gshard.spmd import saved_executable, topology
from lingvo_gshard.train.loop import group_sizes


def save(request: Request, folder: pathlib.Path) -> str:
    """Saves in `folder` what the trainer would compile, and describes it.

    A plan is that of one step; the trainer's program does train.iterations_per_loop of them, and is
    compiled here in a process of its own. Raises ValueError if it needs more memory than a device
    has or cannot be serialized, or if that process died.
    """
    names = planner.in_own_process(functools.partial(_save, folder=folder), request)
    programs, them = ("program", "it") if len(names) == 1 else ("programs", "them")
    return (
        f"saved the compiled {programs} {', '.join(names)} (of train.iterations_per_loop steps, "
        f"compiled besides the plan's one): `trainer --executables={folder}` loads {them}"
    )


def _save(request: Request, folder: pathlib.Path) -> list[str]:
    planner.check(request.params, request.partitioning)
    model, p = TranslationModel(request.params, request.partitioning), request.params.train
    names = []
    for num_steps in dict.fromkeys(group_sizes(0, p.max_steps, p.iterations_per_loop)):
        program = planner.export(model, request.params, num_steps)
        try:
            compiled = topology.compile_program(program, request.topology)
        except topology.OutOfMemoryError as error:
            raise ValueError(str(error)) from None  # One that can be sent to another process.
        saved_executable.save(compiled, folder)
        names.append(program.name)
    return names
