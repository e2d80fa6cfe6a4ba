"""Folders in buckets, gs://BUCKET/FOLDER and s3://BUCKET/FOLDER, and the local copies of them.

Libraries map files, append to them and rename them; in a bucket, a file appears whole or not at
all. So a program works in a local copy of a folder, and `publish` writes what has changed to the
bucket. Files of prepared data, which never change, are kept in CACHE/files under their SHA-256.
CACHE is ~/.cache/lingvo_gshard/buckets, or the folder that LINGVO_GSHARD_BUCKET_CACHE names.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import itertools
import os
import pathlib
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lingvo_gshard.files import atomic_file

_PACKAGES = {"gs://": "gcsfs", "s3://": "s3fs"}
_CACHE = "LINGVO_GSHARD_BUCKET_CACHE"
_THREADS = 16
os.environ.setdefault("EPATH_USE_TF", "0")  # TensorFlow's wheels cannot open buckets.
# Files of this machine alone; and checkpoints, which Orbax reads and writes in gs:// itself.
_UNPUBLISHED = re.compile(r"(.*/)?(\.unfinished/.*|.*\.partial|.*\.lock|.*orbax-checkpoint-tmp.*)")
_ORBAX = re.compile(r"(damaged_)?checkpoints/\d.*")
_Given = str | os.PathLike[str]


def is_bucket(given: _Given) -> bool:
    """Returns whether a path is one in a bucket."""
    return str(given).startswith(tuple(_PACKAGES))


def path(given: _Given) -> Any:
    """Returns a pathlib.Path or, in a bucket, an epath.Path; ValueError without its package."""
    if not is_bucket(given):
        return pathlib.Path(given)
    package = _PACKAGES[str(given)[:5]]
    extra = package.removesuffix("fs")  # Also what fsspec calls it.
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{given} needs {package}: pip install 'lingvo_gshard[{extra}]'."
        ) from error
    # Other machines may write while this one reads.
    importlib.import_module("fsspec.config").conf[extra] = {"use_listings_cache": False}
    return importlib.import_module("etils.epath").Path(given)


def size_bytes(file: _Given) -> int:
    """Returns the size of a file."""
    return path(file).stat().length if is_bucket(file) else os.stat(file).st_size


def modified(file: _Given) -> float:
    """Returns the time of a file's last change, in seconds."""
    return path(file).stat().mtime if is_bucket(file) else os.stat(file).st_mtime


def cached(folder: _Given, name: str, sha256: str) -> pathlib.Path:
    """Returns the local path of a file that never changes; one in a bucket is copied at first.

    Raises OSError if it cannot be read, and ValueError if it is not of this SHA-256.
    """
    if not is_bucket(folder):
        return pathlib.Path(folder, name)
    here = _cache() / "files" / sha256[:2] / sha256
    if not here.exists():
        _announce(str(folder))
        with _copying(path(folder) / name, here) as partial, partial.open("rb") as file:
            if (found := hashlib.file_digest(file, "sha256").hexdigest()) != sha256:
                raise ValueError(f"{folder}/{name} has SHA-256 {found}, expected {sha256}.")
    return here


@contextlib.contextmanager
def working(folder: _Given, keep: bool = False) -> Iterator[pathlib.Path]:
    """Yields a local copy of a bucket's folder, to be published at the end; else the folder itself.

    Also publishes if the block raises. With `keep`, what a killed program left in the copy is there
    again. Raises OSError, which names the file, if the bucket cannot be read or written; in the
    latter case the copy, which it names, stays.
    """
    if not is_bucket(folder):
        yield pathlib.Path(folder)
        return
    digest = hashlib.sha256(str(folder).encode()).hexdigest()
    here = _cache() / "kept" / digest[:16] if keep else pathlib.Path(tempfile.mkdtemp())
    here.mkdir(parents=True, exist_ok=True)
    _copies[here] = copy = _Copy(path(folder), here)
    try:
        try:
            copy.fetch()
        except BaseException:
            if not keep:
                shutil.rmtree(here)
            raise
        try:
            yield here
        except (ValueError, OSError) as error:
            error.args = tuple(
                arg.replace(str(here), str(folder)) if isinstance(arg, str) else arg
                for arg in error.args
            )
            raise
        finally:
            copy.publish()
            if not (here / ".unfinished").exists():
                shutil.rmtree(here)
    finally:
        del _copies[here]


def publish(folder: _Given) -> None:
    """Writes what was changed in the local copy that contains `folder`, if any, to its bucket."""
    if copy := _copy_of(folder):
        copy.publish()


def origin(folder: _Given) -> Any:
    """Returns the path in the bucket that a path in a local copy stands for; else that path."""
    copy = _copy_of(folder)
    return copy.source / pathlib.Path(folder).relative_to(copy.here) if copy else path(folder)


@contextlib.contextmanager
def errors(name: Any, done: str) -> Iterator[None]:
    """Raises OSError, one line that names the file, for the many errors of buckets' libraries.

    A ValueError, which is a user's mistake, stays as it is.
    """
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or repr(error)
        raise OSError(f"{name} cannot be {done} ({reason}).") from error


@dataclasses.dataclass
class _Copy:
    """A local copy; `same` has the time of each file's last change that the bucket has, too."""

    source: Any
    here: pathlib.Path
    same: dict[str, int] = dataclasses.field(default_factory=dict)

    def fetch(self) -> None:
        """Copies the files that are not here yet, but for checkpoints in gs://."""
        with errors(self.source, "read"):
            files, root = self._files()
            names = [name.removeprefix(f"{root}/") for name in files.find(root)]
        if not names:  # The folder is new, or what was kept of it was deleted in the bucket.
            shutil.rmtree(self.here)
            self.here.mkdir()
        if str(self.source).startswith("gs://"):
            names = [name for name in names if not _ORBAX.fullmatch(name)]
        each(self._get, [name for name in names if not (self.here / name).exists()])

    def publish(self) -> None:
        """Writes, then deletes, what was written and deleted here since the last time.

        Files of inner folders come first; those in the folder itself come in the order of their
        last change, one after another. What is deleted comes in the opposite order.
        """
        # Unlike rglob, os.walk goes on if Orbax renames a folder meanwhile.
        found = (
            pathlib.Path(root, name) for root, _, names in os.walk(self.here) for name in names
        )
        names = {str(file.relative_to(self.here)): file for file in found}
        times = {n: f.stat().st_mtime_ns for n, f in names.items() if not _UNPUBLISHED.fullmatch(n)}
        changed = [name for name, time in times.items() if self.same.get(name) != time]
        changed.sort(key=lambda name: (-_depth(name), times[name]))
        for depth, some in itertools.groupby(changed, key=_depth):
            each(functools.partial(self._put, times), some, _THREADS if depth else 1)
        each(self._remove, sorted(self.same.keys() - times.keys(), key=_depth), 1)

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
        return importlib.import_module("fsspec.core").url_to_fs(str(self.source))


_copies: dict[pathlib.Path, _Copy] = {}


def _copy_of(folder: _Given) -> _Copy | None:
    within = pathlib.Path(folder)
    return next((_copies[each] for each in (within, *within.parents) if each in _copies), None)


@contextlib.contextmanager
def _copying(source: Any, target: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a copy of a file in a bucket, which becomes `target` if the block succeeds."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file.replacing(target, is_shared=True) as partial:
        with errors(source, "read"):
            source.copy(partial)
        yield partial


def each(do: Callable[[Any], None], names: Iterable[Any], num_threads: int = _THREADS) -> None:
    """Calls `do` with each of the names, in threads; raises what it raises."""
    with ThreadPoolExecutor(num_threads) as threads:
        for _ in threads.map(do, names):
            pass


def _depth(name: str) -> int:
    return name.count("/")


def _cache() -> pathlib.Path:
    return pathlib.Path(os.environ.get(_CACHE, "~/.cache/lingvo_gshard/buckets")).expanduser()


@functools.cache
def _announce(folder: str) -> None:
    print(f"{folder}: its files are copied to {_cache()} when they are needed.", file=sys.stderr)
