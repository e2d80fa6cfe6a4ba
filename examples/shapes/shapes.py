"""Classifiers of shapes in noise, which are drawn as they are needed.

cd examples/shapes && gshard train --model=shapes.ByRows --logdir=RUN --num_partitions=8
"""

import dataclasses
import math
import sys

import numpy as np
from image_task import ImageTask

from lingvo_gshard.core.hyperparams import REQUIRED, setting
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.input import prefetched
from lingvo_gshard.input.prefetched import PrefetchedInput
from lingvo_gshard.optim.adamw import AdamW
from lingvo_gshard.optim.schedules import CosineDecay
from lingvo_gshard.sharding.layout import TensorSpec
from params.experiment import Experiment

_SPLITS = ("train", "dev", "test")
_CLASSES = ("disk", "square", "cross")


class ShapesInput(PrefetchedInput):
    """Images of a disk, a square or a cross."""

    class Params(PrefetchedInput.Params):
        image_size: int = setting(REQUIRED, "X and Y, in pixels.")
        num_images: int = setting(100, "The images of one pass.")

    p: Params

    @staticmethod
    def batch_specs(p: Params) -> NestedMap:
        """Returns the TensorSpecs of a batch."""
        pixels = (p.batch_size, p.image_size, p.image_size, 1)
        rows = (p.batch_size,)
        return NestedMap(
            features=NestedMap(pixels=TensorSpec(pixels, "float32", "BXYC")),
            labels=NestedMap(
                classes=TensorSpec(rows, "int32", "B"), weights=TensorSpec(rows, "float32", "B")
            ),
        )

    def __init__(self, params: Params, *, process_index: int = 0, num_processes: int = 1) -> None:
        """Raises ValueError for another split, or if n processes cannot share the batches."""
        p = params.Copy().Freeze()
        prefetched.check_share(p, num_processes)
        if p.split not in _SPLITS:
            raise ValueError(f"split {p.split!r}: expected one of {', '.join(_SPLITS)}")
        self.specs = self.batch_specs(p)
        super().__init__(_Batches(p, process_index, num_processes))


@dataclasses.dataclass(frozen=True)
class _Batches:
    """Batches by index, each drawn from a separate seed."""

    p: ShapesInput.Params
    process_index: int
    num_processes: int

    def __len__(self) -> int:
        return sys.maxsize if self.p.repeat else math.ceil(self.p.num_images / self.p.batch_size)

    def __getitem__(self, index: int) -> NestedMap:
        """Returns this process's rows of a batch."""
        p = self.p
        rng = np.random.default_rng([p.seed, _SPLITS.index(p.split), index])
        kind, pixels = _drawn(rng, p.batch_size, p.image_size)

        # The last batch of one pass may lack images.
        is_image = index * p.batch_size + np.arange(p.batch_size) < p.num_images
        weights = np.ones(p.batch_size) if p.repeat else is_image
        batch = NestedMap(
            features=NestedMap(pixels=pixels.astype("float32")),
            labels=NestedMap(classes=kind.astype("int32"), weights=weights.astype("float32")),
        )
        num_rows = p.batch_size // self.num_processes
        start = self.process_index * num_rows
        return batch.Transform(lambda array: array[start : start + num_rows])


def _drawn(rng: np.random.Generator, num_images: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the classes, int [B], and the pixels, float [B, X, Y, 1], of images."""
    kind = rng.integers(0, len(_CLASSES), num_images)
    radius = rng.uniform(size / 8, size / 4, (num_images, 1, 1))
    x = np.arange(size)[:, None] - rng.uniform(size / 4, size * 3 / 4, (num_images, 1, 1))
    y = np.arange(size) - rng.uniform(size / 4, size * 3 / 4, (num_images, 1, 1))

    farther = np.maximum(abs(x), abs(y))
    nearer = np.minimum(abs(x), abs(y))
    disk = np.hypot(x, y) < radius
    square = farther < 0.9 * radius
    cross = (farther < radius) & (nearer < 0.3 * radius)

    shapes = np.choose(kind[:, None, None], [disk, square, cross])
    noise = 0.1 * rng.standard_normal((num_images, size, size))
    return kind, (shapes + noise)[..., None]


class ByRows(Experiment):
    """0.01 M weights on 8 partitions, each with 8 of the 64 rows of every image."""

    SHARDING = "X:d"
    IMAGE_SIZE = 64
    MAX_STEPS = 40
    ITERATIONS_PER_LOOP = 10
    SAVE_CHECKPOINTS_STEPS = 20

    def Task(self) -> ImageTask.Params:
        return ImageTask.Params().Set(image_size=self.IMAGE_SIZE, num_classes=len(_CLASSES))

    def Optimizer(self) -> AdamW.Params:
        schedule = CosineDecay.Params().Set(
            peak=1e-2, ramp_up_steps=10, total_steps=self.MAX_STEPS, final_share=0.1
        )
        return AdamW.Params().Set(schedule=schedule)

    def Train(self) -> ShapesInput.Params:
        return ShapesInput.Params().Set(batch_size=32, image_size=self.IMAGE_SIZE)


class ByImages(ByRows):
    """The same on 8 partitions, each with 4 of the 32 images of a batch."""

    SHARDING = "B:d"
