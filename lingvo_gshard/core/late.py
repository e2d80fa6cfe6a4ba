"""Modules that are imported when one of their attributes is first used.

Importing TensorFlow and Grain takes seconds. The classes that an experiment configures compute with
them, but their Params need neither: so a wrong setting is reported before they are imported, and a
process that only runs programs traced by another process never imports TensorFlow. Matplotlib takes
half a second, and is needed only at the end of a program, to draw.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xla_spmd.late import LateModule

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
