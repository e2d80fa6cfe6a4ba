"""Modules that are imported when something of them is first used."""

import importlib
import types
from typing import Any


class LateModule(types.ModuleType):
    """A stand-in for a module, which is imported when an attribute of it is first read."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(importlib.import_module(self.__name__), name)
        setattr(self, name, found)
        return found
