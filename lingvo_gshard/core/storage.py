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
import os
import pathlib
import re
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lingvo_gshard.core import atomic_file

_PACKAGES = {"gs": "gcsfs", "s3": "s3fs"}
_CACHE = "LINGVO_GSHARD_BUCKET_CACHE"
_THREADS = 16
os.environ.setdefault("EPATH_USE_TF", "0")  # TensorFlow's wheels cannot open buckets.
# Files of this machine alone; and checkpoints, which Orbax reads and writes in gs:// itself.
_UNPUBLISHED = re.compile(r"(.*/)?(\.unfinished/.*|.*\.partial|.*\.lock|.*orbax-checkpoint-tmp.*)")
_ORBAX = re.compile(r"(damaged_)?checkpoints/\d.*")


def is_bucket(folder: str | os.PathLike[str]) -> bool:
    """Returns whether a path is that of a bucket, or within one."""
    return str(folder).startswith(tuple(f"{scheme}://" for scheme in _PACKAGES))


def path(given: str | os.PathLike[str]) -> Any:
    """Returns a pathlib.Path, or an epath.Path, which is like it, of what is in a bucket.

    Raises ValueError if the bucket's package is not installed.
    """
    if not is_bucket(given):
        return pathlib.Path(given)
    package = _PACKAGES[str(given)[:2]]
    extra = package.removesuffix("fs")  # Also what fsspec calls it.
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ValueError(f"{given}: pip install 'lingvo_gshard[{extra}]'.") from error
    # Other machines may write while this one reads.
    config = importlib.import_module("fsspec.config").conf.setdefault(extra, {})
    config.setdefault("use_listings_cache", False)
    return importlib.import_module("etils.epath").Path(given)


def cached(folder: str | os.PathLike[str], name: str, sha256: str) -> pathlib.Path:
    """Returns the local path of a file that never changes; copies one in a bucket at first.

    Raises OSError if it cannot be read, and ValueError if it is not of this SHA-256.
    """
    if not is_bucket(folder):
        return pathlib.Path(folder, name)
    here = _cache() / "files" / sha256[:2] / sha256
    if not here.exists():
        _announce(str(folder), str(here.parents[1]))
        here.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file.replacing(here, f".{uuid.uuid4().hex}.partial") as partial:
            with errors(path(folder) / name, "read"):
                (path(folder) / name).copy(partial)
            with partial.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != sha256:
                raise ValueError(f"{folder}/{name} has SHA-256 {found}, expected {sha256}")
    return here


@contextlib.contextmanager
def working(folder: str | os.PathLike[str], keep: bool = False) -> Iterator[pathlib.Path]:
    """Yields a local copy of a bucket's folder and publishes it at the end; else the folder itself.

    Also publishes if the block raises. With `keep`, the copy has a lasting place: what a killed
    program left there is there again. Raises OSError, which names the file and the copy, if the
    bucket cannot be read or written; the copy then stays.
    """
    if not is_bucket(folder):
        yield pathlib.Path(folder)
        return
    digest = hashlib.sha256(str(folder).encode()).hexdigest()
    here = _cache() / "kept" / digest[:16] if keep else pathlib.Path(tempfile.mkdtemp())
    here.mkdir(parents=True, exist_ok=True)
    _copies[here] = copy = _Copy(path(folder), here)
    try:
        copy.fetch()
        try:
            yield here
        except (ValueError, OSError) as error:
            texts = (
                x.replace(str(here), str(folder)) if isinstance(x, str) else x for x in error.args
            )
            error.args = tuple(texts)
            raise
        finally:
            copy.publish()
            if not (here / ".unfinished").exists():
                shutil.rmtree(here)
    finally:
        del _copies[here]


def publish(folder: str | os.PathLike[str]) -> None:
    """Writes what was changed in the local copy that contains `folder`, if any, to its bucket."""
    if copy := _copy_of(folder):
        copy.publish()


def origin(folder: str | os.PathLike[str]) -> Any:
    """Returns the path in the bucket that a path in a local copy stands for; else that path."""
    copy = _copy_of(folder)
    return copy.source / pathlib.Path(folder).relative_to(copy.here) if copy else path(folder)


def for_orbax(folder: str | os.PathLike[str]) -> Any:
    """Returns an epath.Path of a folder of checkpoints, which Orbax writes in gs:// itself."""
    source = origin(folder)
    there = source if _is_direct(source) else os.path.abspath(folder)
    return importlib.import_module("etils.epath").Path(there)


def modified(file: str | os.PathLike[str]) -> float:
    """Returns the time of a file's last change, in seconds."""
    return path(file).stat().mtime if is_bucket(file) else os.stat(file).st_mtime


@dataclasses.dataclass
class _Copy:
    """A local copy; `same` has the time of each file's last change that the bucket has."""

    source: Any
    here: pathlib.Path
    same: dict[str, int] = dataclasses.field(default_factory=dict)

    def fetch(self) -> None:
        """Copies the files that are not here yet."""
        with errors(self.source, "read"):
            files, root = self._files()
            names = [name.removeprefix(f"{root}/") for name in files.find(root)]
        if _is_direct(self.source):
            names = [name for name in names if not _ORBAX.fullmatch(name)]
        self._for_each(self._get, [name for name in names if not (self.here / name).exists()])

    def publish(self) -> None:
        """Writes and deletes what was written and deleted here since the last time.

        A folder's files come before those of the folders above it, and its newest file comes last.
        What is deleted comes in the opposite order.
        """
        times = self._times()
        changed = {name: time for name, time in times.items() if self.same.get(name) != time}
        for some in _in_order(changed):
            self._for_each(functools.partial(self._put, times), some)
        gone = {name: time for name, time in self.same.items() if name not in times}
        for some in reversed(list(_in_order(gone))):
            self._for_each(self._remove, some)

    def _times(self) -> dict[str, int]:
        # Unlike rglob, os.walk goes on if Orbax renames a folder meanwhile.
        found = (
            pathlib.Path(root, name) for root, _, names in os.walk(self.here) for name in names
        )
        names = {str(file.relative_to(self.here)): file for file in found}
        return {n: f.stat().st_mtime_ns for n, f in names.items() if not _UNPUBLISHED.fullmatch(n)}

    def _for_each(self, do: Any, names: Iterable[str]) -> None:
        with ThreadPoolExecutor(_THREADS) as threads:
            for _ in threads.map(do, names):
                pass

    def _get(self, name: str) -> None:
        target = self.here / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with errors(self.source / name, "read"), atomic_file.replacing(target) as partial:
            (self.source / name).copy(partial)
        self.same[name] = target.stat().st_mtime_ns

    def _put(self, times: Mapping[str, int], name: str) -> None:
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


def _copy_of(folder: str | os.PathLike[str]) -> _Copy | None:
    within = pathlib.Path(folder)
    return next((_copies[each] for each in (within, *within.parents) if each in _copies), None)


def _in_order(times: Mapping[str, int]) -> Iterator[list[str]]:
    """Yields the names in groups, whose order is that of `publish`."""
    by_depth: dict[int, dict[str, list[str]]] = {}
    for name in sorted(times, key=times.__getitem__):
        parent = str(pathlib.Path(name).parent)
        by_depth.setdefault(name.count("/"), {}).setdefault(parent, []).append(name)
    for _, folders in sorted(by_depth.items(), reverse=True):
        yield [name for names in folders.values() for name in names[:-1]]
        yield [names[-1] for names in folders.values()]


def _is_direct(folder: Any) -> bool:
    return str(folder).startswith("gs://")


def _cache() -> pathlib.Path:
    return pathlib.Path(os.environ.get(_CACHE, "~/.cache/lingvo_gshard/buckets")).expanduser()


@functools.cache
def _announce(folder: str, here: str) -> None:
    print(f"{folder}: copying its files to {here} when they are first read.", file=sys.stderr)


@contextlib.contextmanager
def errors(name: Any, done: str) -> Iterator[None]:
    """Raises OSError, one line that names the file, for the many errors of buckets' libraries.

    ValueErrors, which are those of a user, stay as they are.
    """
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or repr(error)
        raise OSError(f"{name} cannot be {done} ({reason}).") from error
