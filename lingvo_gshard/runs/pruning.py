"""Makes a run with only the experts that some languages use.

    logdir/eval_metrics.jsonl   how often each language of dev chose each expert
    out/experiment.json         the settings with fewer experts, and the experts' old numbers
    out/checkpoints/0           the weights of these experts, and their columns of the gates

All layers of a stack keep the same number of experts, and each layer's are chosen on their own: see
kept_experts.py. The result is a run like any other. It gets the weights that the old run decodes
with, and a new optimizer. They are copied expert by expert, so that the model may be larger than
this machine's memory.

R blocks of a stack that is a LOOP.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
import tensorstore
from tensorstore import TensorStore

from lingvo_gshard.checkpoints import stack_forms
from lingvo_gshard.checkpoints.checked_array import CheckedArray, Index, computed_view
from lingvo_gshard.checkpoints.stack_forms import Form
from lingvo_gshard.core.base_layer import STACKED, Use
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.model import placement
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.runs import kept_experts, new_run, prune_request
from lingvo_gshard.runs import launch as launches
from lingvo_gshard.runs.kept_experts import KeptExperts
from lingvo_gshard.runs.launch import Launch, Pruned
from lingvo_gshard.runs.prune_request import Request, moe_stacks
from lingvo_gshard.runs.run import Run
from lingvo_gshard.sharding.layout import TensorSpec
from lingvo_gshard.train.metrics_files import EVAL_METRICS
from xla_spmd.files import digests, storage

_THETA = "theta."
_EXPERTS = "E"


@dataclasses.dataclass(frozen=True)
class Result:
    """The new run, and the old one's sizes."""

    model: str
    kept: dict[str, KeptExperts]  # The remaining experts by layer, such as encoder_1.
    num_experts: dict[str, int]  # The old number of a layer's experts, by stack.
    num_weights_before: int
    num_weights: int


def prune(run: Run, out: str | pathlib.Path, request: Request) -> Result:
    """Writes a run with fewer experts to `out`, a new folder.

    After a kill, the same call continues. Raises ValueError for a model without experts, a share
    out of its range, a run or a language without loads, a folder that exists, and a damaged
    checkpoint; then it removes `out`.
    """
    counts = request.num_kept(run.launch.model, run.params, run.logdir)
    loads = request.loads(run.logdir)
    stacks = moe_stacks(run.params)
    prune_request.check_new(pathlib.Path(out))

    # The arrays themselves are only read while the new run's are written.
    arrays = run.estimator.saved_weights(**run.averaged)
    forms = stack_forms.forms_of(arrays)
    routers = {path: arrays[path] for path in _router_paths(run.params)}
    kept = _kept(routers, forms, loads, counts, request)
    launch = _pruned_launch(run, counts)
    params = launches.experiment_params(launch)
    contents = new_run.contents(params)
    theta = _pruned_weights(arrays, contents.state_spec, forms, kept)

    record = _record(run, arrays, request, kept)
    # Means of checkpoints lack fingerprints, and are identified by their checkpoints.
    identity = digests.of_json(dataclasses.asdict(record), run.averaged, run.done)
    vocabularies = [
        path.read_bytes() for path in launches.vocabularies(run.logdir) if path.is_file()
    ]
    new_run.write(out, launch, contents, theta, identity, vocabularies, record)
    return Result(
        launch.model,
        kept,
        {stack: p.moe.num_experts for stack, p in stacks.items()},
        placement.num_weights(run.params),
        placement.num_weights(params),
    )


def _router_paths(params: Params) -> list[str]:
    """Returns the paths of the weights that are declared as routers, the encoder's first."""
    task = TaskModel(params, placement.partitioning(params, 1)).task
    items = task.weight_specs.FlattenItems()
    return [f"{_THETA}{path}" for path, spec in items if spec.use is Use.ROUTER]


def _kept(
    routers: Mapping[str, CheckedArray],
    forms: Mapping[str, Form],
    loads: Mapping[str, Mapping[str, Sequence[float]]],
    counts: Mapping[str, int],
    request: Request,
) -> dict[str, KeptExperts]:
    """Returns the experts that stay by layer, of all layers with a router, the encoder first."""
    kept: dict[str, KeptExperts] = {}
    for path, router in routers.items():
        for block, layer in enumerate(_layers(path, router, forms)):
            stack, _, _ = layer.rpartition("_")
            num_experts = router.shape[-1]
            share_E = _shares(loads.get(layer, {}), layer, num_experts, request.languages)
            if request.is_merged:
                wg = router[()]
                wg_ME = wg[block] if _is_stacked(router) else wg
                kept[layer] = kept_experts.merged(share_E, counts[stack], wg_ME)
            else:
                kept[layer] = kept_experts.busiest(share_E, counts[stack])
    return kept


def _shares(
    loads: Mapping[str, Sequence[float]],
    layer: str,
    num_experts: int,
    languages: Sequence[str],
) -> np.ndarray:
    """Returns the experts' shares in a layer; ValueError unless each language has all loads."""
    for language in languages:
        count = len(loads.get(language, ()))
        if count != num_experts:
            raise ValueError(
                f"{EVAL_METRICS}: {language} has the loads of {count} experts of {layer}, which "
                f"has {num_experts}: evaluate the run again."
            )
    return kept_experts.shares(loads)


def _layers(path: str, array: CheckedArray, forms: Mapping[str, Form]) -> list[str]:
    """Returns the names of a weight's layers in metrics, such as encoder_1.

    A weight of a LOOP has several layers. The list is empty for a weight outside of the stacks, and
    for a stack's norm.
    """
    place = stack_forms.layers_of(path, array.shape, forms)
    if place is None:
        return []
    stack, numbers = place
    return [f"{stack.removeprefix(_THETA)}_{number}" for number in numbers]


def _record(
    run: Run,
    arrays: Mapping[str, CheckedArray],
    request: Request,
    kept: Mapping[str, KeptExperts],
) -> Pruned:
    """Returns the record of the pruning for the new run."""
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
    # These settings have chosen the weights, which are the new run's only checkpoint.
    if run.params.decode.checkpoint_step is not None:
        settings.append("decode.checkpoint_step=None")
    if run.params.decode.average_checkpoints != 1:
        settings.append("decode.average_checkpoints=1")
    return run.launch.changed(settings)


def _pruned_weights(
    arrays: Mapping[str, CheckedArray],
    state_spec: NestedMap,
    forms: Mapping[str, Form],
    kept: Mapping[str, KeptExperts],
) -> dict[str, CheckedArray]:
    """Returns the new run's weights by path, with the remaining experts."""
    theta = {}
    for path, spec in state_spec.FlattenItems():
        if path.startswith(_THETA):
            layers = _layers(path, arrays[path], forms)
            of_blocks = [kept[layer] for layer in layers if layer in kept]
            theta[path] = _pruned_array(arrays[path], spec, of_blocks)
    return theta


def _pruned_array(
    old: CheckedArray, spec: TensorSpec, of_blocks: list[KeptExperts]
) -> CheckedArray:
    """Returns the array with the remaining experts along the axis where `spec` has fewer.

    `of_blocks` has the experts of the array's layer, in a LOOP of each block. Reading a part of an
    expert reads and checks all of it; in a LOOP in all blocks, which share its fingerprint.
    """
    if old.shape == spec.shape:
        return old

    (axis,) = np.flatnonzero(np.not_equal(old.shape, spec.shape)).tolist()
    is_copied = all(len(group) == 1 for experts in of_blocks for group in experts.members)
    is_of_experts = _has_experts(old) and not _is_stacked(old)
    if old.fingerprints is None or not is_of_experts or not is_copied:
        open_view = functools.partial(_pruned_view, old, axis, of_blocks)
        return dataclasses.replace(old, spec=spec, open=open_view, fingerprints=None)

    # An expert's fingerprint does not depend on its number. So where each expert is copied whole,
    # it is checked when all of it is written, and its parts are read one by one.
    (experts,) = of_blocks
    return dataclasses.replace(
        old,
        spec=spec,
        open=lambda: old.unchecked[tensorstore.d[axis][list(experts.ids)]],
        fingerprints=[old.fingerprints[i] for i in experts.ids],
        damaged=lambda reason: old.damaged(f"{reason} of the remaining ones"),
    )


def _is_stacked(array: CheckedArray) -> bool:
    return array.spec.dims.startswith(STACKED)


def _has_experts(array: CheckedArray) -> bool:
    """Returns whether an array has experts; a gate has only a column for each of them."""
    return _EXPERTS in array.spec.dims


def _pruned_view(old: CheckedArray, axis: int, of_blocks: Sequence[KeptExperts]) -> TensorStore:
    """Returns the view of `_pruned_array`."""
    has_experts = _has_experts(old)
    if not _is_stacked(old):
        (experts,) = of_blocks
        return _pruned_layer(has_experts, axis, experts, old.checked)

    blocks = []
    for block, experts in enumerate(of_blocks):
        blocks.append(_pruned_layer(has_experts, axis - 1, experts, old.checked[block]))
    return tensorstore.stack(blocks)


def _pruned_layer(
    has_experts: bool, axis: int, experts: KeptExperts, view: TensorStore
) -> TensorStore:
    """Returns a layer's weight with the remaining experts, or a gate's columns, along `axis`."""
    along_axis = tensorstore.d[axis]
    if not has_experts:
        return view[along_axis[list(experts.ids)]]

    merged = []
    for members in experts.members:
        views = [view[along_axis[i]] for i, _ in members]
        weights = [weight for _, weight in members]
        # A single expert is copied bit by bit.
        merged.append(views[0] if len(views) == 1 else _weighted_sum(views, weights))
    return tensorstore.stack(merged, axis)


def _weighted_sum(experts: Sequence[TensorStore], weights: Sequence[float]) -> TensorStore:
    """Returns the weighted sum of experts, computed in float64."""

    def compute(index: Index, values: np.ndarray) -> None:
        # One after the other, since there may be many.
        total = np.zeros(values.shape, np.float64)
        for expert, weight in zip(experts, weights, strict=True):
            total += weight * expert[index].read().result().astype(np.float64)
        values[...] = total

    return computed_view(compute, experts[0].shape, experts[0].dtype.numpy_dtype)
