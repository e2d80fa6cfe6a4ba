"""Finds damage to a checkpoint: by digests of its files and by fingerprints of its arrays.

digests.json maps every file to its sha256. Each process first lists the files that it wrote itself,
so that none reads another's arrays; process 0 merges the lists and hashes what is left.

A fingerprint is the sum, modulo 2**32, of a hash of each element's bits and position in an expert.
Sums of parts add up to the sum of the whole, so the devices compute it where the array lies, and
every partitioning gives the same. It detects elements that were changed, moved or lost; it does
not detect forgery.
"""

import functools
import hashlib
import json
import math
import pathlib
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lingvo_gshard.core import atomic_file
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.spmd.executable import ONE_AT_A_TIME

_DIGESTS = "digests.json"
_SEEDS = (0x9E3779B9, 0x7F4A7C15)  # Two independent sums make 64 bits.


class DamagedCheckpointError(ValueError):
    """A checkpoint is not what was written."""


def exist(folder: pathlib.Path) -> bool:
    """Whether the checkpoint in `folder` was written completely."""
    return (folder / _DIGESTS).exists()


def remove(folder: pathlib.Path) -> None:
    """Declares the checkpoint incomplete, so that nobody restores it."""
    (folder / _DIGESTS).unlink(missing_ok=True)


def write_own(folder: pathlib.Path) -> None:
    """Lists the digests of the files that this process wrote, in digests.process_N.json."""
    name = f"process_{jax.process_index()}"
    written = [
        *_files_in(folder / "state" / f"ocdbt.{name}"),
        *_files_in(folder / "state" / "array_metadatas" / name),
    ]
    content = json.dumps(_sha256s(folder, written))
    atomic_file.write(folder / f"digests.{name}.json", content)


def write(folder: pathlib.Path) -> None:
    """Declares the checkpoint complete, once every process has called `write_own`."""
    lists = sorted(folder.glob("digests.process_*.json"))
    files: dict[str, str] = {}
    for path in lists:
        files |= json.loads(path.read_bytes())
    rest = [file for file in _files_in(folder) if _name(folder, file) not in files]
    files |= _sha256s(folder, rest)
    content = {"time": time.time(), "files": files}
    atomic_file.write(folder / _DIGESTS, json.dumps(content, indent=1))
    for path in lists:
        path.unlink()


def time_written(folder: pathlib.Path) -> float:
    """Returns when the checkpoint became complete, in seconds since 1970; 0 if unreadable."""
    try:
        return _read(folder)[0]
    except DamagedCheckpointError:
        return 0.0


def check(folder: pathlib.Path, share: slice = slice(None)) -> None:
    """Checks those of the files, sorted by name, that `share` selects.

    Raises:
      DamagedCheckpointError: names a file that is missing or was changed or added.
    """
    _, written = _read(folder)
    there = {_name(folder, file): file for file in _files_in(folder)}
    names = sorted(written.keys() | there.keys())[share]
    found = _sha256s(folder, [there[name] for name in names if name in there])
    for name in names:
        if written.get(name) != found.get(name):
            what = "is missing" if name not in found else "was changed"
            raise _damaged(folder, f"{name} {what}")


def fingerprints(state: NestedMap, state_spec: NestedMap) -> dict[str, list[str]]:
    """Returns 16 hexadecimal digits for each expert of each array, by dotted path.

    Args:
      state: JAX arrays; all processes must call it.
      state_spec: their TensorSpecs. An array without the dim E counts as one expert.
    """
    found = {}
    for (path, array), spec in zip(state.FlattenItems(), state_spec.Flatten(), strict=True):
        with ONE_AT_A_TIME:
            sums = np.asarray(_program(spec.dims, array.sharding.mesh)(array))
        found[path] = [f"{high:08x}{low:08x}" for high, low in sums.tolist()]
    return found


def check_fingerprints(
    folder: pathlib.Path, written: dict[str, list[str]], found: dict[str, list[str]]
) -> None:
    """Compares the found arrays with what was written; both are results of `fingerprints`.

    Raises:
      DamagedCheckpointError: names the array and the experts that differ.
    """
    for name, experts in found.items():
        pairs = enumerate(zip(written[name], experts, strict=True))
        differing = [i for i, (before, after) in pairs if before != after]
        if differing:
            raise _damaged(folder, f"{name} is not what was saved, in experts {differing}")


def _read(folder: pathlib.Path) -> tuple[float, dict[str, str]]:
    try:
        content = json.loads((folder / _DIGESTS).read_bytes())
        return float(content["time"]), dict(content["files"])
    except (ValueError, TypeError, KeyError):
        raise _damaged(folder, f"{_DIGESTS} is not a list of digests") from None


def _damaged(folder: pathlib.Path, what: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"{folder}: the checkpoint is damaged: {what}.")


def _files_in(folder: pathlib.Path) -> list[pathlib.Path]:
    """All files but the digests themselves."""
    found = folder.rglob("*") if folder.is_dir() else [folder]
    return [path for path in found if path.is_file() and not path.name.startswith("digests.")]


def _name(folder: pathlib.Path, file: pathlib.Path) -> str:
    return str(file.relative_to(folder))


def _sha256s(folder: pathlib.Path, files: Iterable[pathlib.Path]) -> dict[str, str]:
    """sha256 of each file by its name relative to `folder`."""
    names = [_name(folder, file) for file in files]
    with ThreadPoolExecutor() as pool:  # Hashing releases Python's lock.
        return dict(zip(names, pool.map(lambda name: _sha256(folder / name), names), strict=True))


def _sha256(file: pathlib.Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@functools.cache
def _program(dims: str, mesh: Mesh):
    """Compiled once for each shape and sharding, which many arrays of a model share."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.jit(functools.partial(_sums, dims=dims), out_shardings=everywhere)


def _sums(x: jax.Array, dims: str) -> jax.Array:
    """Returns uint32 [E, 2]."""
    by_expert = jnp.moveaxis(x, dims.index("E"), 0) if "E" in dims else x[None]
    unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(by_expert, unsigned).astype(jnp.uint32)
    position = _position(by_expert.shape)
    hashes = [_mixed(bits ^ _mixed(position + jnp.uint32(seed))) for seed in _SEEDS]
    rest = tuple(range(1, by_expert.ndim))
    return jnp.stack([jnp.sum(h, rest, dtype=jnp.uint32) for h in hashes], axis=1)


def _position(shape: tuple[int, ...]) -> jax.Array:
    """Each element's row-major position within its expert, modulo 2**32."""
    position = jnp.zeros(shape, jnp.uint32)
    for axis in range(1, len(shape)):
        stride = math.prod(shape[axis + 1 :]) % 2**32
        position += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
    return position


def _mixed(x: jax.Array) -> jax.Array:
    """MurmurHash3's finalizer: a bijection of 32 bits in which every bit depends on all."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
