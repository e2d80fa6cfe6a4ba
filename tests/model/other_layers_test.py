"""The whole model with other norms, positions, activations and biases: partitioned, and decoding.

That each of them is right is tested in layers/other_models_test.py.

B batch, L target length, k beam.
"""

import functools

import pytest

from lingvo_gshard.layers.activations import Activation
from lingvo_gshard.layers.norms import RMSNorm
from lingvo_gshard.layers.numerics import Remat
from lingvo_gshard.layers.positions import RelativeBias, RotaryPositions
from lingvo_gshard.layers.repeat import Layers
from lingvo_gshard.sharding.layout import Partitioning
from tests import exhaustive
from tests.layers import building
from tests.model import small_task, steps_of_task
from xla_spmd.mesh import Mesh

_POSITIONS = {
    "rotary": RotaryPositions.Params(),
    "relative": RelativeBias.Params().Set(num_buckets=4, max_distance=5),
}


def _params(positions, dropout=0.0, **stack_settings):
    p = small_task.task_params(dropout)
    for stack in (p.encoder, p.decoder):
        stack.Set(**stack_settings)
        stack.layer.norm = RMSNorm.Params()
        stack.layer.attention.Set(
            num_heads=4, head_dim=4, biases=True, positions=_POSITIONS[positions].Copy()
        )
        stack.dense.Set(hidden_dim=16, activation=Activation.GELU_TANH, gated=True, biases=True)
        stack.moe.Set(hidden_dim=16, activation=Activation.SILU, gated=True)
    return p


@functools.cache
def _trained(positions, num_partitions, letters):
    """Metrics and gradients in TRAIN mode, of a loop of layers that recomputes its blocks."""
    params = _params(positions, dropout=0.2, layers_as=Layers.LOOP, remat=Remat.BLOCK)
    mesh = Mesh.flat(num_partitions)
    table = Partitioning.from_dict(mesh, dict.fromkeys(letters, "d")) if letters else None
    theta = building.random_theta(params.Instantiate(building.Unannotated()))
    return steps_of_task.trained(params, table, theta)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_partitions", "letters"),
    [
        pytest.param(2, "BGE", marks=pytest.mark.exhaustive),
        pytest.param(4, "HN", marks=pytest.mark.exhaustive),
        (8, "BGE"),
    ],
)
@pytest.mark.parametrize("positions", ["rotary", *exhaustive.only("relative")])
def test_partitioned_training_equals_unpartitioned(positions, num_partitions, letters):
    got = _trained(positions, num_partitions, letters)
    building.assert_close(got, _trained(positions, 1, ""), rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("positions", _POSITIONS)
def test_decoding_step_by_step_equals_teacher_forcing(positions):
    task = _params(positions).Instantiate(building.Unannotated())
    steps_of_task.check_decoding(task, building.random_theta(task))
