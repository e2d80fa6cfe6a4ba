"""GShard on XLA's SPMD partitioner: annotated layers, MoE Transformers, flat beam search.

The names below are the library's public interface; each is imported when it is first used, and
TensorFlow when one of them first computes.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lingvo_gshard.core.nested_map import NestedMap as NestedMap
    from lingvo_gshard.sharding.annotate import replicate as replicate
    from lingvo_gshard.sharding.annotate import shard as shard
    from lingvo_gshard.sharding.annotate import split as split
    from lingvo_gshard.sharding.annotator import Annotator as Annotator
    from lingvo_gshard.sharding.layout import Partitioning as Partitioning
    from lingvo_gshard.sharding.layout import TensorSpec as TensorSpec
    from lingvo_gshard.sharding.mesh import Mesh as Mesh
    from lingvo_gshard.sharding.partial import Partial as Partial
    from lingvo_gshard.sharding.states import einsum_state as einsum_state
    from lingvo_gshard.sharding.windows import convolution as convolution
    from lingvo_gshard.sharding.windows import max_pool as max_pool
    from lingvo_gshard.spmd.annotated_fn import AnnotatedFn as AnnotatedFn
    from lingvo_gshard.spmd.annotations import describe as describe
    from lingvo_gshard.spmd.environment import prepare as prepare
    from lingvo_gshard.spmd.executable import compile_program as compile_program
    from lingvo_gshard.spmd.lowering import export as export
    from lingvo_gshard.train.estimator import TPUEstimator as TPUEstimator

# Where each name is defined. A type checker reads the imports above, Python reads this.
_HOMES = {
    "AnnotatedFn": "spmd.annotated_fn",
    "Annotator": "sharding.annotator",
    "Mesh": "sharding.mesh",
    "NestedMap": "core.nested_map",
    "Partial": "sharding.partial",
    "Partitioning": "sharding.layout",
    "TPUEstimator": "train.estimator",
    "TensorSpec": "sharding.layout",
    "compile_program": "spmd.executable",
    "convolution": "sharding.windows",
    "describe": "spmd.annotations",
    "einsum_state": "sharding.states",
    "export": "spmd.lowering",
    "max_pool": "sharding.windows",
    "prepare": "spmd.environment",
    "replicate": "sharding.annotate",
    "shard": "sharding.annotate",
    "split": "sharding.annotate",
}

__all__ = sorted(_HOMES)

# pip refuses another Python; this is for a checkout, and for a bundle's copy.
if not (3, 11) <= sys.version_info[:2] <= (3, 13):
    _MESSAGE = (
        "lingvo_gshard needs Python 3.11 to 3.13 (3.14 as soon as TensorFlow has a release for "
        f"it), and this is {sys.version_info[0]}.{sys.version_info[1]}; `make setup` in a checkout "
        "finds or installs one."
    )
    if sys.argv[:1] == ["-m"]:  # `python -m` imports this before the program.
        sys.exit(_MESSAGE)
    raise ImportError(_MESSAGE)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    # The environment must be as TensorFlow and JAX need it before either is imported.
    importlib.import_module(f"{__name__}.spmd.environment").prepare()

    # The wheel by itself has not the packages of all names.
    try:
        home = importlib.import_module(f"{__name__}.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        advice = importlib.import_module(f"{__name__}.spmd.versions").advice(error)
        if advice is None:
            raise
        raise ImportError(f"{__name__}.{name}: {advice}") from error

    # Once set, the name is found without this function.
    value = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
