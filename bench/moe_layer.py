"""An MoE layer forward and backward beside PyTorch's and numpy's matrix-product rate.

    python -m bench.moe_layer [--model=toy.MoE8E8L] [--partitions=1,2,4] [--group_sizes=64,256]

The layer is the experiment's first, its input a source batch. That both do the same, bench.step
checks on the whole model.
"""

from __future__ import annotations

import math

from absl import app

from bench.beside_torch import Work, compare
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap


def main(argv: list[str]) -> None:
    compare("MoE layer forward and backward", "layer", _layer)


def _layer(params: Params, num_partitions: int) -> Work:
    import jax
    import numpy as np

    from bench import synthetic
    from lingvo_gshard.analysis import flops
    from lingvo_gshard.layers.moe import MoELayer
    from lingvo_gshard.sharding.partitioning import TensorSpec
    from lingvo_gshard.spmd import program
    from lingvo_gshard.spmd.annotated_fn import AnnotatedFn

    model, state = synthetic.model_and_state(params, num_partitions)
    number, layer = next(
        (i, each.feed_forward)
        for i, each in enumerate(model.task.encoder.layers)
        if isinstance(each.feed_forward, MoELayer)
    )
    p = params.input
    rows, length, dim = p.batch_size, p.source_len, params.task.dim
    random = np.random.default_rng(0)
    x, d_y = random.standard_normal((2, rows, length, dim), np.float32)
    inputs = NestedMap(x=x, d_y=d_y, real=np.ones((rows, length), np.float32), seed=_SEED)
    specs = inputs.Transform(lambda a: TensorSpec(a.shape, a.dtype.name, "BLM"[: a.ndim]))
