"""The scopes in an instruction's name: its layer, its pass, and kernels.

XLA keeps the names of layers and operations, such as
`encoder/layers_1/feed_forward/dispatch/Einsum`, as metadata of its instructions.
"""

import enum
import re

from xla_spmd.hlo.hlo_cost import Cost

# The scopes of the recomputed forward pass: in TensorFlow's layers, and in JAX.
_RECOMPUTED = "recomputed"
_JAX_RECOMPUTED = "rematted_computation"
# Scopes that TensorFlow, JAX and the gradient add to the names.
_WRAPPING = re.compile(
    r"(?:jit\([^)]*\)|transpose\([^)]*\)|call_exported|call_tf|(?:Stateful)?PartitionedCall|call"
    rf"|gradient_tape|gradients|{_RECOMPUTED}|while|body|cond|(?:Identity|Custom)?Gradient"
    rf"|{_JAX_RECOMPUTED}|checkpoint|remat2?|closed_call|eval_jaxpr|shard_map"
    r"|custom_(?:jvp|vjp)_call)"
    r"(?:[._]\d+)?"
)
# JAX's transformations around the scope of a layer, such as `transpose(jvp(encoder))`.
_TRANSFORMED = re.compile(r"(?:transpose\((?=(?:jvp|vmap)\()|jvp\(|vmap\()(.*)\)")
# The scopes that the gradient adds, around the scope of the operation that it belongs to.
_GRADIENT = ("gradient_tape", "gradients")
# XLA's name for combined instructions, such as `decoder/(block_0/add/Sum:block_1/add/Sum)`.
_COMBINED = re.compile(r"\(([^():]*):[^()]*\)")
# JAX's scope of the transposition of a linear function, the gradient's last part.
_TRANSPOSE = "transpose("


_ATTENTION = re.compile(r"attention|attn|mha|splash|flash")


class Pass(enum.StrEnum):
    """A pass of a training step through its layers."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTED = "recomputed"


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

    The gradient of a repeated part is not a repetition: its scope encloses the repetition's.
    """
    before, found, _ = _first_name(op_name).partition(f"{_RECOMPUTED}/")
    if found:
        return not any(scope in _GRADIENT for scope in before.split("/"))

    # JAX's gradient of a repetition has the scope `transpose` behind the repetition's.
    _, repeated, after = _first_name(op_name).partition(f"{_JAX_RECOMPUTED}/")
    return bool(repeated) and not any(scope.startswith(_TRANSPOSE) for scope in after.split("/"))


def is_attention_kernel(cost: Cost) -> bool:
    """Whether an instruction is an attention kernel, from Pallas or cuDNN.

    Kernels are known by their own names, such as `mha_forward/pallas_call`. The scopes around them
    also hold the projections, which may be calls of cuBLAS.
    """
    if cost.opcode != "custom-call" or not cost.flops:
        return False
    names = _first_name(cost.op_name).removesuffix("/pallas_call").split("/")
    return _ATTENTION.search(names[-1].lower()) is not None


def pass_of(op_name: str) -> Pass:
    """Returns the pass of a training step that an instruction belongs to.

    The update of the weights, and a program without a gradient, count as forward.
    """
    if is_recomputed(op_name):
        return Pass.RECOMPUTED
    around = _first_name(op_name).split("/")[:-1]
    is_backward = any(scope.startswith((_TRANSPOSE, *_GRADIENT)) for scope in around)
    return Pass.BACKWARD if is_backward else Pass.FORWARD


def source(op_name: str) -> str:
    """Returns an instruction's layer, such as `encoder/layers_1/feed_forward`, or its own name.

    For combined instructions, it is the first one's layer and `and others`: there may be hundreds.
    """
    first = _COMBINED.sub(r"\1", op_name)
    names = scopes(first)
    layer = "/".join(names[:-1] or names) or "unnamed"
    return layer if first == op_name else f"{layer} and others"


def _first_name(op_name: str) -> str:
    return op_name.split(";")[0]  # Merged instructions have several names.
