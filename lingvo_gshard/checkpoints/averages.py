"""The moving averages of a run's weights in its checkpoints: `ema.PATH` beside `theta.PATH`.

A run may start or stop averaging. So a checkpoint's averages are left out if the run does not need
them, and a checkpoint without averages is read as if they were equal to its weights.
"""

import dataclasses
import logging
from collections.abc import Mapping

from lingvo_gshard.checkpoints.checked_array import CheckedArray
from lingvo_gshard.checkpoints.stored import Stored
from lingvo_gshard.core.nested_map import NestedMap

EMA = "ema"  # The averages' name in a state.
_EMA = "ema."
_THETA = "theta."


def fitted(checkpoint: Stored, state_spec: NestedMap) -> Stored:
    """Returns a checkpoint that has averages if and only if `state_spec` has them; logs a change.

    The other arrays stay unchanged, and may differ from `state_spec`.
    """
    has_averages = any(name.startswith(_EMA) for name in checkpoint.specs)
    if has_averages == (EMA in state_spec):
        return checkpoint

    specs = dict(checkpoint.specs)
    fingerprints = dict(checkpoint.fingerprints)
    stored_as: dict[str, str] = {}
    if has_averages:
        logging.warning("%s: its moving averages of weights are left out.", checkpoint.path)
        for name in checkpoint.specs:
            if name.startswith(_EMA):
                del specs[name]
                del fingerprints[name]
    else:
        logging.warning("%s: has no moving averages; they start from its weights.", checkpoint.path)
        for path, spec in NestedMap(ema=state_spec.ema).FlattenItems():
            weight = _THETA + path.removeprefix(_EMA)
            if weight in specs:
                specs[path] = dataclasses.replace(specs[weight], dims=spec.dims, stack=spec.stack)
                fingerprints[path] = fingerprints[weight]
                stored_as[path] = weight
    return dataclasses.replace(
        checkpoint, specs=specs, fingerprints=fingerprints, stored_as=stored_as
    )


def as_weights(arrays: Mapping[str, CheckedArray]) -> dict[str, CheckedArray]:
    """Returns a checkpoint's arrays, where both `theta` and `ema` are its averages.

    Both are its weights if it lacks averages.
    """
    replaced = dict(arrays)
    for weight, array in arrays.items():
        if weight.startswith(_THETA):
            path = _EMA + weight.removeprefix(_THETA)
            average = arrays.get(path, array)
            replaced[path] = average
            replaced[weight] = dataclasses.replace(average, spec=array.spec)
    return replaced
