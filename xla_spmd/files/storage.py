"""Folders in buckets, gs://BUCKET/FOLDER and s3://BUCKET/FOLDER, and local copies of them.

Libraries map files into memory, append to them and rename them; in a bucket, a file appears whole
or not at all. Programs therefore work in a local copy of a folder, and `publish` writes the changes
to the bucket. Files of prepared data, which never change, are kept in CACHE/files under their
SHA-256. CACHE is the folder that LINGVO_GSHARD_BUCKET_CACHE names, by default
~/.cache/lingvo_gshard/buckets.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import itertools
import logging
import os
import pathlib
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from xla_spmd import checks
from xla_spmd.files import atomic_file

_PACKAGES = {"gs://": "gcsfs", "s3://": "s3fs"}
_CACHE = "LINGVO_GSHARD_BUCKET_CACHE"
_THREADS = 16
os.environ.setdefault("EPATH_USE_TF", "0")  # TensorFlow's wheels cannot open buckets.
# Files that only this machine needs.
_UNPUBLISHED = re.compile(r"(.*/)?(\.unfinished/.*|.*\.partial|.*\.lock|.*orbax-checkpoint-tmp.*)")
# Checkpoints, which Orbax itself reads from and writes to gs://.
_ORBAX = re.compile(r"(damaged_)?checkpoints/\d.*")
# A path on disk, or a URL in a bucket.
_Path = str | os.PathLike[str]


def is_bucket(name: _Path) -> bool:
    """Returns whether a path is in a bucket."""
    return str(name).startswith(tuple(_PACKAGES))


def path(name: _Path) -> Any:
    """Returns a pathlib.Path or, in a bucket, an epath.Path.

    Raises ValueError if the bucket's package is missing, or if a name in a bucket has wildcards.
    """
    if not is_bucket(name):
        return pathlib.Path(name)

    # fsspec would list, rename and delete every file that matches the pattern.
    wildcards = sorted(set("*?[").intersection(str(name)))
    if wildcards:
        raise ValueError(
            f"{name}: in buckets, names with {' or '.join(wildcards)} are patterns; choose a name "
            "without *, ? and [."
        )

    scheme = str(name)[:5]
    package = _PACKAGES[scheme]
    extra = package.removesuffix("fs")  # Also fsspec's name of the package.
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{name} needs {package}: pip install 'lingvo_gshard[{extra}]'."
        ) from error

    # The raised error describes the failure in one line; the package would log tracebacks before.
    logger = logging.getLogger(package)
    if logger.level == logging.NOTSET and not logging.root.isEnabledFor(logging.DEBUG):
        logger.setLevel(logging.CRITICAL)

    # Other machines may write while this one reads.
    importlib.import_module("fsspec.config").conf[extra] = {"use_listings_cache": False}
    return importlib.import_module("etils.epath").Path(name)


def expanded(name: _Path, what: str = "a path") -> str:
    """Returns a path with the home folder in place of a `~` or `~user` at its beginning.

    Raises ValueError, which begins with `what`, if it is not a path; and if there is no such home
    folder: a folder called `~` is never meant.
    """
    checks.check_type(what, name, (str, os.PathLike), "a str or a pathlib.Path")
    path = os.fspath(name)
    if is_bucket(path) or not path.startswith("~"):
        return path

    found = os.path.expanduser(path)
    if found == path:
        user = path.partition("/")[0]
        raise ValueError(
            f"{path}: {user} has no home folder here; for a file of that name, ./{path}."
        )
    return found


def check_writable(folder: _Path) -> None:
    """Raises ValueError if this disk cannot hold a folder, because a file or a right is in the way.

    The folder need not exist: the nearest one above it counts.
    """
    if is_bucket(folder):
        return
    path = pathlib.Path(folder).absolute()
    nearest = next(part for part in (path, *path.parents) if part.exists())
    if not nearest.is_dir():
        raise ValueError(f"{nearest} is a file; a folder is expected.")
    if not os.access(nearest, os.W_OK):
        raise ValueError(f"{nearest} cannot be written by this user; choose another folder.")


def check_file_writable(what: str, file: _Path) -> None:
    """Raises ValueError, which begins with `what`, if this disk cannot hold a file, new or not.

    A folder or a device may be in its place, and its own folder has to exist.
    """
    if is_bucket(file):
        return
    path = pathlib.Path(file)
    if path.exists() and not path.is_file():
        raise ValueError(f"{what}={path}: expected a regular file.")
    if not path.parent.is_dir():
        raise ValueError(f"{what}={path}: expected a file in a folder that exists.")
    check_writable(path.parent)


def absolute(name: _Path) -> str:
    """Returns a path for the record: it names the same file from every working folder."""
    return str(name) if is_bucket(name) else os.path.abspath(name)


def size_bytes(file: _Path) -> int:
    """Returns the size of a file."""
    return path(file).stat().length if is_bucket(file) else os.stat(file).st_size


def modified(file: _Path) -> float:
    """Returns the time of a file's last change, in seconds since 1970."""
    return path(file).stat().mtime if is_bucket(file) else os.stat(file).st_mtime


def cached(folder: _Path, name: str, sha256: str) -> pathlib.Path:
    """Returns the local path of a file that never changes, `folder/name`.

    A file in a bucket is copied when it is first needed. Raises OSError if it cannot be read, and
    ValueError if its SHA-256 differs.
    """
    if not is_bucket(folder):
        return pathlib.Path(folder, name)

    # Equal files of several folders are copied only once.
    copy = _cache() / "files" / sha256[:2] / sha256
    if not copy.exists():
        _announce(str(folder))
        with _copying(path(folder) / name, copy) as partial, partial.open("rb") as file:
            copied = hashlib.file_digest(file, "sha256").hexdigest()
            if copied != sha256:
                raise ValueError(f"{folder}/{name} has SHA-256 {copied}, expected {sha256}.")
    return copy


@contextlib.contextmanager
def working(folder: _Path, keep: bool = False) -> Iterator[pathlib.Path]:
    """Yields a folder on disk to work in: `folder`, or a local copy of a folder in a bucket.

    A copy is published and deleted at the end, even if the block raises; a copy that contains
    `.unfinished` is not deleted. With `keep`, the copy is in the cache, so that the next call finds
    the files that a killed program left behind. A ValueError or OSError of the block names the
    folder in the bucket instead of the copy.

    Raises OSError, which names the file, if the bucket cannot be read or written. If it cannot be
    written, the copy stays, and the error names the copy as well.
    """
    if not is_bucket(folder):
        yield pathlib.Path(folder)
        return

    # With `keep`, the folder's name determines where the copy is.
    source = path(folder)
    if keep:
        digest = hashlib.sha256(str(folder).encode()).hexdigest()
        here = _cache() / "kept" / digest[:16]
        here.mkdir(parents=True, exist_ok=True)
    else:
        here = pathlib.Path(tempfile.mkdtemp())
    copy = _Copy(source, here)

    _copies[here] = copy
    try:
        # An unreadable bucket is reported before the work begins, so that no results are lost.
        try:
            copy.fetch()
        except BaseException:
            if not keep:
                shutil.rmtree(here)
            raise

        # A failing block's files are published, too: a run continues from them.
        try:
            yield here
        except (ValueError, OSError) as error:
            error.args = tuple(_renamed(arg, here, folder) for arg in error.args)
            raise
        finally:
            copy.publish()
            if not (here / ".unfinished").exists():
                shutil.rmtree(here)
    finally:
        del _copies[here]


def _renamed(argument: Any, here: pathlib.Path, folder: _Path) -> Any:
    """Returns an error's argument; in a message, the folder's name replaces the copy's path."""
    if isinstance(argument, str):
        return argument.replace(str(here), str(folder))
    return argument


def publish(folder: _Path) -> None:
    """Writes the changes in the local copy that contains `folder`, if any, to its bucket."""
    copy = _copy_of(folder)
    if copy:
        copy.publish()


def origin(folder: _Path) -> Any:
    """Returns the bucket's path for a path in a local copy; any other path is returned itself."""
    copy = _copy_of(folder)
    if not copy:
        return path(folder)
    return copy.source / pathlib.Path(folder).relative_to(copy.here)


@contextlib.contextmanager
def errors(name: Any, done: str) -> Iterator[None]:
    """Turns the many errors of buckets' libraries into a one-line OSError that names the file.

    `done` is the past participle of the attempt, such as "read". A ValueError, which is a user's
    mistake, stays as it is.
    """
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or repr(error)
        raise OSError(f"{name} cannot be {done} ({reason}).") from error


def in_threads(
    do: Callable[[Any], None], arguments: Iterable[Any], num_threads: int = _THREADS
) -> None:
    """Calls `do` with each of the arguments, in threads; raises any error that `do` raises."""
    with ThreadPoolExecutor(num_threads) as threads:
        for _ in threads.map(do, arguments):
            pass


@dataclasses.dataclass
class _Copy:
    """A local copy `here` of the folder `source` in a bucket."""

    source: Any  # An epath.Path.
    here: pathlib.Path
    # The files that are equal here and in the bucket, with the time of their last change here.
    same: dict[str, int] = dataclasses.field(default_factory=dict)

    def fetch(self) -> None:
        """Copies the files that are not here yet, except for checkpoints in gs://."""
        with errors(self.source, "read"):
            files, root = self._files()
            names = [name.removeprefix(f"{root}/") for name in files.find(root)]

        # Without names, the folder is new, or was deleted in the bucket since the copy was made.
        if not names:
            shutil.rmtree(self.here)
            self.here.mkdir()

        if str(self.source).startswith("gs://"):
            names = [name for name in names if not _ORBAX.fullmatch(name)]
        missing = [name for name in names if not (self.here / name).exists()]
        in_threads(self._get, missing)

    def publish(self) -> None:
        """Writes the files that were written here since the last call, then deletes the deleted.

        A file that names others, such as a manifest, is in a folder above them or is written after
        them. So that the bucket never has a file that names a missing one, the deepest folders come
        first, and the files of the outermost folder are written one by one, in the order of their
        changes. Deletions go in the opposite order.
        """
        times = self._modification_times()
        changed = [name for name, time in times.items() if self.same.get(name) != time]
        changed.sort(key=lambda name: (-_depth(name), times[name]))

        for depth, names in itertools.groupby(changed, key=_depth):
            num_threads = _THREADS if depth > 0 else 1
            in_threads(functools.partial(self._put, times), names, num_threads)

        deleted = self.same.keys() - times.keys()
        for name in sorted(deleted, key=_depth):
            self._remove(name)

    def _modification_times(self) -> dict[str, int]:
        """Returns the time of the last change, in ns, of each file here that can be published."""
        times: dict[str, int] = {}
        # Unlike rglob, os.walk continues if Orbax renames a folder meanwhile.
        for folder, _, names in os.walk(self.here):
            for name in names:
                file = pathlib.Path(folder, name)
                relative = str(file.relative_to(self.here))
                if not _UNPUBLISHED.fullmatch(relative):
                    times[relative] = file.stat().st_mtime_ns
        return times

    def _get(self, name: str) -> None:
        with _copying(self.source / name, self.here / name):
            pass
        self.same[name] = (self.here / name).stat().st_mtime_ns

    def _put(self, times: dict[str, int], name: str) -> None:
        with errors(self.source / name, f"written; it is in {self.here}"):
            files, root = self._files()
            files.put_file(str(self.here / name), f"{root}/{name}")
        self.same[name] = times[name]

    def _remove(self, name: str) -> None:
        with errors(self.source / name, "deleted"):
            (self.source / name).unlink(missing_ok=True)
        del self.same[name]

    def _files(self) -> tuple[Any, str]:
        """Returns fsspec's file system of the bucket, and the folder's path in it."""
        return importlib.import_module("fsspec.core").url_to_fs(str(self.source))


# The copies in which the program works, by their folder.
_copies: dict[pathlib.Path, _Copy] = {}


def _copy_of(folder: _Path) -> _Copy | None:
    """Returns the copy that contains `folder`, or None."""
    inner = pathlib.Path(folder)
    for candidate in (inner, *inner.parents):
        if candidate in _copies:
            return _copies[candidate]
    return None


@contextlib.contextmanager
def _copying(source: Any, target: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a copy of a file in a bucket, which becomes `target` if the block succeeds."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file.replacing(target, is_shared=True) as partial:
        with errors(source, "read"):
            source.copy(partial)
        yield partial


def _depth(name: str) -> int:
    return name.count("/")


def in_home(name: str) -> pathlib.Path | None:
    """Returns the absolute path of a name that may begin with `~`; None for a user without a home.

    Such a user, common in containers, has neither HOME nor an entry in the system's user list.
    """
    try:
        return pathlib.Path(name).expanduser().absolute()
    except RuntimeError:
        return None


def _cache() -> pathlib.Path:
    folder = in_home(os.environ.get(_CACHE, "~/.cache/lingvo_gshard/buckets"))
    if folder is None:
        raise ValueError(f"copies of files in buckets need a folder: set HOME or {_CACHE}.")
    return folder


@functools.cache
def _announce(folder: str) -> None:
    """Prints, once for each folder, where its files are copied to."""
    print(f"{folder}: its files are copied to {_cache()} when they are needed.", file=sys.stderr)
