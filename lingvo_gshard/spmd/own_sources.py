"""The code of users: the files outside the library that define an experiment's classes.

A program that was traced, or a plan that was made, must not be reused after a change of them.
"""

import contextlib
import hashlib
import inspect
import pathlib
from collections.abc import Iterable
from typing import Any

_LIBRARY = "lingvo_gshard."


def digests_of(values: Iterable[Any]) -> list[str]:
    """Returns the SHA-256 of each file outside the library that defines one of the values.

    The files of base classes are included, but other modules that they import are not.
    """
    sources = set()
    for value in values:
        for code in inspect.getmro(value) if isinstance(value, type) else [value]:
            if getattr(code, "__module__", _LIBRARY).startswith(_LIBRARY):
                continue
            with contextlib.suppress(OSError, TypeError):  # A built-in, or code typed at a prompt.
                source = pathlib.Path(inspect.getfile(code)).read_bytes()
                sources.add(hashlib.sha256(source).hexdigest())
    return sorted(sources)
