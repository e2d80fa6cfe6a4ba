"""Modules that are imported when something of them is first used.

TensorFlow and Grain take seconds. The classes that an experiment configures compute with them, but
its Params need neither, so a wrong model or setting is reported before they are imported.
"""

from __future__ import annotations

import importlib
import types
from typing import TYPE_CHECKING, Any


class _Late(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        found = getattr(importlib.import_module(self.__name__), name)
        setattr(self, name, found)
        return found


if TYPE_CHECKING:
    import grain
    import tensorflow as tf
    from matplotlib import figure
    from tensorflow.compiler.tf2xla.python import xla
    from tensorflow.compiler.xla.service import hlo_pb2
    from tensorflow.python.compiler.xla.experimental import xla_sharding
    from tensorflow.python.ops.parallel_for import control_flow_ops, pfor
else:
    grain = _Late("grain")
    tf = _Late("tensorflow")
    figure = _Late("matplotlib.figure")
    xla = _Late("tensorflow.compiler.tf2xla.python.xla")
    hlo_pb2 = _Late("tensorflow.compiler.xla.service.hlo_pb2")
    xla_sharding = _Late("tensorflow.python.compiler.xla.experimental.xla_sharding")
    control_flow_ops = _Late("tensorflow.python.ops.parallel_for.control_flow_ops")
    pfor = _Late("tensorflow.python.ops.parallel_for.pfor")
