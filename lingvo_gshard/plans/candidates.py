"""The partitionings that a search considers: meshes, tables, remats and pipelines.

They follow from the devices and the letters' sizes. All divide the sizes and fit by the estimate.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.dispatch import Dispatch
from lingvo_gshard.layers.numerics import Remat
from lingvo_gshard.layers.repeat import Layers
from lingvo_gshard.model import placement, remats
from lingvo_gshard.model.step_memory import StepMemory
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.plans.cost_model import CostModel
from lingvo_gshard.plans.request import Request
from lingvo_gshard.runs import loss_products
from lingvo_gshard.sharding.layout import Partitioning
from xla_plan.machines import networks
from xla_plan.machines.hardware import GIB
from xla_spmd.mesh import Mesh

_BATCH_AXES = ("data", "experts")  # They always split the batch.
_MAX_AXES = 3
# The remats that a search tries for the backward pass.
_REMATS = (Remat.NONE, Remat.ALL_BUT_PRODUCTS, Remat.BLOCK)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A mesh, a table and a schedule as settings, `path=value`, and the cost model's estimate."""

    settings: tuple[str, ...]  # The first is the mesh and the second is the table.
    secs: float  # The estimated time of a step.


@dataclasses.dataclass(frozen=True)
class _Schedule:
    """The schedule of a step through the layers."""

    remat: Remat
    microbatches: int  # The number of a pipeline's microbatches; otherwise 1.
    scatter_gradients: bool  # If updates are split: ZeRO-2 if true, else ZeRO-1.


def candidates(request: Request) -> list[Candidate]:
    """Returns all candidates that fit by the cost model, the fastest first.

    Raises ValueError if no candidate fits, or for a task without stacks of Transformer layers.
    """
    if not request.params.task.cls.STACKS:
        raise ValueError(
            f"{request.model} has no stacks of Transformer layers, which the cost "
            "model needs; plan a mesh and a table of your own by --set=mesh and --set=sharding."
        )

    # The cost model needs the shapes of weights and slots, and the loss's products. They do not
    # depend on the partitioning.
    mesh = request.partitioning.mesh
    network = networks.network(request.topology, mesh)
    unpartitioned = Partitioning(Mesh.flat(1), ())
    task_model = TaskModel(remats.replaced(request.params, Remat.BLOCK), unpartitioned)
    products = loss_products.of_experiment(request.params)
    memory = StepMemory(request.params, task_model, products)
    costs = CostModel(request.params, task_model, products, network)

    # Memory is checked first: most meshes have too little.
    letter_sizes = _letter_sizes(request, task_model.state_spec.theta)
    stacks = tuple(request.params.task.cls.STACKS)
    fitting = []
    for layout in layouts(letter_sizes, stacks, mesh.num_partitions):
        partitioning = request.changed(layout).partitioning
        for schedule in _schedules(request.params, partitioning):
            by_stack = dict.fromkeys(stacks, schedule.remat)
            options = (schedule.microbatches, schedule.scatter_gradients)
            num_bytes = memory.num_bytes(partitioning, by_stack, *options)
            if num_bytes > network.generation.capacity_gib * GIB:
                continue

            settings = (*layout, *_schedule_settings(request.params, partitioning, schedule))
            if _is_divisible(request.changed(settings)):
                secs = costs.estimate(partitioning, schedule.remat, *options)
                fitting.append(Candidate(settings, secs.step))

    if not fitting:
        raise ValueError(
            f"no mesh of {mesh.num_partitions} devices divides the model and its batches "
            "and leaves room for a step; change --topology or the sizes."
        )
    return sorted(fitting, key=lambda candidate: candidate.secs)


def layouts(
    sizes: Mapping[str, int], stacks: Sequence[str], cores: int
) -> Iterator[tuple[str, str]]:
    """Yields the settings of all meshes of up to three axes, and tables, that divide the sizes.

    The axes `data` and `experts` both split the batch; `model` splits heads, hidden dims and
    vocabularies, and perhaps the experts. The dim M of all weights, or only of their updates (m),
    may be split over the axes of the batch. The axis `stages` holds a pipeline's stages, and splits
    the batch outside the pipeline.

    Layers may differ: where there is an axis `model`, one of the stacks or both may split the batch
    over it instead; and the softmax may be split by vocabulary while all other layers are data
    parallel. Products may be two-dimensional, with M of activations over `model`, and of weights
    over the axes of the batch.
    """
    for axes in _meshes(sizes, cores):
        mesh = ",".join(f"{name}:{size}" for name, size in axes.items())

        always = _batch_rows(axes)
        if "experts" in axes:
            always.append("E:experts")

        # Each row is a separate choice, and may be left out.
        model_rows = _tensor_parallel_rows(sizes, axes)
        stack_rows = _stack_rows(sizes, stacks, axes)
        weight_rows = _weight_rows(sizes, axes)
        tables: list[tuple[str, ...]] = []
        tables += itertools.product(model_rows, stack_rows, weight_rows)
        tables += itertools.product(model_rows, _two_dims_rows(sizes, axes))

        for choice in tables:
            rows = [*always, *choice]
            table = ",".join(row for row in rows if row)
            yield f"mesh={mesh}", f"sharding={table}"


def _meshes(sizes: Mapping[str, int], cores: int) -> Iterator[dict[str, int]]:
    """Yields the axes, each larger than 1, of all meshes of `cores` cores that divide the sizes."""
    divisors = [n for n in range(1, cores + 1) if cores % n == 0]
    for stages, experts, model in itertools.product(divisors, divisors, divisors):
        data, remainder = divmod(cores, stages * experts * model)
        if remainder:
            continue

        # In a pipeline `stages` splits the batch of embeddings and softmax, too.
        batch_ways = data * experts
        if sizes["B"] % (batch_ways * stages) or sizes["G"] % batch_ways:
            continue
        if sizes["E"] % experts or sizes["R"] % stages:
            continue

        # Axes of one partition are left out, except the last remaining axis.
        axes = {"data": data, "experts": experts, "model": model, "stages": stages}
        used = {name: size for name, size in axes.items() if size > 1}
        if len(used) <= _MAX_AXES:
            yield used or {"data": 1}


def _batch_rows(axes: Mapping[str, int]) -> list[str]:
    """Returns the rows of B and G over the axes of the batch, and of R over a pipeline's axis."""
    batch_axes = [name for name in axes if name in _BATCH_AXES]
    batch = "+".join(batch_axes)

    if "stages" in axes:
        # Outside the pipeline, the axis of its stages splits the batch, too.
        rows = ["R:stages", f"B:{batch}+stages" if batch else "B:stages"]
        if batch:
            rows.append(f"G:{batch}")
        return rows

    return [f"BG:{batch}"] if batch else []


def _tensor_parallel_rows(sizes: Mapping[str, int], axes: Mapping[str, int]) -> list[str]:
    """Returns the possible rows of the axis `model`: H, and the other letters that it divides.

    Without such an axis the only choice is an empty row. If the axis does not divide H, the result
    is empty, since a mesh with an idle axis is not a candidate.
    """
    if "model" not in axes:
        return [""]

    # Tensor parallelism by heads and vocabularies, too, where these divide; and the same axis may
    # split the experts, as each axis splits only the first of a tensor's letters.
    ways = axes["model"]
    if sizes["H"] % ways:
        return []
    letters = "".join(letter for letter in "HNV" if sizes[letter] % ways == 0)
    rows = [f"{letters}:model"]
    if "experts" not in axes and sizes["E"] % ways == 0:
        rows.append(f"E{letters}:model")
    return rows


def _stack_rows(
    sizes: Mapping[str, int], stacks: Sequence[str], axes: Mapping[str, int]
) -> list[str]:
    """Returns the possible rows of layers that differ from the others; the first choice is empty.

    A data-parallel stack splits its batch over `model`, too, and has whole heads and hidden dims.
    Without an axis `model`, only the softmax may differ, whose V then has the axes of the batch.
    """
    if "stages" in axes:
        return [""]

    batch_axes = [name for name in axes if name in _BATCH_AXES]
    batch = "+".join(batch_axes)
    batch_ways = math.prod(axes[name] for name in batch_axes)
    if "model" not in axes:
        has_parts = batch_ways > 1 and sizes["V"] % batch_ways == 0
        return ["", f"V:{batch},U:-"] if has_parts else [""]

    ways = batch_ways * axes["model"]
    if sizes["B"] % ways or sizes["G"] % ways:
        return [""]
    all_axes = "+".join([*batch_axes, "model"])
    data_parallel = [f"{stack}.BG:{all_axes},{stack}.HN:-" for stack in stacks]
    rows = ["", *data_parallel]
    if len(stacks) > 1:
        rows.append(",".join(data_parallel))
    return rows


def _two_dims_rows(sizes: Mapping[str, int], axes: Mapping[str, int]) -> list[str]:
    """Returns the row of 2-D products, if the axes allow them.

    The products are of activations [B:data, M:model] and weights [M:data, H:model].
    """
    batch_axes = [name for name in axes if name in _BATCH_AXES]
    weight_ways = math.prod(axes[name] for name in batch_axes)
    if "stages" in axes or "model" not in axes or not batch_axes:
        return []
    if sizes["M"] % axes["model"] or sizes["M"] % weight_ways:
        return []
    return [f"M:model,weights.M:{'+'.join(batch_axes)}"]


def _weight_rows(sizes: Mapping[str, int], axes: Mapping[str, int]) -> list[str]:
    """Returns the possible rows of weights' M: empty, for updates alone (m), and for both.

    M is split over as many of the batch's axes as divide it; in a pipeline it is not split.
    """
    if "stages" in axes:
        return [""]

    batch_axes = [name for name in axes if name in _BATCH_AXES]
    for names in (batch_axes, batch_axes[:1], batch_axes[1:]):
        ways = math.prod(axes[name] for name in names)
        if names and sizes["M"] % ways == 0:
            over = "+".join(names)
            return ["", f"m:{over}", f"M:{over}"]
    return [""]


def _schedules(params: Params, partitioning: Partitioning) -> list[_Schedule]:
    """Returns the remats, or in a pipeline the numbers of microbatches that divide the rows."""
    stages, batch_ways, *_ = partitioning.factor("RBLM")
    if stages == 1:
        # A scattered gradient needs less memory, and may need less time.
        has_split_updates = "m" in dict(partitioning.table)
        own_choice = params.train.scatter_gradients
        choices = [True, False] if has_split_updates else [own_choice]
        return [
            _Schedule(remat, microbatches=1, scatter_gradients=scatters)
            for remat, scatters in itertools.product(_REMATS, choices)
        ]

    # With fewer microbatches than stages, some stages would never work at the same time.
    rows = params.input.batch_size // batch_ways
    counts = [count for count in range(stages, rows + 1) if rows % count == 0]
    return [_Schedule(Remat.BLOCK, count, params.train.scatter_gradients) for count in counts]


def _schedule_settings(
    params: Params, partitioning: Partitioning, schedule: _Schedule
) -> list[str]:
    """Returns the settings of all stacks, and a pipeline's settings only if they change."""
    # The settings name the candidate in the ranking, so unchanged ones are left out.
    (stages,) = partitioning.factor("R")
    pipeline = {"stages": stages, "microbatches": schedule.microbatches}

    settings = []
    if params.train.scatter_gradients != schedule.scatter_gradients:
        settings.append(f"train.scatter_gradients={schedule.scatter_gradients}")
    for stack in params.task.cls.STACKS:
        settings.append(f"task.{stack}.remat={schedule.remat.name}")
        for name, value in pipeline.items():
            if params.task.Get(stack).Get(name) != value:
                settings.append(f"task.{stack}.{name}={value}")
    return settings


def _is_divisible(request: Request) -> bool:
    """Returns whether the mesh divides all batches of the request and their groups."""
    try:
        request.check_divisible()
    except ValueError:
        return False
    return True


def _letter_sizes(request: Request, weights: NestedMap) -> dict[str, int]:
    """Returns the size of each letter that a table may split.

    If a letter has several sizes, it is their greatest common divisor.
    """
    # The letters of weights come from their specs; groups and rows come from the batches.
    params = request.params
    occurrences: list[tuple[str, int]] = []
    for spec in weights.Flatten():
        occurrences += zip(spec.dims, spec.shape, strict=True)
    for count in placement.num_groups(params).values():
        occurrences.append(("G", count))
    for batch in request.batches:
        occurrences.append(("B", params.Get(batch).batch_size))

    sizes: dict[str, int] = {}
    for letter, size in occurrences:
        sizes[letter] = math.gcd(sizes.get(letter, 0), size)  # gcd(0, size) is size.

    # Either all stacks are pipelines, or all are not.
    if not all(_may_be_pipeline(params.task.Get(stack)) for stack in params.task.cls.STACKS):
        sizes["R"] = 1

    # A dense model has neither experts nor groups.
    sizes.setdefault("E", 1)
    sizes.setdefault("G", sizes["B"])
    return sizes


def _may_be_pipeline(stack: Params) -> bool:
    """Returns whether a stack's layers can be the stages of a pipeline."""
    if stack.layers_as is not Layers.LOOP:
        return False
    return stack.moe is None or stack.moe.dispatch is Dispatch.EINSUM
