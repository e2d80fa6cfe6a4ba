"""Makes plans: compiles an experiment's programs for a topology and reads the results.

A plan is made again only if the experiment, the code or the compilers have changed.
"""

import contextlib
import dataclasses
import multiprocessing
import pathlib
import resource
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Self, TypeVar

from lingvo_gshard import registry
from lingvo_gshard.core import hyperparams
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.files import child_process, digests
from lingvo_gshard.model import flops, placement
from lingvo_gshard.model.translation_model import TranslationModel
from lingvo_gshard.planning import hardware, plan, programs, report
from lingvo_gshard.planning.memory import GIB
from lingvo_gshard.planning.plan import Plan
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.sharding.mesh import names_of
from lingvo_gshard.spmd import environment, saved_executable, topology, versions
from lingvo_gshard.train.loop import group_sizes

# The settings of the batches that programs take.
BATCHES = {plan.TRAIN: "input", plan.EVALUATE: "eval_input", plan.DECODE: "decode"}
_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True)
class Request:
    """What to plan: a registered experiment on a topology such as `v3:32x32`."""

    model: str
    settings: tuple[str, ...]  # Changes to the experiment, `path=value`.
    params: Params  # The experiment with those changes, vocabularies included.
    topology: str
    partitioning: Partitioning
    programs: tuple[str, ...] = plan.PROGRAMS

    def step_only(self) -> Self:
        """The same request for the training step alone."""
        return dataclasses.replace(self, programs=(plan.TRAIN,))

    def changed(self, settings: Sequence[str]) -> Self:
        """The same request with more settings."""
        params = self.params.Copy()
        for setting in settings:
            hyperparams.apply_setting(params, setting)
        return dataclasses.replace(
            self,
            settings=(*self.settings, *settings),
            params=params,
            partitioning=placement.partitioning(params, self.partitioning.mesh.num_partitions),
        )


def request(
    model: str, topology_name: str, settings: Sequence[str], batch_tokens: int | None
) -> Request:
    """A request for an experiment partitioned over all cores as the trainer does it.

    `batch_tokens`, the target tokens of a batch, is a setting too, unless it is None. Raises
    ValueError for an unknown model, setting or topology, a vocabulary without a size, if rows do
    not make up the batch's tokens, or if the mesh does not fit the cores.
    """
    settings = tuple(settings)
    if batch_tokens is not None:
        settings += (_batch_setting(model, settings, batch_tokens),)
    params = registry.get_params(model, settings)
    for name in ("source_vocab_size", "target_vocab_size"):
        if params.task.Get(name) is None:
            raise ValueError(
                f"task.{name} is taken from the data, which a plan does not have; give "
                f"--set=task.{name}=SIZE."
            )
    parts = placement.partitioning(params, len(topology.devices(topology_name)))
    return Request(model, settings, params, topology_name, parts)


def planned(request: Request, folder: pathlib.Path) -> Plan:
    """The plan kept in `folder`, written there with its report after each program that it lacked.

    Each program is planned in a process of its own, so that its memory is measured alone and a
    compiler that dies takes no other plan with it. Raises as in_own_process.
    """
    check(request)
    fingerprint, kept = _fingerprint(request), folder / "fingerprint"
    is_kept = kept.is_file() and kept.read_text() == fingerprint
    found = None
    with contextlib.suppress(ValueError):  # What is damaged or missing is planned again.
        found = plan.load(folder) if is_kept else None
    for name in request.programs:
        before = found.programs if found else {}
        if name not in before:
            made = in_own_process(make, dataclasses.replace(request, programs=(name,)))
            peak_gib = max(found.host_peak_gib if found else 0.0, made.host_peak_gib)
            both = before | made.programs
            found = dataclasses.replace(found or made, programs=both, host_peak_gib=peak_gib)
            kept.unlink(missing_ok=True)
            plan.save(found, folder)
            if name == plan.TRAIN:
                report.draw({found.model: found}, folder)  # Pictures of the training step alone.
            report.write(found, folder)
            kept.write_text(fingerprint)  # Last: without it the folder holds no finished plan.
    assert found is not None
    return found


def make(request: Request) -> Plan:
    """Compiles the experiment's programs and reads the results; ValueError as compile_program."""
    params, p, parts = request.params, request.params.input, request.partitioning
    model = TranslationModel(params, parts)
    needed = flops.train_step_flops(model.task, p.batch_size, p.source_len, p.target_len)
    made = {name: programs.make(name, model, params, request.topology) for name in request.programs}
    return Plan(
        model=request.model,
        settings=request.settings,
        topology=request.topology,
        mesh=parts.mesh.shape,
        sharding={letter: "+".join(names_of([axis])) for letter, axis in parts.table},
        cores=parts.mesh.num_partitions,
        weights=model.task.num_weights,
        model_flops_per_core=needed / parts.mesh.num_partitions,
        host_peak_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB,
        programs=made,
        bubble=placement.bubble(params),
    )


def save_training(request: Request, folder: pathlib.Path) -> str:
    """Saves in `folder` the training programs that the trainer would compile, and describes them.

    Raises ValueError if one needs more memory than a device has or cannot be serialized.
    """
    model, p = TranslationModel(request.params, request.partitioning), request.params.train
    machine, names = hardware.generation(request.topology), []
    for num_steps in dict.fromkeys(group_sizes(0, p.max_steps, p.iterations_per_loop)):
        program = programs.export(plan.TRAIN, model, request.params, num_steps)
        compiled = topology.compile_program(program, request.topology)
        needed, capacity = compiled.report().peak_bytes / GIB, machine.capacity_gib
        if needed > capacity:  # The compiler for GPUs accepts programs of any size.
            raise ValueError(f"{program.name} needs {needed:.2f} of {capacity:.2f} GiB: not saved.")
        saved_executable.save(compiled, folder)
        names.append(program.name)
    what, them = ("program", "it") if len(names) == 1 else ("programs", "them")
    return (
        f"saved the compiled {what} {', '.join(names)} (of train.iterations_per_loop steps, "
        f"compiled besides the plan's one): `trainer --executables={folder}` loads {them}"
    )


def _batch_setting(model: str, settings: tuple[str, ...], batch_tokens: int) -> str:
    """The setting of as many rows as make up a batch of `batch_tokens`."""
    if any(setting.startswith("input.batch_size=") for setting in settings):
        raise ValueError("give --batch_tokens or --set=input.batch_size, not both.")
    length = registry.get_params(model, settings).input.target_len
    if batch_tokens < 1 or batch_tokens % length:
        raise ValueError(
            f"--batch_tokens={batch_tokens}: expected a multiple of {length}, "
            "the tokens of a row (input.target_len)."
        )
    return f"input.batch_size={batch_tokens // length}"


def in_own_process(function: Callable[[Request], _Result], request: Request) -> _Result:
    """Calls a function in a process of its own. Raises as the function, or if the process died."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(1, context, child_process.end_with_parent)
    with environment.quiet_stderr(), pool:
        try:
            return pool.submit(function, request).result()
        except BrokenProcessPool as error:
            raise ValueError(
                f"{request.model} on {request.topology}: the process that compiled it died; "
                "this machine's memory may be too small."
            ) from error


def _fingerprint(request: Request) -> str:
    """A digest of all that a plan depends on: the request, our code, the compilers."""
    compilers = versions.installed([*saved_executable.PACKAGES, "tensorflow"])
    asked = (request.model, request.params.ToText(), request.topology, request.partitioning)
    return digests.of_json(repr((asked, compilers)), digests.of_library())


def check(request: Request) -> None:
    """Refuses sizes that do not divide evenly over the cores."""
    asked = [part for name, part in BATCHES.items() if name in request.programs]
    placement.check_divisible(request.params, request.partitioning, asked)
