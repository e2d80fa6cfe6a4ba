"""The user's main module in the processes that this process starts.

A process that multiprocessing spawns imports the main module, to find the classes defined in it. If
a script does not guard its work by `__name__`, the import would do the work again. So a process is
started without the main module, unless the process's work refers to it.
"""

import contextlib
import io
import multiprocessing
import os
import pickle
import sys
import types
from collections.abc import Iterator
from typing import Any

# The exit status of a process that was about to repeat an unguarded script's work.
UNGUARDED = 78
GUARD = (
    "this script defines classes or functions that other processes import from it, so its work "
    'must stand under `if __name__ == "__main__":`; or define them in a separate module.'
)


class _Pickler(pickle.Pickler):
    """Pickles a value, and records which names of the main module it refers to."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.names: list[str] = []

    def reducer_override(self, value: Any) -> Any:
        """Records a class or function of the main module; all values are pickled as usual."""
        is_named = isinstance(value, type | types.FunctionType)
        if is_named and value.__module__ == "__main__":
            self.names.append(value.__qualname__)
        return NotImplemented


def pickled(value: Any) -> tuple[bytes, bool]:
    """Returns a value's pickle, and whether its reader needs the main module.

    Raises ValueError if the reader needs it but it cannot be imported, as in a notebook.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)

    main = sys.modules["__main__"]
    has_file = getattr(main, "__spec__", None) or getattr(main, "__file__", None)
    if pickler.names and not has_file:
        raise ValueError(
            f"{pickler.names[0]} is defined in a notebook or at a prompt, where other processes "
            "cannot import it: define it in a module, a .py file."
        )
    return file.getvalue(), bool(pickler.names)


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Starts multiprocessing's processes in this context without the main module."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def end_if_imported_again(*, tell: bool = True) -> None:
    """Ends a spawned process that imports an unguarded script, with the status UNGUARDED.

    Call it first before work that must not be done twice. With `tell`, it prints the reason.
    """
    # multiprocessing sets this attribute while it imports the main module.
    if not getattr(multiprocessing.current_process(), "_inheriting", False):
        return
    if tell:
        print(GUARD, file=sys.stderr, flush=True)
    os._exit(UNGUARDED)
