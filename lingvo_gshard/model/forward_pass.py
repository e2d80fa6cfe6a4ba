"""A forward pass as a list of einsums, whose gradients are einsums as well.

sharding/layout.py lists the letters. The rows of a product are the batch's (BL), in a gate the
groups' (GS), and in experts the places of their buffers (EGC).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Self

from lingvo_gshard.core.base_layer import STACKED
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.layers.numerics import Remat
from lingvo_gshard.layers.products import Equation
from lingvo_gshard.model.step_products import StepProduct
from lingvo_gshard.sharding.layout import TensorSpec

# The stack name of products whose rows are split as U.
SOFTMAX = "softmax"


@dataclasses.dataclass(frozen=True)
class Einsum(Equation):
    """A product of two tensors, such as `BLM,MH->BLH`, and the sizes of its letters.

    A lowercase letter of the result is the same dim in the optimizer.
    """

    sizes: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def letters(self) -> str:
        """All letters, each once."""
        return "".join(dict.fromkeys(self.left + self.right))

    def left_gradient(self) -> Self:
        """Returns the einsum of the left factor's gradient, from the result's."""
        return dataclasses.replace(self, left=self.result, result=self.left)

    def right_gradient(self, scatter: bool = True) -> Self:
        """Returns the einsum of the right factor's gradient, from the result's.

        With `scatter`, a weight's gradient is reduce-scattered to the split of the weight's update,
        by the optimizer's letters.
        """
        right = self.right.lower() if self.has_weight and scatter else self.right
        return dataclasses.replace(self, right=self.result, result=right)

    def stacked(self, sizes: Mapping[str, float]) -> Einsum:
        """Returns the same product for R blocks at once, with other sizes."""
        return Einsum(f"R{self.left}", f"R{self.right}", f"R{self.result}", sizes)


@dataclasses.dataclass(frozen=True)
class Product:
    """An einsum of the forward pass, which runs it `times`."""

    einsum: Einsum
    times: int
    kept: Remat = Remat.NONE  # The most saving remat that keeps the result for backward.
    moved: str = ""  # The dims after the result is moved; empty if it is not.
    is_lookup: bool = False  # A lookup lacks flops and a left factor.
    shares_left: bool = False  # Another product has the same left factor, and gathers it.
    stack: str = ""  # Its stack: `encoder`, `decoder`, `softmax`, or empty for embeddings.


def forward_products(traced: Sequence[StepProduct]) -> list[Product]:
    """Returns the einsums of the products of a traced loss."""
    return [_product(product) for product in traced]


def _product(traced: StepProduct) -> Product:
    equation = traced.equation
    sizes = dict(traced.sizes)
    if traced.place.is_looped:
        sizes[STACKED] = traced.times  # Its blocks may be the stages of a pipeline.

    # A result is computed with the left factor's split, in the order of its letters, and may then
    # be moved, for example from GECM to EGCM.
    rows = [letter for letter in equation.left if letter in equation.result]
    columns = [letter for letter in equation.result if letter not in rows]
    computed = "".join([*rows, *columns])
    moved = equation.result if equation.result != computed else ""

    # The batch has a separate letter at the softmax.
    stack = traced.place.stack
    left = equation.left
    if "U" in left:
        stack = SOFTMAX
        left = left.replace("U", "B")
        computed = computed.replace("U", "B")
        sizes["B"] = sizes.pop("U")

    return Product(
        einsum=Einsum(left, equation.right, computed, sizes),
        times=traced.times,
        kept=traced.kept_by,
        moved=moved,
        is_lookup=traced.is_lookup,
        shares_left=traced.shares_left,
        stack=stack,
    )


def stack_of(params: Params, path: str) -> str:
    """Returns the stack of a weight by its path; empty outside the stacks."""
    child = path.partition(".")[0]
    return child if child in params.task.cls.STACKS else ""


def sizes_of(spec: TensorSpec) -> dict[str, int]:
    """Returns the sizes of a tensor's letters."""
    return dict(zip(spec.dims, spec.shape, strict=True))
