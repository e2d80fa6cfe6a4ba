"""An estimate of a training step's memory, from an experiment's numbers and its table.

A core holds its part of the state, the gradients of its weights, and the results of the forward
pass that the gradients need. A remat decides which results are kept; the others are computed again.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.numerics import Remat
from lingvo_gshard.model.forward_pass import SOFTMAX, Product, forward_products, sizes_of, stack_of
from lingvo_gshard.model.step_products import StepProduct
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from xla_spmd.mesh import names_of

_Core = TypeVar("_Core")

OUTSIDE = ""  # The name for embeddings, which are outside all stacks.
FLOAT32_BYTES = 4
_FLOAT32_ACTIVATIONS = ("BNLT", "BLV")  # Probabilities and logits.


class StepMemory:
    """Estimates the memory of an experiment's training step for different tables and remats."""

    def __init__(self, params: Params, model: TaskModel, products: Sequence[StepProduct]) -> None:
        """Takes the inputs that do not depend on the partitioning.

        Args:
          params: The experiment.
          model: Its task and optimizer, for the specs of weights and slots.
          products: The products of its loss on a batch.
        """
        self._state = state_of_stacks(params, model)
        self._are_matrices = [spec.is_matrix for spec in model.task.weight_specs.Flatten()]
        self._products = forward_products(products)
        self._activation_bytes = activation_bytes(params)
        self._stacks = tuple(params.task.cls.STACKS)
        self._sent_on = sent_on(params)

    def num_bytes(
        self,
        partitioning: Partitioning,
        remats: Mapping[str, Remat],
        microbatches: int = 1,
        scatter_gradients: bool = True,
    ) -> float:
        """Returns the bytes that a step needs on one core.

        Args:
          partitioning: The table and its mesh.
          remats: What each stack recomputes.
          microbatches: The number of a pipeline's microbatches.
          scatter_gradients: As in Annotator.
        """
        cores = by_stack(
            self._stacks,
            partitioning,
            lambda table: CoreParts(table, self._activation_bytes, microbatches, scatter_gradients),
        )

        kept_bytes = 0.0
        largest_bytes = 0.0
        for product in self._products:
            core = cores[product.stack]
            is_staged = core.is_staged(product)
            run = core.in_stages(product) if is_staged else product
            result_bytes = core.activation_bytes(run.moved or run.einsum.result, run.einsum.sizes)
            largest_bytes = max(largest_bytes, result_bytes)

            if is_staged:
                # A stage holds the results of one microbatch for each of its blocks.
                kept_bytes += product.times // core.stages * result_bytes
            elif product.stack not in remats or remats[product.stack].keeps(product.kept):
                kept_bytes += product.times * result_bytes

        for stack, sizes in self._sent_on.items():
            kept_bytes += cores[stack].num_shifts * cores[stack].shift_bytes(sizes)
        for spec, is_matrix in zip(self._state.theta.Flatten(), self._are_matrices, strict=True):
            kept_bytes += cores[spec.stack].gradient_bytes(spec, is_matrix)

        # Besides the kept results, memory holds the largest result while it is computed.
        return state_bytes(self._state.Flatten(), partitioning) + kept_bytes + largest_bytes


def state_bytes(specs: Iterable[TensorSpec], partitioning: Partitioning) -> int:
    """Returns the bytes of one core's parts of some tensors."""
    num_bytes = 0
    for spec in specs:
        elements = math.prod(partitioning.shard_shape(spec))
        num_bytes += elements * np.dtype(spec.dtype).itemsize
    return num_bytes


def state_of_stacks(params: Params, model: TaskModel) -> NestedMap:
    """Returns the specs of the state, each with its stack, whose table splits it."""
    specs = []
    for path, spec in model.state_spec.FlattenItems():
        _, _, name = path.partition(".")  # Without `theta` or `slots`.
        specs.append(dataclasses.replace(spec, stack=stack_of(params, name)))
    return model.state_spec.Pack(specs)


def activation_bytes(params: Params) -> int:
    """Returns the bytes of a scalar of an activation."""
    return 2 if params.task.activation_dtype == "bfloat16" else FLOAT32_BYTES


def sent_on(params: Params) -> dict[str, dict[str, float]]:
    """Returns the sizes B, L and M of what a pipeline sends from stage to stage, by stack.

    It is a block's output, together with the encoded source in a stack that reads it.
    """
    sizes = {}
    length_before = 0
    for stack, name in params.task.cls.STACKS.items():
        length = params.input.Get(name)
        rows = params.input.batch_size
        sizes[stack] = {"B": rows, "L": length_before + length, "M": params.task.dim}
        length_before += length
    return sizes


def by_stack(
    stacks: Sequence[str], partitioning: Partitioning, made: Callable[[Partitioning], _Core]
) -> dict[str, _Core]:
    """Returns what is `made` of the tables of embeddings, of each stack, and of the softmax.

    Stacks with the same table share the result. At the softmax, B has U's row.
    """
    tables = {stack: partitioning.in_stack(stack) for stack in (OUTSIDE, *stacks)}
    rows = dict(partitioning.table)
    if "U" in rows:
        rows["B"] = rows["U"]
    tables[SOFTMAX] = Partitioning.from_dict(partitioning.mesh, rows)

    by_table = {table: made(table) for table in set(tables.values())}
    return {stack: by_table[table] for stack, table in tables.items()}


class CoreParts:
    """The parts of a step's tensors that one core holds under one table."""

    def __init__(
        self,
        partitioning: Partitioning,
        scalar_bytes: int,
        microbatches: int,
        scatter_gradients: bool,
    ) -> None:
        """`scalar_bytes` is the size of one scalar of an activation."""
        self._partitioning = partitioning
        self._scalar_bytes = scalar_bytes
        self._scatter_gradients = scatter_gradients
        self._axis_sizes = partitioning.mesh.shape

        # A pipeline of R stages needs R - 1 more ticks than it has microbatches.
        (self.stages,) = partitioning.factor("R")
        self._microbatches = microbatches
        self._ticks = microbatches + self.stages - 1

        # Many products have the same dims.
        self._split = functools.cache(self._split_letters)

    @property
    def num_shifts(self) -> int:
        """How often a pipeline's stages pass on activations: forward, recomputed and backward."""
        return 3 * self._ticks if self.stages > 1 else 0

    def is_staged(self, product: Product) -> bool:
        """Returns whether a pipeline's stages run the product."""
        return self.stages > 1 and "R" in product.einsum.sizes

    def in_stages(self, product: Product) -> Product:
        """Returns a product of one microbatch, which all stages run in each tick, if idle too."""
        sizes = self._microbatch_sizes(product.einsum.sizes)
        return dataclasses.replace(
            product,
            einsum=product.einsum.stacked(sizes),
            moved=f"R{product.moved}" if product.moved else "",
            times=product.times * self._ticks // self.stages,
        )

    def shift_bytes(self, sizes: Mapping[str, float]) -> float:
        """Returns the bytes that a stage passes on at once, given those of a whole batch."""
        return self.activation_bytes("RBLM", self._microbatch_sizes(sizes))

    def activation_bytes(self, dims: str, sizes: Mapping[str, float]) -> float:
        """Returns the bytes of a core's part of an activation."""
        is_float32 = dims.removeprefix("R") in _FLOAT32_ACTIVATIONS
        scalar_bytes = FLOAT32_BYTES if is_float32 else self._scalar_bytes
        return self._elements(dims, sizes, self._split(dims)) * scalar_bytes

    def gradient_bytes(self, spec: TensorSpec, is_matrix: bool) -> float:
        """Returns the bytes of a core's part of a weight's gradient."""
        # If gradients are not scattered, they are as large as the weights.
        dims = spec.dims.lower() if self._scatter_gradients else spec.dims
        elements = self._elements(spec.dims, sizes_of(spec), self._split(dims))

        # The gradients of stacks of matrices have the dtype of activations.
        is_stack_of_matrices = is_matrix and spec.dims.startswith("R")
        return (self._scalar_bytes if is_stack_of_matrices else FLOAT32_BYTES) * elements

    def _microbatch_sizes(self, sizes: Mapping[str, float]) -> dict[str, float]:
        """Returns the sizes of a product in all stages at once, each with one microbatch."""
        changed = {**sizes, "R": self.stages}
        for letter in "BG":
            if letter in sizes:
                changed[letter] = sizes[letter] / self._microbatches
        return changed

    def _split_letters(self, dims: str) -> Mapping[str, str]:
        """Returns the letter, as a capital, that each axis splits."""
        letters = {}
        for letter, axis in zip(dims.upper(), self._partitioning.axes(dims), strict=True):
            for name in names_of([axis]):
                letters[name] = letter
        return letters

    def _elements(
        self, letters: str, sizes: Mapping[str, float], split: Mapping[str, str]
    ) -> float:
        """Returns the scalars of a core's part of a tensor of these letters."""
        axes = [axis for axis, letter in split.items() if letter in letters]
        return math.prod(sizes[letter] for letter in letters) / self._num_partitions(axes)

    def _num_partitions(self, axes: Iterable[str]) -> int:
        return math.prod(self._axis_sizes[axis] for axis in axes)
