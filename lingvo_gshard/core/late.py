"""Modules that are imported when something of them is first used.

TensorFlow and Grain take seconds. The classes that an experiment configures compute with them, but
their Params need neither: a wrong setting is reported before they are imported, and a process that
runs programs which another one has traced never imports TensorFlow. Matplotlib takes half a second,
and draws when a program's work is done.
"""

from __future__ import annotations

import importlib
import types
from typing import TYPE_CHECKING, Any


class LateModule(types.ModuleType):
    """A stand-in for a module, which is imported when an attribute of it is first read."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(importlib.import_module(self.__name__), name)
        setattr(self, name, found)
        return found


if TYPE_CHECKING:
    import grain
    import tensorflow as tf
    import tensorflow_text as tf_text
    from matplotlib import figure
else:
    grain = LateModule("grain")
    tf = LateModule("tensorflow")
    tf_text = LateModule("tensorflow_text")
    figure = LateModule("matplotlib.figure")
