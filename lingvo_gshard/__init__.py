"""GShard on XLA's SPMD partitioner: annotated layers, MoE Transformers, flat beam search.

    import lingvo_gshard as gshard

    experiment = gshard.experiment("toy.MoE8E4L", data_dir="DATA", logdir="RUN")
    experiment.train()

The names below are the library's public interface; each is imported when it is first used, and
TensorFlow when one of them first computes.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from lingvo_gshard.api.experiment import experiment as experiment
    from lingvo_gshard.api.experiment import models as models
    from lingvo_gshard.api.loading import load as load
    from lingvo_gshard.api.plans import plan as plan
    from lingvo_gshard.core.nested_map import NestedMap as NestedMap
    from lingvo_gshard.sharding.annotate import replicate as replicate
    from lingvo_gshard.sharding.annotate import shard as shard
    from lingvo_gshard.sharding.annotate import split as split
    from lingvo_gshard.sharding.annotator import Annotator as Annotator
    from lingvo_gshard.sharding.layout import Partitioning as Partitioning
    from lingvo_gshard.sharding.layout import TensorSpec as TensorSpec
    from lingvo_gshard.sharding.partial import Partial as Partial
    from lingvo_gshard.sharding.states import einsum_state as einsum_state
    from lingvo_gshard.sharding.windows import convolution as convolution
    from lingvo_gshard.sharding.windows import max_pool as max_pool
    from lingvo_gshard.spmd.annotated_fn import AnnotatedFn as AnnotatedFn
    from lingvo_gshard.spmd.annotations import describe as describe
    from lingvo_gshard.spmd.executable import compile_program as compile_program
    from lingvo_gshard.spmd.lowering import export as export
    from lingvo_gshard.train.estimator import TPUEstimator as TPUEstimator
    from xla_spmd.mesh import Mesh as Mesh
    from xla_spmd.runtime.environment import prepare as prepare

# Where each name is defined. A type checker reads the imports above, Python reads this.
_HOMES = {
    "AnnotatedFn": "lingvo_gshard.spmd.annotated_fn",
    "Annotator": "lingvo_gshard.sharding.annotator",
    "Mesh": "xla_spmd.mesh",
    "NestedMap": "lingvo_gshard.core.nested_map",
    "Partial": "lingvo_gshard.sharding.partial",
    "Partitioning": "lingvo_gshard.sharding.layout",
    "TPUEstimator": "lingvo_gshard.train.estimator",
    "TensorSpec": "lingvo_gshard.sharding.layout",
    "compile_program": "lingvo_gshard.spmd.executable",
    "convolution": "lingvo_gshard.sharding.windows",
    "describe": "lingvo_gshard.spmd.annotations",
    "einsum_state": "lingvo_gshard.sharding.states",
    "experiment": "lingvo_gshard.api.experiment",
    "export": "lingvo_gshard.spmd.lowering",
    "load": "lingvo_gshard.api.loading",
    "max_pool": "lingvo_gshard.sharding.windows",
    "models": "lingvo_gshard.api.experiment",
    "plan": "lingvo_gshard.api.plans",
    "prepare": "xla_spmd.runtime.environment",
    "replicate": "lingvo_gshard.sharding.annotate",
    "shard": "lingvo_gshard.sharding.annotate",
    "split": "lingvo_gshard.sharding.annotate",
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
        # Python suggests the nearest name of the module.
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message, name=name, obj=sys.modules[__name__])

    # The environment must be as TensorFlow and JAX need it before either is imported.
    importlib.import_module("xla_spmd.runtime.environment").prepare()

    # The wheel by itself has not the packages of all names.
    try:
        home = importlib.import_module(_HOMES[name])
    except ModuleNotFoundError as error:
        advice = importlib.import_module("xla_spmd.runtime.versions").advice(error)
        if advice is None:
            raise
        raise ImportError(f"{__name__}.{name}: {advice}") from error

    # Once set, the name is found without this function.
    value = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
