"""Weights that training does not change, such as a pretrained model's, except its tables."""

from __future__ import annotations

import dataclasses
import re

from lingvo_gshard.core.base_layer import WeightSpec
from lingvo_gshard.core.nested_map import NestedMap


def frozen(weight_specs: NestedMap, pattern: str | None) -> NestedMap:
    """Returns the specs of all weights, and marks as frozen the weights whose paths match.

    The pattern must match a whole path, such as theta.softmax; None freezes none. Raises ValueError
    if it is not a regular expression, or if it matches no weight or all of them.
    """
    if pattern is None:
        return weight_specs
    try:
        of_paths = re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"train.frozen={pattern!r} is not a regular expression: {error}."
        ) from None

    specs: list[WeightSpec] = []
    for path, spec in weight_specs.FlattenItems():
        is_frozen = of_paths.fullmatch(f"theta.{path}") is not None
        specs.append(dataclasses.replace(spec, is_frozen=is_frozen))

    num_frozen = sum(spec.is_frozen for spec in specs)
    if num_frozen in (0, len(specs)):
        which = "all" if num_frozen else "none"
        first, _ = weight_specs.FlattenItems()[0]
        raise ValueError(
            f"train.frozen={pattern!r} matches {which} of the {len(specs)} weights; their paths "
            f"are such as theta.{first}."
        )
    return weight_specs.Pack(specs)
