"""The names of TensorFlow's inside that layers use, since it has no public ones for them.

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

__all__ = ["mapped", "pfor", "set_text_attribute", "xla", "xla_sharding"]


def mapped(fn: Callable[[tf.Tensor], list[tf.Tensor]], count: int) -> list[tf.Tensor]:
    """Returns tf.vectorized_map(fn, tf.range(count)), for a caller that is traced as a tf.function.

    The public one makes a function inside the loop. In its gradient TensorFlow takes all that
    enters the map for possible constants, and so holds whole activations where it lowers the
    program.
    """
    return control_flow_ops._pfor_impl(fn, count, fallback_to_while_loop=False)


def set_text_attribute(op: Any, name: str, text: str) -> None:
    """Gives an operation of a graph an attribute, which its compiled program does not have."""
    op._set_attr(name, tf.compat.v1.AttrValue(s=text.encode()))
