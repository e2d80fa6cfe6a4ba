"""Makes a run with fewer experts: those that some languages use.

    logdir/eval_metrics.jsonl   how often each language of dev chose each expert
    out/experiment.json         the settings with fewer experts, and which ones they are
    out/checkpoints/0           their weights, and their columns of the gates

All layers of a stack keep as many experts, chosen layer by layer: see kept_experts.py. The result
is a run like any other. Its weights are those that the old run decodes with; its optimizer starts
anew. They are copied expert by expert, so that a model may be larger than this machine's memory.

R blocks of a stack that is a LOOP, J layers of a block.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from lingvo_gshard.checkpoints import stack_forms, streamed
from lingvo_gshard.checkpoints.checkpoints import Contents
from lingvo_gshard.checkpoints.stored import Index, SavedArray
from lingvo_gshard.core.base_layer import STACKED
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.files import digests, storage
from lingvo_gshard.layers import moe
from lingvo_gshard.model import placement
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.runs import expert_load, kept_experts, new_run
from lingvo_gshard.runs import launch as launches
from lingvo_gshard.runs.kept_experts import KeptExperts
from lingvo_gshard.runs.launch import Launch, Pruned
from lingvo_gshard.runs.run import Run
from lingvo_gshard.sharding.layout import TensorSpec
from lingvo_gshard.train.summaries import EVAL_METRICS, read_lines

_THETA = "theta."
_GATE = "wg"
_EXPERTS = "E"


@dataclasses.dataclass(frozen=True)
class Request:
    """What is kept."""

    languages: tuple[str, ...]  # As evaluation names them.
    keep: float  # The share of a layer's experts that stay.
    is_merged: bool = False  # Whether the others are merged into them.
    multiple_of: int = 1  # The number of experts that stay is a multiple of it.


@dataclasses.dataclass(frozen=True)
class Result:
    """What was written."""

    model: str
    kept: dict[str, KeptExperts]  # By layer, such as encoder_1.
    num_experts: dict[str, int]  # Those of a layer before, by stack.
    num_weights_before: int
    num_weights: int


def prune(run: Run, out: str | pathlib.Path, request: Request) -> Result:
    """Writes a run with fewer experts to `out`, a new folder.

    If the process is killed, the same call continues. Raises ValueError for a model without
    experts, a share out of its range, a run or a language without loads, a folder that exists, and
    a damaged checkpoint. Then nothing is left in `out`.
    """
    stacks = _moe_stacks(run.params)
    if not stacks:
        raise ValueError(f"{run.logdir}: {run.launch.model} has no experts to prune.")
    counts = {}
    for stack, p in stacks.items():
        counts[stack] = kept_experts.num_kept(
            p.moe.num_experts, request.keep, moe.num_choices(p.moe), request.multiple_of
        )
    loads = _loads(run, request.languages)
    _check_new(pathlib.Path(out))

    # Of arrays, headers alone are read until the new run's are written.
    arrays = run.estimator.saved_weights(**run.averaged)
    block_sizes = {f"{_THETA}{stack}": p.moe_every for stack, p in stacks.items()}
    kept = _kept(arrays, block_sizes, loads, counts, request)
    launch = _pruned_launch(run, counts)
    params = launches.experiment_params(launch)
    partitioning = placement.partitioning(params, 1)
    state_spec = TaskModel(params, partitioning).state_spec
    theta = _pruned_weights(arrays, state_spec, block_sizes, kept)

    record = _record(run, arrays, request, kept)
    # Means of checkpoints have no fingerprints: they are identified by what they are means of.
    identity = digests.of_json(dataclasses.asdict(record), run.averaged, run.done)
    vocabularies = [
        path.read_bytes() for path in launches.vocabularies(run.logdir) if path.is_file()
    ]
    with new_run.claimed(launch, params, out, vocabularies, record):
        streamed.write(
            out,
            new_run.STEP,
            Contents(params, partitioning, state_spec),
            streamed.first_state(state_spec, theta),
            identity,
        )
    return Result(
        launch.model,
        kept,
        {stack: p.moe.num_experts for stack, p in stacks.items()},
        placement.num_weights(run.params),
        placement.num_weights(params),
    )


def _moe_stacks(params: Params) -> dict[str, Params]:
    """Returns the settings of the stacks that have experts, by name."""
    stacks = {name: params.task.Get(name) for name in params.task.cls.STACKS}
    return {name: p for name, p in stacks.items() if p.moe is not None}


def _check_new(out: pathlib.Path) -> None:
    """Raises ValueError for a folder that holds anything but what an earlier call has left."""
    unfinished = streamed.partial_folder(out, new_run.STEP)
    if out.exists() and not unfinished.is_dir() and (out.is_file() or any(out.iterdir())):
        raise ValueError(f"{out} exists already: choose a new folder.")


def _loads(run: Run, languages: Sequence[str]) -> dict[str, dict[str, list[float]]]:
    """Returns {layer: {language: load by expert}} of all MoE layers and the languages.

    Raises ValueError for languages that dev was not evaluated on.
    """
    evaluations = read_lines(pathlib.Path(run.logdir, EVAL_METRICS))
    evaluated = expert_load.evaluated_languages(evaluations)
    if not evaluated:
        raise ValueError(
            f"{run.logdir} has no loads of experts by language: evaluate it with --mode=eval first."
        )
    missing = [language for language in languages if language not in evaluated]
    if missing or not languages:
        given = ", ".join(missing) or "none"
        raise ValueError(
            f"languages={','.join(languages)}: no loads of {given} in {run.logdir}; there are "
            f"those of {', '.join(evaluated)}."
        )
    return expert_load.by_language(evaluations, languages)


def _kept(
    arrays: Mapping[str, SavedArray],
    block_sizes: Mapping[str, int],
    loads: Mapping[str, Mapping[str, Sequence[float]]],
    counts: Mapping[str, int],
    request: Request,
) -> dict[str, KeptExperts]:
    """Returns the experts that stay by layer, of all layers that have a gate, the encoder first."""
    kept: dict[str, KeptExperts] = {}
    for stack, count in counts.items():
        prefix = f"{_THETA}{stack}."
        gates = {
            path: array
            for path, array in arrays.items()
            if path.startswith(prefix) and path.endswith(f".{_GATE}")
        }
        for path, gate in gates.items():
            for block, layer in enumerate(_layers(path, gate, block_sizes)):
                num_experts = gate.shape[-1]
                share_E = _shares(loads.get(layer, {}), layer, num_experts, request.languages)
                if request.is_merged:
                    wg = gate[()]
                    wg_ME = wg[block] if _is_stacked(gate) else wg
                    kept[layer] = kept_experts.merged(share_E, count, wg_ME)
                else:
                    kept[layer] = kept_experts.busiest(share_E, count)
    return kept


def _shares(
    loads: Mapping[str, Sequence[float]],
    layer: str,
    num_experts: int,
    languages: Sequence[str],
) -> np.ndarray:
    """Returns the experts' shares in a layer; ValueError unless all languages tell all loads."""
    for language in languages:
        count = len(loads.get(language, ()))
        if count != num_experts:
            raise ValueError(
                f"{EVAL_METRICS}: {language} has the loads of {count} experts of {layer}, which "
                f"has {num_experts}: evaluate the run again."
            )
    return kept_experts.shares(loads)


def _layers(path: str, array: SavedArray, block_sizes: Mapping[str, int]) -> list[str]:
    """Returns the layers that a weight is of, such as encoder_1, as metrics name them.

    They are several in a LOOP, and none outside of stacks with experts, or for a stack's norm.
    """
    if not path.startswith(tuple(f"{stack}." for stack in block_sizes)):
        return []
    place = stack_forms.layers_of(path, array.shape, block_sizes)
    if place is None:
        return []
    stack, numbers = place
    return [f"{stack.removeprefix(_THETA)}_{number}" for number in numbers]


def _is_stacked(array: SavedArray) -> bool:
    return array.spec.dims.startswith(STACKED)


def _record(
    run: Run,
    arrays: Mapping[str, SavedArray],
    request: Request,
    kept: Mapping[str, KeptExperts],
) -> Pruned:
    """Returns what the new run's launch says of where it comes from."""
    fingerprints = {path: array.fingerprints for path, array in arrays.items()}
    return Pruned(
        source=str(storage.origin(run.logdir)),
        weights=digests.of_json(fingerprints),
        languages=request.languages,
        is_merged=request.is_merged,
        experts={layer: experts.ids for layer, experts in kept.items()},
    )


def _pruned_launch(run: Run, counts: Mapping[str, int]) -> Launch:
    """Returns the launch of the run with fewer experts."""
    settings = [f"task.{stack}.moe.num_experts={count}" for stack, count in counts.items()]
    # The new run's only checkpoint is what these settings chose.
    if run.params.decode.checkpoint_step is not None:
        settings.append("decode.checkpoint_step=None")
    if run.params.decode.average_checkpoints != 1:
        settings.append("decode.average_checkpoints=1")
    return run.launch.changed(settings)


def _pruned_weights(
    arrays: Mapping[str, SavedArray],
    state_spec: NestedMap,
    block_sizes: Mapping[str, int],
    kept: Mapping[str, KeptExperts],
) -> dict[str, SavedArray]:
    """Returns the new run's weights by path, with the experts that stay."""
    theta = {}
    for path, spec in state_spec.FlattenItems():
        if path.startswith(_THETA):
            layers = _layers(path, arrays[path], block_sizes)
            of_blocks = [kept[layer] for layer in layers if layer in kept]
            theta[path] = _pruned_array(arrays[path], spec, of_blocks)
    return theta


def _pruned_array(old: SavedArray, spec: TensorSpec, of_blocks: list[KeptExperts]) -> SavedArray:
    """Returns the array with the experts that stay along the axis that `spec` has fewer of.

    `of_blocks` are the experts of its layer, or of those of all blocks.

    An expert is read when a part of it is. In a LOOP, that reads and checks it in all blocks, since
    fingerprints are those of all blocks together.
    """
    if old.shape == spec.shape:
        return old

    (axis,) = np.flatnonzero(np.not_equal(old.shape, spec.shape)).tolist()
    new = dataclasses.replace(old, spec=spec, fingerprints=None)

    # An expert's fingerprint does not depend on its number. So where each expert is copied whole,
    # it is checked once it is written, and parts are read without the rest of it.
    is_copied = all(len(group) == 1 for experts in of_blocks for group in experts.members)
    if old.fingerprints is None or not is_copied or not _has_experts(old) or _is_stacked(old):
        return dataclasses.replace(new, read=functools.partial(_read, old, axis, of_blocks))
    (experts,) = of_blocks
    unchecked = dataclasses.replace(old, fingerprints=None)
    return dataclasses.replace(
        new,
        fingerprints=[old.fingerprints[i] for i in experts.ids],
        read=functools.partial(_read, unchecked, axis, of_blocks),
        damaged=lambda reason: old.damaged(f"{reason} of those that stay"),
    )


def _has_experts(array: SavedArray) -> bool:
    """Returns whether an array is of experts; a gate, which has a column for each, is not."""
    return _EXPERTS in array.spec.dims


def _read(old: SavedArray, axis: int, of_blocks: Sequence[KeptExperts], index: Index) -> np.ndarray:
    """Returns [index] of what `_pruned_array` returns."""
    if not _is_stacked(old):
        (experts,) = of_blocks
        return _read_layer(old, axis, experts, index)

    layers = []
    for block in range(old.shape[0])[index[0]]:
        of_block = (slice(block, block + 1), *index[1:])
        layers.append(_read_layer(old, axis, of_blocks[block], of_block))
    return np.concatenate(layers)


def _read_layer(old: SavedArray, axis: int, experts: KeptExperts, index: Index) -> np.ndarray:
    """Returns [index] of an array, or of one block, whose experts are those that stay."""
    # A gate is small, and read whole.
    if not _has_experts(old):
        columns = old[(*index[:axis], slice(None), *index[axis + 1 :])]
        return np.take(columns, experts.ids[index[axis]], axis)
    means = [_mean(old, axis, members, index) for members in experts.members[index[axis]]]
    return np.concatenate(means, axis)


def _mean(
    old: SavedArray, axis: int, members: Sequence[tuple[int, float]], index: Index
) -> np.ndarray:
    """Returns the weighted mean of experts, each with 1 along `axis`, computed in float64."""

    def expert(i: int) -> np.ndarray:
        return old[(*index[:axis], slice(i, i + 1), *index[axis + 1 :])]

    if len(members) == 1:
        ((i, _),) = members
        return expert(i)  # To the bit.

    # One after the other, as there may be many.
    (first, first_weight), *others = members
    total = first_weight * expert(first).astype(np.float64)
    for i, weight in others:
        total += weight * expert(i).astype(np.float64)
    return np.asarray(total, old.dtype)
