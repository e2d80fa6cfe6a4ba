"""Figure 8's categories: the part of the model that an instruction comes from.

Layers name their operations by their path (core/base_layer.py) and by their own parts, such as
`encoder/layers_1/feed_forward/dispatch/Einsum`. XLA keeps these names as metadata.
"""

import enum
import re

# Scopes that TensorFlow, JAX and the gradient add to the names.
_WRAPPING = re.compile(
    r"(?:jit\([^)]*\)|transpose\([^)]*\)|call_exported|call_tf|(?:Stateful)?PartitionedCall|call"
    r"|gradient_tape|gradients|while|body|cond|(?:Identity|Custom)?Gradient)(?:[._]\d+)?"
)


class Category(enum.StrEnum):
    """A part of the training step."""

    EXPERTS = "experts"
    DENSE = "dense"  # Dense feed-forward layers, and the projections of attention.
    ATTENTION = "attention"
    GATE = "gate"
    DISPATCH = "dispatch_combine"
    SOFTMAX = "softmax"  # The projection to the vocabulary and the cross entropy.
    OPTIMIZER = "optimizer"
    OTHER = "other"  # Norms, dropout, sums, embeddings, and instructions without a name.


_BY_SCOPE = {
    "optimizer": Category.OPTIMIZER,
    "softmax": Category.SOFTMAX,
    "gate": Category.GATE,
    "dispatch": Category.DISPATCH,
    "combine": Category.DISPATCH,
    "experts": Category.EXPERTS,
    "feed_forward": Category.DENSE,
}


def scopes(op_name: str) -> tuple[str, ...]:
    """The model's own scopes in an op_name: layers, their parts, the operation itself."""
    first = op_name.split(";")[0]
    return tuple(part for part in first.split("/") if part and not _WRAPPING.fullmatch(part))


def category(op_name: str) -> Category:
    """The category of an instruction with this op_name."""
    # A scope that is entered a second time has a number after its name.
    outer = [re.sub(r"_\d+$", "", scope) for scope in scopes(op_name)[:-1]]
    is_projection = "project" in outer
    if any(scope.endswith("_attention") for scope in outer) and not is_projection:
        return Category.ATTENTION
    for scope, found in _BY_SCOPE.items():
        if scope in outer:
            return found
    return Category.DENSE if is_projection else Category.OTHER


def source(op_name: str) -> str:
    """An instruction's layer, such as `encoder/layers_1/feed_forward`, or else its own name."""
    names = scopes(op_name)
    return "/".join(names[:-1] or names) or "unnamed"
