"""etils' globs, corrected: the characters of a folder's own name are no pattern.

`epath.Path.glob` joins the folder and the pattern, and in a folder whose name holds `[`, `?` or `*`
it finds nothing, or the files of another folder. Orbax lists what it has written that way: a
checkpoint would be committed without its arrays.
"""

import functools
import glob
import os
from collections.abc import Callable, Iterator
from typing import Any

from etils.epath import gpath

_Glob = Callable[[Any, str], Iterator[Any]]


def correct() -> None:
    """Lets all of this process's epath.Paths, on disk and in buckets, list what they hold."""
    path_class = gpath._GPath  # No public class has `glob` itself.
    if not hasattr(path_class.glob, "__wrapped__"):
        path_class.glob = _literal(path_class.glob)


def _literal(etils_glob: _Glob) -> _Glob:
    """Returns a glob that takes its folder's name as it is."""

    @functools.wraps(etils_glob)
    def glob_in(folder: Any, pattern: str) -> Iterator[Any]:
        # The backends read `[[]` as `[`, so that an escaped name matches itself alone.
        escaped = type(folder)(glob.escape(os.fspath(folder)))
        return etils_glob(escaped, pattern)

    return glob_in
