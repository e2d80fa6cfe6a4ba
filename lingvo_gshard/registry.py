"""Experiments by name: registered ones, and classes of a user's own modules.

The modules of the `params` package register their classes: `toy.MoE8E4L` is the class MoE8E4L of
params/toy.py. They are imported on the first look-up, so the library depends on no experiment.

An experiment of one's own needs no registration: `my_package.my_module.Mine` is imported from the
current folder or from an installed package. What an installed package registers has short names,
too, if the package names its modules as entry points:

    [project.entry-points."lingvo_gshard.experiments"]
    mine = "my_package.my_module"
"""

import difflib
import importlib
import importlib.metadata
import logging
import os
import pathlib
import pkgutil
import sys
import traceback
import types
from collections.abc import Iterable
from typing import Any, TypeVar

from lingvo_gshard.core import hyperparams
from lingvo_gshard.core.hyperparams import Params
from xla_spmd.runtime import versions

_PACKAGE = "params"
_ENTRY_POINTS = "lingvo_gshard.experiments"
_Class = TypeVar("_Class", bound=type)
_experiments: dict[str, Any] = {}
_failed: set[str] = set()  # Entry points that a warning has named.
# The beginnings of files that are not a user's own: Python's import system and the library.
_LIBRARY = pathlib.Path(__file__).parents[1]
_NOT_OWN = (
    "<",
    f"{pathlib.Path(importlib.__file__).parent}{os.sep}",
    *(f"{_LIBRARY / name}{os.sep}" for name in ("lingvo_gshard", "params", "xla_spmd")),
)


def register(cls: _Class) -> _Class:
    """Registers a class, whose `params()` returns an experiment's Params, as `<module>.<Class>`.

    A class decorator. Raises ValueError if another class has the name.
    """
    module = cls.__module__.rsplit(".", 1)[-1]
    name = f"{module}.{cls.__name__}"
    registered = _experiments.setdefault(name, cls)
    # A notebook's cell that is run again defines its class again.
    if registered is not cls and cls.__module__ != "__main__":
        raise ValueError(f"Experiment {name!r} is registered already, by {registered.__module__}.")
    _experiments[name] = cls
    return cls


def registered_names() -> list[str]:
    """Returns all names, sorted: of `params`, of installed packages, and of imported modules."""
    # A module that is imported registers its experiments.
    package = importlib.import_module(_PACKAGE)
    for module in pkgutil.iter_modules(package.__path__, f"{_PACKAGE}."):
        importlib.import_module(module.name)
    for entry_point in importlib.metadata.entry_points(group=_ENTRY_POINTS):
        _load(entry_point)
    return sorted(_experiments)


def _load(entry_point: importlib.metadata.EntryPoint) -> None:
    """Imports an installed package's module; a warning names one that cannot be imported."""
    # Another model must not fail with it.
    try:
        entry_point.load()
    except Exception as error:
        if entry_point.value not in _failed:
            _failed.add(entry_point.value)
            where = f"the entry point {entry_point.name} of {_ENTRY_POINTS}"
            logging.warning("%s, %s, cannot be loaded: %r", entry_point.value, where, error)


def import_modules(names: Iterable[str]) -> None:
    """Imports modules, which register experiments, from the current folder or installed packages.

    Raises ValueError for a name that is not a module's.
    """
    for name in names:
        if _imported(name) is None:
            raise ValueError(f"--import={name}: {_no_module(name)}.")


def get_class(name: str) -> Any:
    """Returns the class of a registered name, or of a path such as `my_package.my_module.Mine`.

    Raises ValueError, with the nearest name, if there is neither; and for a class without params().
    """
    if not isinstance(name, str):
        raise ValueError(f"model: expected a name, such as 'toy.MoE8E4L', got {name!r}.")
    if name in _experiments:
        return _experiments[name]
    names = registered_names()
    if name in _experiments:
        return _experiments[name]

    module_name, _, class_name = name.rpartition(".")
    module = _imported(module_name) if module_name else None
    if module is None:
        hint = _hint(name, names)
        message = f"No model {name!r}.{hint} `gshard models` lists them."
        # A path of the user's own is not near any of the names.
        if module_name and not hint:
            message += f" And {_no_module(module_name)}."
        raise ValueError(message)

    cls = getattr(module, class_name, None)
    if not hasattr(cls, "params"):
        classes = {known: value for known, value in vars(module).items() if isinstance(value, type)}
        known = [known for known, value in classes.items() if hasattr(value, "params")]
        has = f"its experiments are {', '.join(known)}" if known else "it has no experiments"
        raise ValueError(
            f"No model {name!r}:{_hint(name, names)} {module.__file__ or module} defines no class "
            f"{class_name} with params(); {has}."
        )
    return cls


def full_name(name: str) -> str:
    """Returns a name by which other processes find the class, too.

    A class of `params` keeps its registered name, and every other is named by its path. Raises
    ValueError if there is no such class.
    """
    cls = get_class(name)
    if cls.__module__.startswith(f"{_PACKAGE}."):
        return name
    return f"{cls.__module__}.{cls.__qualname__}"


def get_params(name: str, settings: Iterable[str] = ()) -> Params:
    """Returns an experiment's Params with `path=value` settings.

    Raises the errors of apply_setting, and ValueError, with the file and line, if a method of a
    user's own class fails.
    """
    cls = get_class(name)
    try:
        params: Params = cls.params()
    except ValueError:
        raise
    except Exception as error:
        # In our classes it is a bug of ours.
        if cls.__module__.startswith(f"{_PACKAGE}."):
            raise
        raise ValueError(_located(error)) from error

    for setting in settings:
        hyperparams.apply_setting(params, setting)
    return params


def _imported(name: str) -> types.ModuleType | None:
    """Returns a module of the current folder or of an installed package; None if it is missing."""
    # Last, so that a file of the folder hides no package. Processes that are started from this one
    # inherit the path.
    folder = os.getcwd()
    if not {"", folder} & set(sys.path):
        sys.path.append(folder)

    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return None
        # A module that exists lacks another one, perhaps a package that we need, too.
        if versions.advice(error) is not None:
            raise
        raise ValueError(_located(error)) from error
    except SyntaxError as error:
        raise ValueError(f"{error.filename}, line {error.lineno}: {error.msg}") from error
    except (TypeError, ValueError) as error:
        if not _own_frames(error):  # A relative name, such as `.mine`, or an empty one.
            return None
        raise ValueError(_located(error)) from error
    except Exception as error:
        raise ValueError(_located(error)) from error


def _located(error: Exception) -> str:
    """Returns an error in one line, with the place in a user's own code where it was raised."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    frames = _own_frames(error)
    return f"{frames[-1].filename}, line {frames[-1].lineno}: {text}" if frames else text


def _own_frames(error: Exception) -> list[traceback.FrameSummary]:
    """Returns the frames of an error outside of the library and of Python's import."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if not frame.filename.startswith(_NOT_OWN)]


def _no_module(name: str) -> str:
    return f"there is no module {name} in {os.getcwd()} or among the installed packages"


def _hint(name: str, names: list[str]) -> str:
    """Returns a question with the registered name that is nearest, if one is near."""
    by_lowercase = {registered.lower(): registered for registered in names}
    near = difflib.get_close_matches(name.lower(), by_lowercase, n=1)
    return f" Did you mean {by_lowercase[near[0]]}?" if near else ""
