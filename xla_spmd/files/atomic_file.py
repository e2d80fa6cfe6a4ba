"""Writes files and folders so that they are never half written, even if the machine stops."""

import contextlib
import errno
import os
import pathlib
import shutil
import uuid
from collections.abc import Container, Iterator

from xla_spmd.files import lock


def write(path: str | pathlib.Path, content: str | bytes) -> None:
    """Writes `content` to `path`, which holds either all of it or its former contents."""
    with replacing(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def replacing(path: str | pathlib.Path, is_shared: bool = False) -> Iterator[pathlib.Path]:
    """Yields the path of a temporary file that replaces `path` once the block succeeds.

    The temporary file is in the same folder. If the block raises, it is deleted, and `path` stays
    as it was. With `is_shared`, several processes may write `path` at the same time, each to its
    own temporary file. An OSError that lacks a file's name gets the temporary file's name.
    """
    path = pathlib.Path(path)
    suffix = f".{uuid.uuid4().hex}.partial" if is_shared else ".partial"
    partial = path.with_name(path.name + suffix)
    try:
        with naming(partial):
            yield partial

            # The content must be on the disk before the name appears there.
            with partial.open("rb+") as file:
                os.fsync(file.fileno())
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_folder(path: str | pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a new folder that replaces the folder `path` once the block succeeds.

    The new folder is beside `path`. If the block raises, it is deleted, and `path` stays as it was.
    Raises ValueError if another process is writing the folder.
    """
    path = pathlib.Path(path).resolve()  # So that a link stays, and its target is replaced.
    with lock.held(path, "writes this folder"), _replacing_locked(path) as partial:
        yield partial


@contextlib.contextmanager
def _replacing_locked(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a new folder like `replacing_folder`; the caller holds the lock."""
    # Hidden, since both are deleted: a user's own NAME.before is not ours.
    partial = path.with_name(f".{path.name}.partial")
    before = path.with_name(f".{path.name}.before")

    # A process that was killed may have left this folder behind.
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial

        # A folder cannot replace one that holds files, so the old one is moved aside first.
        if path.exists():
            shutil.rmtree(before, ignore_errors=True)
            path.rename(before)
        partial.rename(path)
        shutil.rmtree(before, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_holds_only(path: str | pathlib.Path, entries: Container[str], what: str) -> None:
    """Raises ValueError if `path` is a folder that holds names other than `entries`.

    `replacing_folder` would delete the other files. `what` names the thing that is written there,
    such as "a bundle".
    """
    path = pathlib.Path(path)
    if not path.exists():
        return
    others = [entry.name for entry in path.iterdir() if entry.name not in entries]
    if others:
        raise ValueError(
            f"{path} holds {min(others)}, which is not part of {what}; export to a new or empty "
            "folder."
        )


@contextlib.contextmanager
def naming(path: pathlib.Path) -> Iterator[None]:
    """Adds the name `path` to an OSError that lacks one, such as a full disk's.

    NumPy's error for a full disk has only a message, and becomes an input/output error.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        reason = error.strerror or str(error)
        raise OSError(error.errno or errno.EIO, reason, str(path)) from error
