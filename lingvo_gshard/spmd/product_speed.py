"""Measures in which dtype this machine multiplies faster: float32, or factors rounded to bfloat16.

A CPU may have instructions for bfloat16 and still lose with them what rounding and copying take, so
its description does not decide.

B rows, M model dim, H hidden dim.
"""

import functools
import json
import logging
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from xla_spmd.files import atomic_file
from xla_spmd.runtime import environment

_FILE = "product_dtypes.json"
# A rounded factor is less exact, so rounding must save at least this share of the time.
_LEAST_GAIN = 0.05
_ROWS = 2048  # More rows take longer, and are multiplied at the same rate.
_HIDDEN_PER_MODEL_DIM = 4
_ROUNDS = 8


def fastest_dtype(model_dim: int) -> str:
    """Returns `float32` or `bfloat16`, whichever takes less time for a layer and its gradients.

    The layer is a feed-forward layer of this M, with H = 4 M. It is measured once on a machine of
    this kind, which takes a fraction of a second, and the result is kept beside the compiled
    programs.
    """
    file = _kept_file()
    kept = _read(file)
    key = f"M={model_dim}, {environment.num_cores()} cores, JAX {jax.__version__}"
    if key not in kept:
        kept[key] = _measure(model_dim)
        if file is not None:
            _write(file, kept)
    return kept[key]


def _kept_file() -> pathlib.Path | None:
    folder = environment.machine_cache_folder()
    return None if folder is None else folder / _FILE


def _read(file: pathlib.Path | None) -> dict[str, str]:
    """Returns the kept results; none of them if the file is missing or damaged."""
    try:
        kept = json.loads(file.read_bytes()) if file is not None else {}
    except (OSError, ValueError):
        return {}
    is_whole = isinstance(kept, dict) and set(kept.values()) <= {"float32", "bfloat16"}
    return kept if is_whole else {}


def _write(file: pathlib.Path, kept: dict[str, str]) -> None:
    """Writes the results; on a full disk or in a read-only home, the next start measures again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file.replacing(file, is_shared=True) as partial:
            partial.write_text(json.dumps(kept, indent=2))
    except OSError as error:
        logging.warning("The faster dtype of products is not kept: %s", error)


def _measure(model_dim: int) -> str:
    hidden_dim = _HIDDEN_PER_MODEL_DIM * model_dim
    x_BM = jnp.ones((_ROWS, model_dim))
    weights = (jnp.ones((model_dim, hidden_dim)), jnp.ones((hidden_dim, model_dim)))
    steps = {}
    for dtype in ("float32", "bfloat16"):
        gradients = jax.jit(jax.grad(functools.partial(_loss, dtype=dtype), argnums=(0, 1)))
        steps[dtype] = gradients.lower(weights, x_BM).compile()

    # They take turns, so that other programs on this machine disturb both alike.
    best_secs = dict.fromkeys(steps, float("inf"))
    for _ in range(_ROUNDS):
        for dtype, step in steps.items():
            best_secs[dtype] = min(best_secs[dtype], _secs(step, weights, x_BM))

    is_faster = best_secs["bfloat16"] < (1 - _LEAST_GAIN) * best_secs["float32"]
    return "bfloat16" if is_faster else "float32"


def _loss(weights: tuple[jax.Array, jax.Array], x_BM: jax.Array, dtype: str) -> jax.Array:
    """Returns the sum of the squared outputs of a feed-forward layer."""
    weight_MH, weight_HM = weights
    hidden_BH = jax.nn.relu(_product(x_BM, weight_MH, dtype))
    return jnp.square(_product(hidden_BH, weight_HM, dtype)).sum()


def _product(a: jax.Array, b: jax.Array, dtype: str) -> jax.Array:
    return jnp.dot(a.astype(dtype), b.astype(dtype), preferred_element_type=jnp.float32)


def _secs(step: Callable[..., Any], *args: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(step(*args))
    return time.perf_counter() - start
