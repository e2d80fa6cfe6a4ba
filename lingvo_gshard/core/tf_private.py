"""The private names of TensorFlow that layers use where public ones are missing.

Checked with TensorFlow 2.21. Like `tf` (late.py), they are imported when they are first used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lingvo_gshard.core.late import LateModule

if TYPE_CHECKING:
    import tensorflow as tf
    from tensorflow.compiler.tf2xla.python import xla
    from tensorflow.python.compiler.xla.experimental import xla_sharding
    from tensorflow.python.ops.parallel_for import control_flow_ops, pfor
else:
    tf = LateModule("tensorflow")
    xla = LateModule("tensorflow.compiler.tf2xla.python.xla")
    xla_sharding = LateModule("tensorflow.python.compiler.xla.experimental.xla_sharding")
    control_flow_ops = LateModule("tensorflow.python.ops.parallel_for.control_flow_ops")
    pfor = LateModule("tensorflow.python.ops.parallel_for.pfor")

__all__ = [
    "annotation",
    "function_graph",
    "mapped",
    "pfor",
    "set_text_attribute",
    "text_attribute",
    "xla",
    "xla_sharding",
]


def mapped(fn: Callable[[tf.Tensor], list[tf.Tensor]], count: int) -> list[tf.Tensor]:
    """Returns tf.vectorized_map(fn, tf.range(count)), for a caller that is traced as a tf.function.

    The public function makes another tf.function inside the loop. In its gradient, TensorFlow
    treats all tensors that enter the map as possible constants, and so holds whole activations in
    memory while it lowers the program.
    """
    return control_flow_ops._pfor_impl(fn, count, fallback_to_while_loop=False)


def annotation(serialized: bytes) -> Any:
    """Returns the OpSharding, a protocol message, of an annotation's operation."""
    return xla_sharding.xla_data_pb2.OpSharding.FromString(serialized)


def set_text_attribute(op: Any, name: str, text: str) -> None:
    """Gives an operation of a graph an attribute, which the compiled program drops."""
    op._set_attr(name, tf.compat.v1.AttrValue(s=text.encode()))


def text_attribute(op: Any, name: str) -> str | None:
    """Returns the text that `set_text_attribute` has given an operation; None without any."""
    try:
        text: bytes = op.get_attr(name)
    except ValueError:
        return None
    return text.decode()


def function_graph(op: Any, attribute: str) -> tf.Graph:
    """Returns the graph of the function that an operation calls, such as the body of a loop."""
    return op.graph._get_function(op.get_attr(attribute).name).graph
