"""Figure 8's categories: the part of the model that an instruction comes from.

Layers name their operations by their path (core/base_layer.py) and by their own parts, such as
`encoder/layers_1/feed_forward/dispatch/Einsum`.
"""

import enum
import re

from xla_plan.cost.kinds import Parts
from xla_plan.cost.scopes import scopes


class Category(enum.StrEnum):
    """A part of the training step."""

    EXPERTS = "experts"
    FEED_FORWARD = "feed_forward"  # Dense feed-forward layers.
    PROJECTION = "projection"  # To queries, keys and values, and of attention's result.
    ATTENTION = "attention"
    # The paper's "Gate Einsum" is the gate's projection together with dispatch and combine.
    GATE_PROJECTION = "gate_projection"
    GATE_CUMSUM = "gate_cumsum"
    GATE = "gate"  # The gate's other operations.
    DISPATCH = "dispatch_combine"
    SOFTMAX = "softmax"  # The projection to the vocabulary and the cross entropy.
    OPTIMIZER = "optimizer"
    OTHER = "other"  # Norms, dropout, sums, embeddings, and instructions without a name.


# The first of these scopes that an instruction has decides.
_BY_SCOPE = {
    "optimizer": Category.OPTIMIZER,
    "softmax": Category.SOFTMAX,
    "gate": Category.GATE,
    "dispatch": Category.DISPATCH,
    "combine": Category.DISPATCH,
    "experts": Category.EXPERTS,
    "feed_forward": Category.FEED_FORWARD,
}


def category(op_name: str) -> Category:
    """Returns the category of an instruction with this op_name."""
    # The last scope is the operation. A scope that is entered a second time ends with a number.
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


# Figure 8's, by the scopes of this project's layers.
FIGURE_8 = Parts(tuple(Category), lambda instruction: category(instruction.op_name))
