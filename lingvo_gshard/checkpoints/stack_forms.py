"""The arrays of a run under the paths of a model whose stacks have another form.

layers/stack.py names the weights of a stack by the way in which the program applies its layers. The
weight PATH of layer i in the stack theta.encoder is

    UNROLLED   theta.encoder.layers[i].PATH
    LOOP       [r] of theta.encoder.block[j].PATH, with i = F + r * J + j

A block has J layers: one if all layers are dense, and two if every second layer has experts. In a
LOOP, the F layers before the first block, if any, have the paths of UNROLLED.

R blocks, J layers of a block, F layers before the first block.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorstore

from lingvo_gshard.checkpoints.checked_array import CheckedArray
from lingvo_gshard.core.base_layer import STACKED
from lingvo_gshard.spmd import specs

# The groups are the stack, its form, the number in brackets, and the weight's path in its layer.
_LAYER = re.compile(r"(.+?)\.(layers|block)\[(\d+)\]\.(.+)")
_UNROLLED = "layers"
_LOOP = "block"


@dataclasses.dataclass(frozen=True)
class Form:
    """The form of one stack."""

    num_layers: int
    num_first: int  # F; all layers if it is UNROLLED.
    block_size: int  # J; 0 if it is UNROLLED.

    @property
    def kind(self) -> tuple[int, int]:
        """What the paths depend on besides the number of layers."""
        return (self.num_first, self.block_size) if self.block_size else (0, 0)


class Renamed(Mapping[str, CheckedArray]):
    """The arrays of `old`, by the paths that they have in a model with the arrays `new`.

    If a stack has another form, its arrays are views of the old ones; all others are the old ones.
    Looking up a path raises KeyError with the path that is missing in `old`, and ValueError if the
    stacks have different numbers of layers, or if layers to be stacked have different shapes or
    dtypes.
    """

    def __init__(self, old: Mapping[str, CheckedArray], new: Mapping[str, Any]) -> None:
        self._old = old
        self._old_forms = forms_of(old)
        self._new_forms = forms_of(new)
        self._new = new
        self._taken: set[str] = set()

    def __getitem__(self, path: str) -> CheckedArray:
        layer = _LAYER.fullmatch(path)
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

        if kind != _LOOP:
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


def layers_of(
    path: str, shape: Sequence[int], forms: Mapping[str, Form]
) -> tuple[str, tuple[int, ...]] | None:
    """Returns the path of a weight's stack, and the numbers of the weight's layers in it.

    In a LOOP, a weight belongs to one layer of each block. `forms` has the form of each stack.
    Returns None for a weight that is not in a stack.
    """
    layer = _LAYER.fullmatch(path)
    if layer is None:
        return None
    stack, kind, number, _ = layer.groups()
    if kind != _LOOP:
        return stack, (int(number),)
    form = forms[stack]
    first = form.num_first + int(number)
    return stack, tuple(first + r * form.block_size for r in range(shape[0]))


def forms_of(arrays: Mapping[str, Any]) -> dict[str, Form]:
    """Returns the form of each stack by its path, given its weights, or their specs."""
    counts: dict[tuple[str, str], int] = {}  # The number of layers, in a LOOP of each block.
    blocks: dict[str, int] = {}  # The number of blocks, R, of each LOOP.
    for path, array in arrays.items():
        layer = _LAYER.fullmatch(path)
        if layer is None:
            continue
        stack, kind, number, _ = layer.groups()
        counts[stack, kind] = max(counts.get((stack, kind), 0), int(number) + 1)
        if kind == _LOOP:
            blocks[stack] = array.shape[0]

    forms = {}
    for stack in dict.fromkeys(stack for stack, _ in counts):
        num_first = counts.get((stack, _UNROLLED), 0)
        block_size = counts.get((stack, _LOOP), 0)
        num_layers = num_first + block_size * blocks.get(stack, 0)
        forms[stack] = Form(num_layers, num_first, block_size)
    return forms
