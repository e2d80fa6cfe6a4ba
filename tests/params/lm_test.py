"""Registered language models, compared with the statements of Lingvo and GLaM."""

import math

import numpy as np
import pytest

from lingvo_gshard import registry
from lingvo_gshard.model import placement
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning
from params import lm
from repro.tables.language_models import PUBLISHED
from tests import exhaustive
from tests.params import write_goldens
from tests.xla_spmd import compilers
from xla_plan.machines import topology
from xla_spmd.mesh import Mesh

_RUNS = {run.model: run for run in PUBLISHED}
_SMALL = ("lm.DenseLm8B2x2", "lm.DenseLm128B8x8")  # The others are left to `make test-exhaustive`.
_CORES = {"v3:2x2": 8, "v3:8x8": 128, "v3:16x16": 512, "v3:32x32": 2048, "v4:8x8x16": 2048}

# Lingvo's comments state these numbers exactly. A layer of the wide models also has a table of
# learned positions, which is missing here.
_EXACTLY = {
    "lm.DenseLm128B8x8": 137_702_416_384,
    "lm.DenseLm1T16x16": 1_100_041_175_040,
    "lm.DenseLm175B32x32": 174_366_928_896 - 2048 * 12_288,
}


def test_all_published_models_are_registered_and_all_registered_ones_published():
    registered = [name for name in registry.registered_names() if name.startswith("lm.")]
    assert sorted(_RUNS) == registered


@pytest.mark.parametrize("model", _EXACTLY)
def test_weights_equal_lingvos_count(model):
    assert placement.num_weights(registry.get_params(model)) == _EXACTLY[model]


@pytest.mark.parametrize("model", _RUNS)
def test_weights_are_the_stated_ones(model):
    """Within 1 % if more than one digit is stated; GLaM's 1.2 T and Lingvo's 8 B are rounded."""
    weights = placement.num_weights(registry.get_params(model))
    is_rounded = model in ("lm.GLaM64B64E", "lm.DenseLm8B2x2")
    assert weights == pytest.approx(_RUNS[model].weights, rel=0.04 if is_rounded else 0.01)


def test_glam_uses_as_many_weights_for_a_token_as_it_states():
    """96.6 B weights: two experts out of 64, and everything else."""
    task = registry.get_params("lm.GLaM64B64E").task
    specs = task.Instantiate(Annotator(Partitioning(Mesh.flat(1), ()))).weight_specs
    sizes = {}
    for path, spec in specs.FlattenItems():
        sizes[path] = math.prod(spec.shape)
    of_experts = sum(size for path, size in sizes.items() if "block[1].feed_forward.w" in path)
    of_experts -= sizes["decoder.block[1].feed_forward.wg"]

    used = sum(sizes.values()) - of_experts * 62 / 64
    assert used / 1e9 == pytest.approx(96.6, abs=0.05)


@pytest.mark.parametrize("model", _RUNS)
def test_a_model_is_partitioned_over_its_machine_as_lingvo_splits_it(model):
    """Activations in blocks of rows and M, weights in blocks of M and hidden dims."""
    p = registry.get_params(model)
    cores = write_goldens.num_partitions(model)
    assert cores == _CORES[_RUNS[model].topology]

    partitioning = placement.partitioning(p, cores)
    assert partitioning.axes("BLM") == ("x", None, "y")
    assert partitioning.axes("BNLD") == ("x", "y", None, None)
    assert partitioning.axes("BLH") == ("x", None, "y")
    assert partitioning.axes("MND") == ("x", "y", None)
    assert partitioning.axes("HM") == ("y", "x")
    assert partitioning.axes("ULV") == ("x", None, "y")


def test_the_cores_of_a_row_of_chips_follow_each_other():
    """Two hosts of 2 x 2 chips: the first rows of both, then their second rows."""
    first = [0, 1, 2, 3, 8, 9, 10, 11]
    assert list(lm.rows_of_chips(4, 2)) == [*first, *(core + 4 for core in first)]
    # The first chip of each layer, then the second chip of each.
    assert list(lm.lines_of_chips(4, 2, 2))[:8] == [0, 1, 16, 17, 2, 3, 18, 19]


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [*_SMALL, *exhaustive.only(*(run for run in _RUNS if run not in _SMALL))]
)
def test_an_axis_of_the_mesh_is_a_line_of_chips(model):
    """Cores that differ only in y are on a line; cores that differ in x, on a line or a plane."""
    run = _RUNS[model]
    compilers.need(run.topology)
    mesh = placement.partitioning(registry.get_params(model), _CORES[run.topology]).mesh
    places = np.array(topology.places(run.topology))[np.array(mesh.devices)]

    grid = places.reshape(*mesh.axis_sizes, -1)
    ways = dict(zip(mesh.axis_names, (grid[:, 0], grid[0]), strict=True))
    if model == "lm.DenseLm8B2x2":
        assert mesh.shape == {"x": 1, "y": 8}  # The whole slice.
        return
    varying = {axis: (np.ptp(chips, axis=0) > 0).sum() for axis, chips in ways.items()}
    assert varying == {"x": 2 if "v4" in run.topology else 1, "y": 1}
