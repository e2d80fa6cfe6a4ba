"""Paths of etils whose own characters are not a pattern.

`epath.Path.glob` joins the folder and the pattern, and in a folder whose name holds `[`, `?` or `*`
it finds nothing, or the files of another folder. Orbax lists the files that it has written by
`glob`: without this class, it would commit a checkpoint without its arrays.
"""

import glob
import os
from collections.abc import Iterator
from typing import Self

from etils import epath


class LiteralPath(type(epath.Path())):  # type: ignore[misc]
    """A path on disk or in a bucket, which Orbax takes; so are its parents and children."""

    def glob(self, pattern: str) -> Iterator[Self]:
        """Yields the paths in this folder that match `pattern`."""
        # The backends read `[[]` as `[`, so that an escaped name matches itself alone.
        escaped = epath.Path(glob.escape(os.fspath(self)))
        for path in escaped.glob(pattern):
            yield type(self)(path)
