"""The arrays of a run under the paths of a model whose stacks have another form."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorstore

from lingvo_gshard.checkpoints import stack_forms
from lingvo_gshard.checkpoints.checked_array import CheckedArray
from lingvo_gshard.core.base_layer import STACKED
from lingvo_gshard.spmd import specs


class Renamed(Mapping[str, CheckedArray]):
    """The arrays of `old`, by the paths that they have in a model with the arrays `new`.

    If a stack has another form, its arrays are views of the old ones; all others are the old ones.
    Looking up a path raises KeyError with the path that is missing in `old`, and ValueError if the
    stacks have different numbers of layers, or if layers to be stacked have different shapes or
    dtypes.
    """

    def __init__(self, old: Mapping[str, CheckedArray], new: Mapping[str, Any]) -> None:
        self._old = old
        self._old_forms = stack_forms.forms_of(old)
        self._new_forms = stack_forms.forms_of(new)
        self._new = new
        self._taken: set[str] = set()

    def __getitem__(self, path: str) -> CheckedArray:
        layer = stack_forms.LAYER.fullmatch(path)
        if layer is None:
            return self._take(path)

        stack, kind, number, weight = layer.groups()
        old_form = self._old_forms.get(stack)
        form = self._new_forms[stack]
        if old_form is None or old_form.kind == form.kind:
            return self._take(path)
        if old_form.num_layers != form.num_layers:
            raise ValueError(
                f"{stack} has {form.num_layers} layers, and {old_form.num_layers} in the run to "
                "start from: a stack needs as many to take another form."
            )

        if kind != stack_forms.LOOP:
            return self._layer(stack, int(number), weight)
        in_blocks = range(form.num_first + int(number), form.num_layers, form.block_size)
        return _stack(path, [self._layer(stack, i, weight) for i in in_blocks])

    def __iter__(self) -> Iterator[str]:
        return iter(self._new)

    def __len__(self) -> int:
        return len(self._new)

    def left(self) -> list[str]:
        """Returns the paths of `old` that have not been used so far."""
        return [path for path in self._old if path not in self._taken]

    def _layer(self, stack: str, i: int, weight: str) -> CheckedArray:
        """Returns a weight of layer i of the stack."""
        form = self._old_forms[stack]
        if i < form.num_first:
            return self._take(f"{stack}.layers[{i}].{weight}")

        block, number = divmod(i - form.num_first, form.block_size)
        blocks = self._take(f"{stack}.block[{number}].{weight}")
        return blocks.indexed(block, blocks.spec.dims[1:])

    def _take(self, path: str) -> CheckedArray:
        array = self._old[path]
        self._taken.add(path)
        return array


def _stack(path: str, layers: Sequence[CheckedArray]) -> CheckedArray:
    """Returns the weights of several layers as one array with a leading dim.

    Raises ValueError if they have different shapes or dtypes.
    """
    descriptions = {specs.describe(layer) for layer in layers}
    if len(descriptions) > 1:
        raise ValueError(f"{path}: its layers were {' and '.join(sorted(descriptions))}.")

    first = layers[0]
    spec = dataclasses.replace(
        first.spec, shape=(len(layers), *first.shape), dims=STACKED + first.spec.dims
    )
    return dataclasses.replace(
        first,
        name=path,
        spec=spec,
        fingerprints=None,
        open=lambda: tensorstore.stack([layer.checked for layer in layers]),
    )
