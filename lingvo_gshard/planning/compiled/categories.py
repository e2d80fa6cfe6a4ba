"""Figure 8's categories: the part of the model that an instruction comes from.

This project's layers name their operations by their path (core/base_layer.py) and by their own
parts, such as `encoder/layers_1/feed_forward/dispatch/Einsum`. XLA keeps these names as metadata.
"""

import dataclasses
import enum
import re
from collections.abc import Callable

from lingvo_gshard.core.base_layer import RECOMPUTED
from lingvo_gshard.hlo.collectives import Collective
from lingvo_gshard.hlo.hlo_cost import Cost

# JAX's name for RECOMPUTED.
_JAX_RECOMPUTED = "rematted_computation"
# Scopes that TensorFlow, JAX and the gradient add to the names.
_WRAPPING = re.compile(
    r"(?:jit\([^)]*\)|transpose\([^)]*\)|call_exported|call_tf|(?:Stateful)?PartitionedCall|call"
    rf"|gradient_tape|gradients|{RECOMPUTED}|while|body|cond|(?:Identity|Custom)?Gradient"
    rf"|{_JAX_RECOMPUTED}|checkpoint|remat2?|closed_call|eval_jaxpr|shard_map"
    r"|custom_(?:jvp|vjp)_call)"
    r"(?:[._]\d+)?"
)
# JAX's transformations around the scope of a layer, such as `transpose(jvp(encoder))`.
_TRANSFORMED = re.compile(r"(?:transpose\((?=(?:jvp|vmap)\()|jvp\(|vmap\()(.*)\)")
# Those of them that the gradient adds, around the scope of the operation that it belongs to.
_GRADIENT = ("gradient_tape", "gradients")
# XLA's name of instructions that it combined, such as `decoder/(block_0/add/Sum:block_1/add/Sum)`.
_COMBINED = re.compile(r"\(([^():]*):[^()]*\)")
# JAX's scope of what the transposition of a linear function, the gradient's last part, computes.
_TRANSPOSE = "transpose("


class Pass(enum.StrEnum):
    """A pass of a training step through its layers."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTED = "recomputed"


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
    scopes = [_untransformed(scope) for scope in _first_name(op_name).split("/")]
    return tuple(scope for scope in scopes if scope and not _WRAPPING.fullmatch(scope))


def _untransformed(scope: str) -> str:
    """Returns a scope without JAX's transformations: `encoder` of `transpose(jvp(encoder))`.

    So the forward pass of a layer, its gradient and its repetition have one name.
    """
    match = _TRANSFORMED.fullmatch(scope)
    while match is not None:
        scope = match[1]
        match = _TRANSFORMED.fullmatch(scope)
    return scope


def is_recomputed(op_name: str) -> bool:
    """Whether an instruction repeats a part of the forward pass for the gradient (section 5.1).

    The gradient of what is repeated is not: its own scope is around that of the repetition.
    """
    before, found, _ = _first_name(op_name).partition(f"{RECOMPUTED}/")
    if found:
        return not any(scope in _GRADIENT for scope in before.split("/"))

    # JAX names what the gradient computes of a repetition behind it, by its own `transpose`.
    _, repeated, after = _first_name(op_name).partition(f"{_JAX_RECOMPUTED}/")
    return bool(repeated) and not any(scope.startswith(_TRANSPOSE) for scope in after.split("/"))


def pass_of(op_name: str) -> Pass:
    """Returns the pass of a training step in JAX that an instruction belongs to.

    The update of the weights, and a program without a gradient, count as forward.
    """
    if is_recomputed(op_name):
        return Pass.RECOMPUTED
    scopes = _first_name(op_name).split("/")
    is_backward = any(scope.startswith(_TRANSPOSE) for scope in scopes[:-1])
    return Pass.BACKWARD if is_backward else Pass.FORWARD


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


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts that the cost of a program is split into."""

    names: tuple[str, ...]  # Those that are listed even if nothing belongs to them.
    of: Callable[[Cost | Collective], str]  # Returns the part of an instruction.


def _category_of(instruction: Cost | Collective) -> str:
    return category(instruction.op_name)


# Figure 8's, by the scopes of this project's layers.
FIGURE_8 = Parts(tuple(Category), _category_of)


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
    """Returns an instruction's layer, such as `encoder/layers_1/feed_forward`, or its own name.

    Of several that were combined it is the first one's, `and others`: there may be hundreds.
    """
    first = _COMBINED.sub(r"\1", op_name)
    names = scopes(first)
    layer = "/".join(names[:-1] or names) or "unnamed"
    return layer if first == op_name else f"{layer} and others"


def _first_name(op_name: str) -> str:
    return op_name.split(";")[0]  # Merged instructions have several names.
