"""Registered experiments: from names to Params.

The modules of the `params` package register their classes: `toy.MoE8E4L` is the class MoE8E4L of
params/toy.py. They are imported on the first look-up, so the library depends on no experiment.
"""

import difflib
import importlib
import pkgutil
from collections.abc import Iterable
from typing import Any, TypeVar

from lingvo_gshard.core import hyperparams
from lingvo_gshard.core.hyperparams import Params

_PACKAGE = "params"
_Class = TypeVar("_Class", bound=type)
_experiments: dict[str, Any] = {}


def register(cls: _Class) -> _Class:
    """Registers a class, whose `params()` returns an experiment's Params, as `<module>.<Class>`.

    A class decorator. Raises ValueError if another class has the name.
    """
    module = cls.__module__.rsplit(".", 1)[-1]
    name = f"{module}.{cls.__name__}"
    registered = _experiments.setdefault(name, cls)
    if registered is not cls:
        raise ValueError(f"Experiment {name!r} is registered already, by {registered.__module__}.")
    return cls


def registered_names() -> list[str]:
    """Returns all names, sorted."""
    # A module that is imported registers its experiments.
    package = importlib.import_module(_PACKAGE)
    for module in pkgutil.iter_modules(package.__path__, f"{_PACKAGE}."):
        importlib.import_module(module.name)
    return sorted(_experiments)


def get_class(name: str) -> Any:
    """Returns the class registered as `name`; ValueError, with the nearest name, if none is."""
    names = registered_names()
    if name not in _experiments:
        by_lowercase = {registered.lower(): registered for registered in names}
        near = difflib.get_close_matches(name.lower(), by_lowercase, n=1)
        hint = f" Did you mean {by_lowercase[near[0]]}?" if near else ""
        raise ValueError(f"No model {name!r}.{hint} Registered are {', '.join(names)}.")
    return _experiments[name]


def get_params(name: str, settings: Iterable[str] = ()) -> Params:
    """Returns an experiment's Params with `path=value` settings; ValueError as apply_setting."""
    params = get_class(name).params()
    for setting in settings:
        hyperparams.apply_setting(params, setting)
    return params
