"""Figure 8's categories: the part of the model that an instruction comes from.

Layers name their operations by their path (core/base_layer.py) and by their own parts, such as
`encoder/layers_1/feed_forward/dispatch/Einsum`. XLA keeps these names as metadata.
"""

import enum
import re

from lingvo_gshard.core.base_layer import RECOMPUTED

# Scopes that TensorFlow, JAX and the gradient add to the names.
_WRAPPING = re.compile(
    r"(?:jit\([^)]*\)|transpose\([^)]*\)|call_exported|call_tf|(?:Stateful)?PartitionedCall|call"
    rf"|gradient_tape|gradients|{RECOMPUTED}|while|body|cond|(?:Identity|Custom)?Gradient)"
    r"(?:[._]\d+)?"
)
# Those of them that the gradient adds, around the scope of the operation that it belongs to.
_GRADIENT = ("gradient_tape", "gradients")


class Category(enum.StrEnum):
    """A part of the training step."""

    EXPERTS = "experts"
    FEED_FORWARD = "feed_forward"  # Dense ones.
    PROJECTION = "projection"  # To queries, keys and values, and from attention's result.
    ATTENTION = "attention"
    # The paper's "Gate Einsum" is the gate's projection together with dispatch and combine.
    GATE_PROJECTION = "gate_projection"
    GATE_CUMSUM = "gate_cumsum"
    GATE = "gate"  # Its other operations.
    DISPATCH = "dispatch_combine"
    SOFTMAX = "softmax"  # The projection to the vocabulary and the cross entropy.
    OPTIMIZER = "optimizer"
    OTHER = "other"  # Norms, dropout, sums, embeddings, and instructions without a name.


# The first of these that is among an instruction's scopes decides.
_BY_SCOPE = {
    "optimizer": Category.OPTIMIZER,
    "softmax": Category.SOFTMAX,
    "gate": Category.GATE,
    "dispatch": Category.DISPATCH,
    "combine": Category.DISPATCH,
    "experts": Category.EXPERTS,
    "feed_forward": Category.FEED_FORWARD,
}


def scopes(op_name: str) -> tuple[str, ...]:
    """Returns the model's own scopes in an op_name: layers, their parts, the operation itself."""
    scopes = [scope for scope in _first_name(op_name).split("/") if scope]
    return tuple(scope for scope in scopes if not _WRAPPING.fullmatch(scope))


def is_recomputed(op_name: str) -> bool:
    """Whether an instruction repeats a part of the forward pass for the gradient (section 5.1).

    The gradient of what is repeated is not: its own scope is around that of the repetition.
    """
    before, found, _ = _first_name(op_name).partition(f"{RECOMPUTED}/")
    return bool(found) and not any(scope in _GRADIENT for scope in before.split("/"))


def category(op_name: str) -> Category:
    """Returns the category of an instruction with this op_name."""
    # The last scope is the operation. One that is entered a second time has a number at its end.
    names = [re.sub(r"_\d+$", "", scope) for scope in scopes(op_name)]
    outer = names[:-1]

    is_attention = any(scope.endswith("_attention") for scope in outer)
    is_projection = "project" in outer
    if is_attention and not is_projection:
        return Category.ATTENTION

    for scope, scope_category in _BY_SCOPE.items():
        if scope in outer:
            return _in_gate(names) if scope_category is Category.GATE else scope_category
    return Category.PROJECTION if is_projection else Category.OTHER


def _in_gate(names: list[str]) -> Category:
    """Returns the category of an operation of the gate, by its scopes and its own name."""
    if "project" in names:
        return Category.GATE_PROJECTION
    if names[-1] == "Cumsum":
        return Category.GATE_CUMSUM
    return Category.GATE


def label(name: str) -> str:
    """Returns a category's name as a picture or a table shows it."""
    return name.replace("_", " ").replace("dispatch combine", "dispatch, combine")


def source(op_name: str) -> str:
    """Returns an instruction's layer, such as `encoder/layers_1/feed_forward`, or its own name."""
    names = scopes(op_name)
    layer = names[:-1] or names
    return "/".join(layer) or "unnamed"


def _first_name(op_name: str) -> str:
    return op_name.split(";")[0]  # Merged instructions have several names.
