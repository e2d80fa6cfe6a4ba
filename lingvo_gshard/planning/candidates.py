"""The partitionings that a search considers: meshes, tables, remats and pipelines.

They follow from the devices and the letters' sizes, where those divide and, as estimated, fit.
"""

import collections
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.dispatch import Dispatch
from lingvo_gshard.layers.repeat import Layers, Remat
from lingvo_gshard.model import placement
from lingvo_gshard.model.translation_model import TranslationModel
from lingvo_gshard.planning import hardware, planner
from lingvo_gshard.planning.cost_model import CostModel
from lingvo_gshard.planning.planner import Request
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.sharding.mesh import Mesh

_BATCH = ("data", "experts")  # The axes that always split the batch.


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Settings, `path=value`: a mesh, its table, and others; and the cost model's step."""

    settings: tuple[str, ...]
    secs: float


def candidates(request: Request) -> list[Candidate]:
    """All candidates that fit by the cost model, the fastest first; ValueError if none does."""
    state = TranslationModel(request.params, Partitioning(Mesh.flat(1), ())).state_spec
    mesh = request.partitioning.mesh
    network = hardware.network(request.topology, mesh)
    model, found = CostModel(request.params, state, network), []
    for layout in layouts(_sizes(request, state.theta), mesh.num_partitions):
        parts = request.changed(layout).partitioning
        for remat, microbatches in _schedules(request.params, parts):
            settings = (*layout, *_settings(request.params, parts, remat, microbatches))
            gib, secs = model.estimate(parts, remat, microbatches)
            if gib > network.generation.capacity_gib:
                continue
            with contextlib.suppress(ValueError):  # The mesh does not divide a batch or its groups.
                planner.check(request.changed(settings))
                found.append(Candidate(settings, secs.step))
    if not found:
        raise ValueError(
            f"--search: no mesh of {mesh.num_partitions} devices divides the model and its batches "
            "and leaves room for a step; change --topology or the sizes."
        )
    return sorted(found, key=lambda candidate: candidate.secs)


def layouts(sizes: Mapping[str, int], cores: int) -> Iterator[tuple[str, str]]:
    """Yields the settings of all meshes of up to three axes, and tables, that divide the sizes.

    The axes `data` and `experts` both split the batch; `model` splits heads, hidden dims and
    vocabularies, and perhaps the experts. The dim M of all weights, or only of their updates (m),
    may be split over the axes of the batch. The axis `stages` is that of a pipeline, and splits the
    batch outside it.
    """
    divisors = [n for n in range(1, cores + 1) if cores % n == 0]
    for stages, experts, model in itertools.product(divisors, divisors, divisors):
        data, rest = divmod(cores, stages * experts * model)
        if rest or any(sizes[dim] % (data * experts) for dim in "BG") or sizes["E"] % experts:
            continue
        axes = {"data": data, "experts": experts, "model": model, "stages": stages}
        axes = {name: size for name, size in axes.items() if size > 1} or {"data": 1}
        if len(axes) > 3 or sizes["R"] % stages or sizes["B"] % (data * experts * stages):
            continue
        mesh = ",".join(f"{name}:{size}" for name, size in axes.items())
        tokens = _token_rows([name for name in axes if name in _BATCH], stages > 1)
        tokens += ["E:experts"] * (experts > 1)
        for rows in itertools.product(_tensor_parallel(sizes, axes), _split_weights(sizes, axes)):
            yield f"mesh={mesh}", "sharding=" + ",".join([*tokens, *filter(None, rows)])


def _schedules(params: Params, parts: Partitioning) -> list[tuple[Remat, int]]:
    """The remats, and in a pipeline the numbers of microbatches that divide the rows."""
    stages, ways, *_ = parts.factor("RBLM")
    if stages == 1:
        return [(remat, 1) for remat in Remat]
    rows = params.input.batch_size // ways
    return [(Remat.BLOCK, n) for n in range(stages, rows + 1) if rows % n == 0]


def _settings(
    params: Params, parts: Partitioning, remat: Remat, microbatches: int
) -> Iterator[str]:
    """Yields the settings of both stacks; those of a pipeline where they change."""
    (stages,) = parts.factor("R")
    for stack in placement.STACKS:
        yield f"task.{stack}.remat={remat.name}"
        for name, value in {"stages": stages, "microbatches": microbatches}.items():
            if params.task.Get(stack).Get(name) != value:
                yield f"task.{stack}.{name}={value}"


def _token_rows(batch: Sequence[str], staged: bool) -> list[str]:
    """The rows of B and G over the axes `batch`; outside a pipeline its stages split B, too."""
    if not staged:
        return [f"BG:{'+'.join(batch)}"] if batch else []
    groups = [f"G:{'+'.join(batch)}"] if batch else []
    return ["R:stages", f"B:{'+'.join([*batch, 'stages'])}", *groups]


def _tensor_parallel(sizes: Mapping[str, int], axes: Mapping[str, int]) -> list[str]:
    """The possible rows of the axis `model`, if there is one: H, and what else it divides."""
    if (ways := axes.get("model", 1)) == 1:
        return [""]
    letters = "".join(letter for letter in "HNV" if sizes[letter] % ways == 0)
    with_experts = "experts" not in axes and sizes["E"] % ways == 0
    rows = [letters, f"E{letters}"] if with_experts else [letters]
    return [f"{row}:model" for row in rows if "H" in row]


def _split_weights(sizes: Mapping[str, int], axes: Mapping[str, int]) -> list[str]:
    """No row of M, m or M, over as much of the batch's axes as divides it; none in a pipeline."""
    batch = [name for name in axes if name in _BATCH and "stages" not in axes]
    for over in (batch, batch[:1], batch[1:]):
        if over and sizes["M"] % math.prod(axes[name] for name in over) == 0:
            return ["", f"m:{'+'.join(over)}", f"M:{'+'.join(over)}"]
    return [""]


def _sizes(request: Request, weights: NestedMap) -> dict[str, int]:
    """The size of each letter that a table may split, the greatest common divisor of several."""
    params, sizes = request.params, collections.defaultdict[str, int](int)
    found = [pair for w in weights.Flatten() for pair in zip(w.dims, w.shape, strict=True)]
    found += [("G", count) for count in placement.num_groups(params).values()]
    batches = [part for name, part in planner.BATCHES.items() if name in request.programs]
    found += [("B", params.Get(f"{part}.batch_size")) for part in batches]
    for letter, size in found:
        sizes[letter] = math.gcd(sizes[letter], size)
    for p in map(params.task.Get, placement.STACKS):
        if p.layers_as is not Layers.LOOP or (p.moe and p.moe.dispatch is not Dispatch.EINSUM):
            sizes["R"] = 1  # It cannot be a pipeline.
    return {"E": 1, "G": sizes["B"], **sizes}  # A dense model has neither.
