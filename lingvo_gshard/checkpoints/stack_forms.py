"""The arrays of a run under the paths of a model whose stacks have another form.

layers/stack.py names the weights of a stack by how the program applies its layers. A weight PATH of
layer i in the stack at theta.encoder is

    UNROLLED   theta.encoder.layers[i].PATH
    LOOP       [r] of theta.encoder.block[j].PATH, with i = r * J + j

in blocks of J layers: one if all are dense, two if every other one has experts.

R blocks, J layers of a block.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lingvo_gshard.checkpoints.stored import Index, whole_slices
from lingvo_gshard.spmd import specs

# The stack, its form, the number in brackets, and the path of the weight in its layer.
_LAYER = re.compile(r"(.+?)\.(layers|block)\[(\d+)\]\.(.+)")
_LOOP = "block"


@dataclasses.dataclass(frozen=True)
class _Form:
    """The form of one stack."""

    block_size: int | None  # J; None if it is UNROLLED.
    num_layers: int


class Renamed(Mapping[str, Any]):
    """The arrays of `old`, by the paths that a model with the arrays `new` has for them.

    An array of a stack in another form is made of parts of the old ones, which are read when it is
    indexed. All others are as they are. Looking up a path raises KeyError with the path that `old`
    lacks, and ValueError if the stacks have different numbers of layers, or an array would be a
    stack of layers of different shapes or dtypes.
    """

    def __init__(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        self._old = old
        self._old_forms = _forms(old)
        self._new_forms = _forms(new)
        self._new = new
        self._taken: set[str] = set()

    def __getitem__(self, path: str) -> Any:
        layer = _LAYER.fullmatch(path)
        if layer is None:
            return self._take(path)

        stack, _, number, weight = layer.groups()
        old_form = self._old_forms.get(stack)
        form = self._new_forms[stack]
        if old_form is None or old_form.block_size == form.block_size:
            return self._take(path)
        if old_form.num_layers != form.num_layers:
            raise ValueError(
                f"{stack} has {form.num_layers} layers, and {old_form.num_layers} in the run to "
                "start from: a stack needs as many to take another form."
            )

        if form.block_size is None:
            return self._layer(stack, int(number), weight)
        layers = [
            self._layer(stack, i, weight)
            for i in range(int(number), form.num_layers, form.block_size)
        ]
        descriptions = {specs.describe(layer) for layer in layers}
        if len(descriptions) > 1:
            raise ValueError(f"{path}: its layers were {' and '.join(sorted(descriptions))}.")
        return _Stacked(layers)

    def __iter__(self) -> Iterator[str]:
        return iter(self._new)

    def __len__(self) -> int:
        return len(self._new)

    def left(self) -> list[str]:
        """Returns the paths of `old` that nothing was taken from so far."""
        return [path for path in self._old if path not in self._taken]

    def _layer(self, stack: str, i: int, weight: str) -> _Layer:
        """Returns a weight of the stack's layer i."""
        block_size = self._old_forms[stack].block_size
        if block_size is None:
            return _Layer(self._take(f"{stack}.layers[{i}].{weight}"), None)
        return _Layer(self._take(f"{stack}.block[{i % block_size}].{weight}"), i // block_size)

    def _take(self, path: str) -> Any:
        array = self._old[path]
        self._taken.add(path)
        return array


@dataclasses.dataclass(frozen=True)
class _Layer:
    """The weight of one layer: [block] of a stack, or the whole array if `block` is None."""

    array: Any
    block: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        shape = tuple(self.array.shape)
        return shape if self.block is None else shape[1:]

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.array.dtype)

    def __getitem__(self, index: Index) -> np.ndarray:
        if self.block is None:
            return np.asarray(self.array[index])
        return np.asarray(self.array[(slice(self.block, self.block + 1), *index)])[0]


@dataclasses.dataclass(frozen=True)
class _Stacked:
    """The weights of several layers of one shape, behind a leading dim."""

    layers: Sequence[_Layer]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.layers), *self.layers[0].shape)

    @property
    def dtype(self) -> np.dtype:
        return self.layers[0].dtype

    def __getitem__(self, index: Index) -> np.ndarray:
        of_stack, *of_layer = whole_slices(index, self.shape)
        layers = self.layers[of_stack]

        blocks = [layer.block for layer in layers if layer.block is not None]
        if not blocks:
            return np.stack([layer[tuple(of_layer)] for layer in layers])

        # From a stack all blocks are read at once, because reading a part may read the whole.
        covering = slice(min(blocks), max(blocks) + 1)
        stacks = {id(layer.array): layer.array for layer in layers}
        read = {key: np.asarray(stack[(covering, *of_layer)]) for key, stack in stacks.items()}
        values = [
            read[id(layer.array)][block - covering.start]
            for layer, block in zip(layers, blocks, strict=True)
        ]
        return np.stack(values)


@dataclasses.dataclass(frozen=True)
class OneExpert:
    """An array without experts as that of a single one, whose dim is `axis`."""

    array: Any
    axis: int

    @property
    def shape(self) -> tuple[int, ...]:
        shape = tuple(self.array.shape)
        return (*shape[: self.axis], 1, *shape[self.axis :])

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.array.dtype)

    def __getitem__(self, index: Index) -> np.ndarray:
        wanted = whole_slices(index, self.shape)
        values = self.array[(*wanted[: self.axis], *wanted[self.axis + 1 :])]
        return np.expand_dims(values, self.axis)


def layers_of(
    path: str, shape: Sequence[int], block_sizes: Mapping[str, int]
) -> tuple[str, tuple[int, ...]] | None:
    """Returns the path of a weight's stack, and the numbers of its layers there.

    They are several in a LOOP: a layer of each of its blocks, of which `block_sizes` has J by the
    stack's path. Returns None for a weight outside of stacks.
    """
    layer = _LAYER.fullmatch(path)
    if layer is None:
        return None
    stack, form, number, _ = layer.groups()
    if form != _LOOP:
        return stack, (int(number),)
    return stack, tuple(r * block_sizes[stack] + int(number) for r in range(shape[0]))


def _forms(arrays: Mapping[str, Any]) -> dict[str, _Form]:
    """Returns the form of each stack by its path."""
    counts: dict[str, int] = {}  # The layers, or those of a block.
    blocks: dict[str, int] = {}  # R of each LOOP.
    for path, array in arrays.items():
        layer = _LAYER.fullmatch(path)
        if layer is None:
            continue
        stack, name, number, _ = layer.groups()
        counts[stack] = max(counts.get(stack, 0), int(number) + 1)
        if name == _LOOP:
            blocks[stack] = array.shape[0]

    forms = {}
    for stack, count in counts.items():
        if stack in blocks:
            forms[stack] = _Form(block_size=count, num_layers=count * blocks[stack])
        else:
            forms[stack] = _Form(block_size=None, num_layers=count)
    return forms
