"""Configured: a class whose settings are the class Params in its body.

class Dropout(BaseLayer):
    class Params(BaseLayer.Params):
        rate: float = setting(0.1, "The share of elements that are zeroed.")

    p: Params

So Dropout.Params() are its settings, whose types mypy knows, and Instantiate() returns a Dropout.

Lingvo's form also works, and mypy does not know its settings:

    @classmethod
    def Params(cls):
        p = super().Params()
        p.Define("rate", 0.1, "The share of elements that are zeroed.")
        return p
"""

import functools
from typing import Any

from lingvo_gshard.core.hyperparams import InstantiableParams


class Configured:
    """A class with settings. Each subclass has its own class Params, which names it as `cls`."""

    class Params(InstantiableParams):
        """The settings of all subclasses: their class alone."""

    p: Params
    path: str = ""  # The place of a layer in its model, dotted; empty for the root and for others.

    def __init__(self, params: Params) -> None:
        self.p = params.Copy().Freeze()  # Later changes of `params` are meant for other objects.

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = vars(cls).get("Params")
        if isinstance(own, classmethod):
            cls.Params = _naming_its_class(own)  # type: ignore[assignment, misc]
            return

        # A class without settings of its own inherits a class, or a method in Lingvo's form.
        if not isinstance(cls.Params, type):
            return
        qualname = f"{cls.__qualname__}.Params"
        if own is None or own.__qualname__ != qualname:
            names = {
                "__doc__": cls.Params.__doc__,
                "__module__": cls.__module__,
                "__qualname__": qualname,
            }
            cls.Params = type("Params", (cls.Params,), names)  # type: ignore[assignment, misc]
        cls.Params.SetDefaultClass(cls)

    def _check_setting(self, name: str, is_right: bool, expected: str) -> None:
        """Raises ValueError, which names the setting and its value, unless `is_right`."""
        if not is_right:
            where = self.path or type(self).__name__
            raise ValueError(f"{where}: {name} must be {expected}, got {self.p.Get(name)}.")


def _naming_its_class(params: classmethod) -> Any:
    """Returns Lingvo's Params method, whose result names the class that it is called on."""

    # super().Params() are the Params of a base class, and name that one.
    @functools.wraps(params.__func__)
    def named(cls: type) -> InstantiableParams:
        return params.__func__(cls).SetDefaults(cls=cls)

    return classmethod(named)
