"""The dtypes that arguments and results may have."""

import jax
import ml_dtypes  # noqa: F401  (it registers the name bfloat16 with NumPy)
import numpy as np

from lingvo_gshard.spmd.specs import Named

_NARROW = (
    *("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32"),
    *("float16", "bfloat16", "float32", "complex64"),
)
_WIDE = ("int64", "uint64", "float64", "complex128")
# A TPU's compiler aborts the process when it meets one of these.
_LACKING = {"tpu": ("complex128",)}


def check(program_name: str, kind: str, leaves: Named, platform: str | None = None) -> None:
    """Refuses dtypes that JAX would narrow silently or that `platform` lacks.

    Args:
      program_name, kind: for the message; `kind` is `argument` or `result`.
      leaves: (name, spec) pairs.
      platform: the devices' platform, such as `cpu`; None if there are no devices yet.

    Raises:
      ValueError: a dtype is unknown, has 64 bits while JAX's 64-bit types are off, or is one that
        the platform lacks.
    """
    for name, spec in leaves:
        which = f"{program_name}: {kind} {name} {list(spec.shape)} is of dtype {spec.dtype}"
        if spec.dtype not in (*_NARROW, *_WIDE):
            raise ValueError(f"{which}; expected one of {', '.join((*_NARROW, *_WIDE))}.")
        if np.dtype(spec.dtype) != jax.dtypes.canonicalize_dtype(spec.dtype):
            raise ValueError(
                f"{which}, but JAX's 64-bit types are off: cast it to a narrower one, or set "
                "JAX_ENABLE_X64=1."
            )
        if spec.dtype in _LACKING.get(platform or "", ()):
            raise ValueError(f"{which}, which a {platform} lacks.")
