"""Checkpoints whose slots are another optimizer's or an earlier version's."""

import dataclasses

import jax
import numpy as np
import pytest

from lingvo_gshard.checkpoints import factored_slots
from lingvo_gshard.checkpoints.checkpoints import Checkpoints, Contents
from lingvo_gshard.checkpoints.stored import DamagedCheckpointError, Stored
from lingvo_gshard.core import base_layer
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.optim.adafactor import Adafactor
from lingvo_gshard.optim.adamw import AdamW
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
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


def _saved(folder, state_spec, state):
    """Saves a checkpoint of step 5."""
    p = Params()
    p.Define("train", train_params(), "")
    with Checkpoints(folder, Contents(p, _PARTITIONING, state_spec)) as saved:
        saved.save(5, state.Transform(jax.device_put, _shardings(state_spec)), {})


@pytest.mark.parametrize("num_partitions", [1, 2])
def test_factored_slots_of_biases_become_full(tmp_path, caplog, num_partitions):
    """The second moment is the rank-one matrix that the earlier version used."""
    rng = np.random.default_rng(0)
    squares = {
        "heads": rng.random((2, 3)).astype("float32"),
        "experts": rng.random((3, 1, 4)).astype("float32"),
        "unused": np.zeros((2, 2), "float32"),
    }
    weights = NestedMap(
        heads=base_layer.constant((2, 3), "ND", 0.0),
        experts=base_layer.constant((3, 1, 4), "E_H", 0.0),
        unused=base_layer.constant((2, 2), "ND", 0.0),
    )

    # Earlier versions treated all of them as matrices.
    matrices = weights.Transform(lambda spec: dataclasses.replace(spec, rows=1))
    adafactor = Adafactor.Params().Instantiate()
    old = NestedMap(slots=adafactor.slot_specs(matrices))
    factored = NestedMap()
    for name, squared in squares.items():
        factored[name] = NestedMap(row=squared.mean(-1), column=squared.mean(-2))
    _saved(tmp_path, old, NestedMap(slots=factored))

    new = NestedMap(slots=adafactor.slot_specs(weights))
    parts = Partitioning.from_dict(Mesh.flat(num_partitions), {"h": "d", "n": "d"})
    shardings = specs.shardings(parts, new, specs.device_mesh(parts))
    with Checkpoints(tmp_path) as saved:
        slots = saved.restore(5, new, shardings).state.slots.Transform(np.asarray)
    assert "checkpoints/5: Adafactor's slots of 3 biases were factored" in caplog.text

    of_heads = squares["heads"].astype("float64")
    rank_one = np.outer(of_heads.mean(1), of_heads.mean(0)) / of_heads.mean()
    np.testing.assert_allclose(slots.heads.full, rank_one, rtol=1e-6)
    # With a single row, the factors are exact.
    np.testing.assert_allclose(slots.experts.full, squares["experts"], rtol=1e-6)
    np.testing.assert_array_equal(slots.unused.full, np.zeros((2, 2)))


def test_a_damaged_factor_is_found(tmp_path):
    row = TensorSpec((2,), "float32", "n")
    column = TensorSpec((3,), "float32", "d")
    ones = NestedMap(row=np.ones(2, "float32"), column=np.ones(3, "float32"))
    old = NestedMap(slots=NestedMap(b=NestedMap(row=row, column=column)))
    _saved(tmp_path, old, NestedMap(slots=NestedMap(b=ones)))

    opened = Stored.open(tmp_path / "checkpoints/5")
    opened.fingerprints["slots.b.row"] = opened.fingerprints["slots.b.column"]
    full = TensorSpec((2, 3), "float32", "nd")
    new = NestedMap(slots=NestedMap(b=NestedMap(full=full)))
    arrays = factored_slots.fitted(opened, new).arrays()
    with pytest.raises(DamagedCheckpointError, match=r"slots\.b\.row"):
        arrays["slots.b.full"][()]
