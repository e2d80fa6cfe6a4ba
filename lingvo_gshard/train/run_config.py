"""RunConfig and TPUConfig, by TensorFlow's names, and an input of a tf.data.Dataset.

They fill `params.train` (train/config.py) and the partitioning, so that a TPUEstimator program
needs neither.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.spmd.specs import ROWS, WHOLE, Share
from lingvo_gshard.train.config import train_params


@dataclasses.dataclass(frozen=True)
class TPUConfig:
    """Settings of the devices, of any kind."""

    iterations_per_loop: int = 2  # K, training steps in one call of the device program.
    num_shards: int | None = None  # Devices that share the rows; None takes all of them.


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Settings of a run. A number that is None stays as train/config.py has it."""

    model_dir: str | None = None
    tf_random_seed: int | None = None
    save_checkpoints_steps: int | None = None
    save_checkpoints_secs: float | None = None
    keep_checkpoint_max: int = 5
    keep_checkpoint_every_n_hours: float | None = None
    log_step_count_steps: int = 100
    tpu_config: TPUConfig = TPUConfig()

    def train_params(self) -> Params:
        """Returns the settings `params.train`."""
        p = train_params().Set(
            iterations_per_loop=self.tpu_config.iterations_per_loop,
            keep_checkpoint_max=self.keep_checkpoint_max,
            keep_checkpoint_every_n_hours=self.keep_checkpoint_every_n_hours,
            save_checkpoints_secs=self.save_checkpoints_secs,
        )
        if self.tf_random_seed is not None:
            p.seed = self.tf_random_seed
        if self.save_checkpoints_steps is not None:
            p.save_checkpoints_steps = self.save_checkpoints_steps
        elif self.save_checkpoints_secs is not None:
            p.save_checkpoints_steps = sys.maxsize  # By time alone.
        return p

    def partitioning(self) -> Partitioning:
        """Returns the one that splits rows over `num_shards` devices, as TPUEstimator does."""
        num_shards = self.tpu_config.num_shards or jax.device_count()
        return Partitioning.from_dict(Mesh.flat(num_shards), {ROWS: "d"})

    def params(self, model_params: Mapping[str, Any]) -> Params:
        """Returns an estimator's params: those of the model, and `train`.

        Raises ValueError for a name that the estimator sets itself.
        """
        reserved = {"batch_size", "train"} & model_params.keys()
        if reserved:
            raise ValueError(
                f"params: {min(reserved)} is set by the estimator; choose other names."
            )

        params = Params()
        for name, value in model_params.items():
            params.Define(name, value, "A parameter of the model.")
        params.Define("train", self.train_params(), "The training loop.")
        return params


class DatasetInput:
    """An Input (train/loop.py) of a tf.data.Dataset of (features, labels), or features alone.

    Both are tensors or dicts of tensors whose dim 0 is the batch's rows. Its place is the number of
    batches read; a resumed run skips as many, so the dataset must yield the same ones again.
    """

    def __init__(self, dataset: Any, share: Share = WHOLE) -> None:
        """`dataset` yields the rows of `share`. Raises ValueError for batches of unknown sizes."""
        self._dataset = dataset
        self._num_read = 0
        self._element = dataset.element_spec

        def spec(leaf: Any) -> TensorSpec:
            if not leaf.shape.rank or not leaf.shape.is_fully_defined():
                raise ValueError(
                    f"DatasetInput: a batch has shape {leaf.shape}; expected known sizes, the rows "
                    "first: batch(params['batch_size'], drop_remainder=True)."
                )
            rows, *others = leaf.shape.as_list()
            dims = ROWS + "_" * len(others)
            return TensorSpec(
                (rows * share.count, *others), leaf.dtype.as_numpy_dtype.__name__, dims
            )

        self.specs = _batch(self._element).Transform(spec)

    def __iter__(self) -> Iterator[NestedMap]:
        for element in self._dataset.skip(self._num_read).as_numpy_iterator():
            self._num_read += 1
            yield _batch(element)

    def get_state(self) -> dict[str, Any]:
        return {"num_read": self._num_read}

    def set_state(self, state: dict[str, Any]) -> None:
        self._num_read = state["num_read"]


def _batch(element: Any) -> NestedMap:
    """Returns the features and labels of an element, or of its specs, as an Input yields them."""
    if isinstance(element, tuple):
        features, labels = element
        return NestedMap(features=_tree(features), labels=_tree(labels))
    return NestedMap(features=_tree(element))


def _tree(node: Any) -> Any:
    if isinstance(node, Mapping):
        return NestedMap({name: _tree(child) for name, child in node.items()})
    return node
