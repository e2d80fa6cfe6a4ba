"""Checkpoints whose slots are another optimizer's."""

import jax
import numpy as np
import pytest

from lingvo_gshard.checkpoints.checkpoints import Checkpoints, Contents
from lingvo_gshard.core import base_layer
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.optim.adafactor import Adafactor
from lingvo_gshard.optim.adamw import AdamW
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.spmd import specs
from lingvo_gshard.train.config import train_params
from xla_spmd.mesh import Mesh

_WEIGHTS = NestedMap(
    norm=base_layer.constant((6,), "M", 1.0), softmax=base_layer.gaussian((6, 4), "MV", fan_in=6)
)
_PARTITIONING = Partitioning.from_dict(Mesh.flat(1), {})


def _state_spec(optimizer):
    return NestedMap(slots=optimizer.Params().Instantiate().slot_specs(_WEIGHTS))


def _shardings(state_spec):
    mesh = specs.device_mesh(_PARTITIONING)
    return specs.shardings(_PARTITIONING, state_spec, mesh)


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (Adafactor, AdamW, "its optimizer has the slots column, full, row, and this run's m, v: "),
        (AdamW, Adafactor, "its optimizer has the slots m, v, and this run's column, full, row: "),
    ],
)
def test_a_checkpoint_with_other_slots_is_refused(tmp_path, before, now, expected):
    spec = _state_spec(before)
    zeros = spec.Transform(lambda s: np.zeros(s.shape, s.dtype))
    state = zeros.Transform(jax.device_put, _shardings(spec))
    p = Params()
    p.Define("train", train_params(), "")
    with Checkpoints(tmp_path, Contents(p, _PARTITIONING, spec)) as saved:
        saved.save(5, state, {})
        other = _state_spec(now)
        with pytest.raises(ValueError, match=f"checkpoints/5: {expected}.*train.warm_start_from"):
            saved.restore(5, other, _shardings(other))
