"""TensorFlow's RunConfig and TPUConfig, and an input from a tf.data.Dataset.

They fill in `params.train` (train/config.py) and the partitioning, so that a TPUEstimator program
needs neither.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap, nested
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.spmd.specs import ROWS, WHOLE, Share
from lingvo_gshard.train.config import TrainParams
from xla_spmd.mesh import Mesh


@dataclasses.dataclass(frozen=True)
class TPUConfig:
    """Settings of the devices, of any kind."""

    iterations_per_loop: int = 2  # K, training steps in one call of the device program.
    num_shards: int | None = None  # The devices that share the rows; None uses all of them.


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Settings of a run. Except for keep_checkpoint_max, None means train/config.py's default."""

    model_dir: str | None = None
    tf_random_seed: int | None = None
    save_checkpoints_steps: int | None = None
    save_checkpoints_secs: float | None = None
    keep_checkpoint_max: int | None = 5  # None or 0 keeps all, as in TensorFlow.
    keep_checkpoint_every_n_hours: float | None = None
    log_step_count_steps: int = 100
    tpu_config: TPUConfig = TPUConfig()

    def train_params(self) -> TrainParams:
        """Returns the settings `params.train`."""
        p = TrainParams().Set(
            iterations_per_loop=self.tpu_config.iterations_per_loop,
            keep_checkpoint_max=self.keep_checkpoint_max or None,
            keep_checkpoint_every_n_hours=self.keep_checkpoint_every_n_hours,
            save_checkpoints_secs=self.save_checkpoints_secs,
        )
        if self.tf_random_seed is not None:
            p.seed = self.tf_random_seed
        if self.save_checkpoints_steps is not None:
            p.save_checkpoints_steps = self.save_checkpoints_steps
        elif self.save_checkpoints_secs is not None:
            p.save_checkpoints_steps = sys.maxsize  # Save only by time.
        return p

    def partitioning(self) -> Partitioning:
        """Returns a partitioning that splits rows over `num_shards` devices, like TPUEstimator."""
        num_shards = self.tpu_config.num_shards or jax.device_count()
        return Partitioning.from_dict(Mesh.flat(num_shards), {ROWS: "d"})

    def params(self, model_params: Mapping[str, Any]) -> Params:
        """Returns an estimator's params: the model's params, and `train`.

        Raises ValueError if a name is reserved for the estimator.
        """
        reserved = {"batch_size", "train"} & model_params.keys()
        if reserved:
            raise ValueError(
                f"params: the estimator sets {min(reserved)} itself; choose another name."
            )

        params = Params()
        for name, value in model_params.items():
            params.Define(name, value, "A parameter of the model.")
        params.Define("train", self.train_params(), "The training loop.")
        return params


class DatasetInput:
    """An Input (train/loop.py) from a tf.data.Dataset of (features, labels), or of features alone.

    Both are tensors whose dim 0 is the batch's rows, or dicts and tuples of such tensors. A dict or
    a named tuple reaches model_fn as a NestedMap, any other tuple as a list.

    An iteration begins at the position given to `set_state`, or else at the first batch. A position
    is the number of batches read; a resumed run skips that many, so the dataset must always yield
    the same batches.
    """

    def __init__(self, dataset: Any, share: Share = WHOLE) -> None:
        """`dataset` yields the rows of `share`.

        Raises ValueError if its elements do not have the structure described above, or if their
        leaves are not dense tensors of known sizes.
        """
        self._dataset = dataset
        self._first = 0  # The batch at which an iteration begins.
        self._num_read = 0
        self._element = dataset.element_spec
        self.specs = _batch(self._element).Transform(functools.partial(_spec, share))

    def __iter__(self) -> Iterator[NestedMap]:
        self._num_read = self._first
        for element in self._dataset.skip(self._first).as_numpy_iterator():
            self._num_read += 1
            yield _batch(element)

    def get_state(self) -> dict[str, Any]:
        return {"num_read": self._num_read}

    def set_state(self, state: dict[str, Any]) -> None:
        self._first = state["num_read"]
        self._num_read = self._first


class _OfDicts:
    """Wraps an Input of plain dicts; its specs and batches become NestedMaps."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.specs = nested("input_fn: specs", source.specs)

    def __iter__(self) -> Iterator[NestedMap]:
        return (nested("input_fn: a batch", batch) for batch in self._source)

    def __getattr__(self, name: str) -> Any:  # For get_state and the other optional methods.
        return getattr(self._source, name)


def as_input(given: Any) -> Any:
    """Returns the result of an input_fn as an Input.

    A tf.data.Dataset becomes a DatasetInput with all rows, and an input of plain dicts becomes one
    of NestedMaps. Raises ValueError for another result, and for a Dataset if several processes
    share the rows.
    """
    if hasattr(given, "element_spec"):
        if jax.process_count() > 1:
            raise ValueError(
                "input_fn: a Dataset has all rows or a process's share; with several processes, "
                "return DatasetInput(dataset, share), with the share of its rows."
            )
        return DatasetInput(given)

    missing = [name for name in ("specs", "__iter__") if not hasattr(given, name)]
    if missing:
        raise ValueError(
            f"input_fn: returned {type(given).__name__}, without {' and '.join(missing)}; expected "
            "a tf.data.Dataset, or an Input (train/loop.py)."
        )
    is_nested = isinstance(given.specs, NestedMap)
    return given if is_nested else _OfDicts(given)


def _spec(share: Share, leaf: Any) -> TensorSpec:
    """Returns the spec of a tensor with the rows of all processes, given one share's tensor."""
    if not isinstance(leaf, tf.TensorSpec):
        raise ValueError(f"DatasetInput: expected dense tensors, got {leaf}; convert it in map().")
    if not leaf.shape.rank or not leaf.shape.is_fully_defined():
        raise ValueError(
            f"DatasetInput: a batch has shape {leaf.shape}; expected known sizes, the rows first: "
            "batch(params['batch_size'], drop_remainder=True)."
        )
    rows, *others = leaf.shape.as_list()
    dims = ROWS + "_" * len(others)
    return TensorSpec((rows * share.count, *others), leaf.dtype.as_numpy_dtype.__name__, dims)


def _batch(element: Any) -> NestedMap:
    """Returns the features and labels of an element, or of its specs, as an Input yields them."""
    if not isinstance(element, tuple):
        return nested("DatasetInput", {"features": element})
    if len(element) != 2:
        raise ValueError(
            f"DatasetInput: an element is a tuple of {len(element)}; expected (features, labels). "
            "Put weights of rows into the features or the labels, which may be dicts or tuples."
        )
    features, labels = element
    return nested("DatasetInput", {"features": features, "labels": labels})
