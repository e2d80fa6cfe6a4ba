"""A forward pass as a list of einsums, from an experiment's numbers and its weights' specs.

Letters are those of sharding/layout.py. The rows of a product are those of the batch, BL, in a
gate those of the groups, GS, and in experts those of their buffers, EGC.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Self

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import moe
from lingvo_gshard.layers.dispatch import Dispatch
from lingvo_gshard.layers.repeat import Remat
from lingvo_gshard.sharding.layout import TensorSpec, is_weight

# The path of the last product's weight, whose rows are split as U. If there is none, the softmax's
# weights are the embedding's table, once more.
SOFTMAX = "softmax"


@dataclasses.dataclass(frozen=True)
class Einsum:
    """A product of two tensors, such as `BLM,MH->BLH`, and the sizes of its letters.

    A lowercase letter of the result is the same dim in the optimizer.
    """

    equation: str
    sizes: Mapping[str, float]

    @functools.cached_property
    def left(self) -> str:
        """The dims of the left factor."""
        return self.equation.partition("->")[0].split(",")[0]

    @functools.cached_property
    def right(self) -> str:
        """The dims of the right factor."""
        return self.equation.partition("->")[0].split(",")[1]

    @functools.cached_property
    def result(self) -> str:
        """The dims of the result."""
        return self.equation.partition("->")[2]

    @property
    def letters(self) -> str:
        """All letters, each once."""
        return "".join(dict.fromkeys(self.left + self.right))

    @property
    def has_weight(self) -> bool:
        """Whether the right factor is a weight."""
        return is_weight(self.right)

    def left_gradient(self) -> Self:
        """Returns the einsum of the left factor's gradient, from the result's."""
        return dataclasses.replace(self, equation=f"{self.result},{self.right}->{self.left}")

    def right_gradient(self, scatter: bool = True) -> Self:
        """Returns the einsum of the right factor's gradient, from the result's.

        With `scatter` a weight's gradient is summed where the weight is updated, by the optimizer's
        letters.
        """
        right = self.right.lower() if self.has_weight and scatter else self.right
        return dataclasses.replace(self, equation=f"{self.left},{self.result}->{right}")

    def stacked(self, sizes: Mapping[str, float]) -> Self:
        """Returns the same product for R blocks at once, with other sizes."""
        equation = f"R{self.left},R{self.right}->R{self.result}"
        return dataclasses.replace(self, equation=equation, sizes=sizes)


@dataclasses.dataclass(frozen=True)
class Product:
    """An einsum of the forward pass, which runs it `times`."""

    einsum: Einsum
    times: int
    kept: Remat = Remat.NONE  # The most saving remat that keeps the result for backward.
    moved: str = ""  # The dims that the result is then moved to, if it is.
    is_lookup: bool = False  # It has no flops and no left factor.
    shares_left: bool = False  # Another product has the same left factor, and gathers it.
    stack: str = ""  # Where it is: `encoder`, `decoder`, `softmax`, or empty for embeddings.


def forward_products(params: Params, weights: NestedMap) -> list[Product]:
    """Returns the products of a forward pass, given the specs of all weights."""
    products = []
    specs = dict(weights.FlattenItems())
    for path, spec in specs.items():
        name = path.rpartition(".")[2]
        sizes = _batch_sizes(params, path) | sizes_of(spec)
        of_weight: list[Product] = []

        # A bias is only added, be it a vector's or one by distances.
        if not name.endswith("bias") and "positions" not in path:
            of_weight.append(_weight_product(path, spec, sizes))

        # A query's projection and a gate stand for the products of two activations in their layer.
        if name == "wq":
            of_weight += _attention_products(sizes)
        if name == "wg":
            moe_params = params.task.Get(stack_of(params, path)).moe
            of_weight += _dispatch_products(sizes, moe_params.dispatch)

        stack = SOFTMAX if path == SOFTMAX else stack_of(params, path)
        products += [dataclasses.replace(product, stack=stack) for product in of_weight]

        if spec.dims == "VM" and SOFTMAX not in specs:
            tied = Einsum("BLM,VM->BLV", sizes)
            products.append(Product(tied, times=1, kept=Remat.BLOCK, stack=SOFTMAX))
    return products


def stack_of(params: Params, path: str) -> str:
    """Returns the stack of a weight by its path; empty outside the stacks."""
    child = path.partition(".")[0]
    return child if child in params.task.cls.STACKS else ""


def sizes_of(spec: TensorSpec) -> dict[str, int]:
    """Returns the sizes of a tensor's letters."""
    return dict(zip(spec.dims, spec.shape, strict=True))


def _weight_product(path: str, spec: TensorSpec, sizes: Mapping[str, int]) -> Product:
    """Returns the product of activations with a weight."""
    # One block at a time, even if its weights are stacked.
    dims = spec.dims.removeprefix("R")
    equation = _weight_equation(dims)

    if "[" not in path or "self_norm" in path:
        kept = Remat.BLOCK  # It lies outside the stacks, or is the input of a layer.
    elif path.endswith((".wi", ".wi_gate", ".wo")):
        kept = Remat.ALL_BUT_PRODUCTS
    else:
        kept = Remat.NONE

    # Queries, keys and values of a self-attention are products of the same activations.
    is_self_attention = "self_attention" in path
    shares_left = path.endswith(".wv") or (path.endswith(".wk") and is_self_attention)

    return Product(
        einsum=Einsum(equation, sizes),
        times=sizes.get("R", 1),
        kept=kept,
        shares_left=shares_left,
        moved="GECM" if equation.endswith("->EGCM") else "",  # Back to where the tokens are.
        is_lookup="embedding" in path,
    )


def _weight_equation(dims: str) -> str:
    """Returns the einsum of activations with a weight of these dims, without R.

    MH gives BLM,MH->BLH and HM gives BLH,HM->BLM; so do MND and NDM. An expert's EMH gives
    EGCM,EMH->EGCH, a gate's M_ gives GSM,M_->GS_, and a norm's M gives BLM,M->BLM.
    """
    if dims.startswith("E"):
        rows = "EGC"
    elif "_" in dims:
        rows = "GS"
    else:
        rows = "BL"

    # M is summed where it comes first, and is otherwise the result.
    matrix = dims.removeprefix("E")
    if matrix.startswith("M"):
        summed = "M"
        produced = matrix.removeprefix("M") or "M"
    else:
        summed = matrix[:-1]
        produced = matrix[-1]
    return f"{rows}{summed},{dims}->{rows}{produced}"


def _attention_products(sizes: Mapping[str, int]) -> list[Product]:
    """Returns the logits of an attention, and the sums of values by its probabilities."""
    # Queries with keys, then probabilities with values.
    times = sizes.get("R", 1)
    return [
        Product(Einsum("BNLD,BNTD->BNLT", sizes), times),
        Product(Einsum("BNLT,BNTD->BNLD", sizes), times),
    ]


def _dispatch_products(sizes: Mapping[str, int], dispatch: Dispatch) -> list[Product]:
    """Returns the dispatch of tokens to experts, with its AllToAll, and the combination."""
    # By einsum these are products with one-hot masks (Algorithm 2), otherwise lookups.
    is_lookup = dispatch is not Dispatch.EINSUM
    times = sizes.get("R", 1)

    return [
        Product(
            einsum=Einsum("GSEC,GSM->GECM", sizes),
            times=times,
            kept=Remat.ALL_BUT_PRODUCTS,
            moved="EGCM",
            is_lookup=is_lookup,
        ),
        Product(Einsum("GSEC,GECM->GSM", sizes), times, is_lookup=is_lookup),
    ]


def _batch_sizes(params: Params, path: str) -> dict[str, int]:
    """Returns the sizes of a batch's letters where the weight of this path is used."""
    batch = params.input
    source_len, target_len = params.task.cls.Lengths(batch)

    # Queries are the layer's own tokens; keys and values may be the source's.
    length = source_len if params.task.cls.ReadsSource(path) else target_len
    attended = source_len if "source_attention" in path else length
    sizes = {"B": batch.batch_size, "L": length, "T": attended}

    name = stack_of(params, path)
    stack = params.task.Get(name) if name else None
    if stack is None or stack.moe is None:
        return sizes

    # Groups of S tokens, each with C places in every expert.
    tokens = batch.batch_size * length
    group_size = moe.group_size(stack.moe, tokens)
    sizes["G"] = tokens // group_size
    sizes["S"] = group_size
    sizes["E"] = stack.moe.num_experts
    sizes["C"] = moe.train_places(stack.moe, group_size)
    return sizes
