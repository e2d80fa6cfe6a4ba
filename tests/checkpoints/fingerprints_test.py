"""Fingerprints: equal for all partitionings of an array, and different after each change."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lingvo_gshard.checkpoints import fingerprints
from lingvo_gshard.checkpoints.fingerprints import PartSums, fingerprint
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.layout import TensorSpec

_E, _M, _H = 8, 4, 6
_SPEC = NestedMap(
    step=TensorSpec((), "int32", ""),
    wg=TensorSpec((_M, _E), "bfloat16", "M_"),
    wi=TensorSpec((_E, _M, _H), "float32", "EMH"),
    wo=TensorSpec((_H, _E, _M), "float32", "HEM"),  # The experts' dim may be any of them.
)


def _arrays(seed=0):
    random = np.random.default_rng(seed)
    return _SPEC.Transform(lambda s: np.asarray(9 * random.random(s.shape)).astype(s.dtype))


def _fingerprints(arrays, mesh_shape=(1, 1)):
    mesh = jax.make_mesh(mesh_shape, ("x", "y"))
    axes = {"E": "x", "M": "y"}
    placed = [
        jax.device_put(a, NamedSharding(mesh, PartitionSpec(*(axes.get(d) for d in s.dims))))
        for a, s in zip(arrays.Flatten(), _SPEC.Flatten(), strict=True)
    ]
    pairs = zip(placed, _SPEC.FlattenItems(), strict=True)
    return {path: fingerprint(array, spec.dims) for array, (path, spec) in pairs}


@pytest.mark.slow
def test_each_expert_has_a_fingerprint_on_every_mesh(monkeypatch):
    whole = _fingerprints(_arrays())  # Small arrays are hashed by NumPy.
    counts = {path: len(digits) for path, digits in whole.items()}
    assert counts == {"step": 1, "wg": 1, "wi": _E, "wo": _E}
    assert len(set().union(*whole.values())) == 2 + 2 * _E
    assert _fingerprints(_arrays(), (2, 4)) == whole

    monkeypatch.setattr(
        fingerprints, "_ELEMENTS_ON_HOST", 0
    )  # Larger arrays are hashed by compiled programs.
    for mesh_shape in ((1, 1), (8, 1), (2, 4), (1, 2)):
        assert _fingerprints(_arrays(), mesh_shape) == whole


def test_on_one_device_large_arrays_are_hashed_in_parts(monkeypatch):
    """The longest axis is cut, whether it has the experts or not; the last part is smaller."""
    whole = _fingerprints(_arrays())
    for num_bytes in (8, 100, 300):
        monkeypatch.setattr(fingerprints, "_PART_BYTES", num_bytes)
        assert _fingerprints(_arrays()) == whole


@pytest.mark.parametrize("path", ["wi", "wo"])
def test_a_changed_bit_and_swapped_experts_show(path):
    dim = _SPEC[path].dims.index("E")
    before = _fingerprints(_arrays())[path]

    changed = _arrays()
    expert = np.moveaxis(changed[path], dim, 0)[3]
    expert.view(np.uint32)[1, 2] ^= 1
    after = _fingerprints(changed)[path]
    assert [i for i in range(_E) if before[i] != after[i]] == [3]

    swapped = _arrays()
    swapped[path] = np.take(swapped[path], [1, 0, *range(2, _E)], axis=dim)
    assert _fingerprints(swapped)[path] == [before[1], before[0], *before[2:]]


def test_elements_that_change_places_show():
    arrays = _arrays()
    before = _fingerprints(arrays)["wi"]
    arrays.wi[5] = arrays.wi[5, :, ::-1]
    assert [a == b for a, b in zip(before, _fingerprints(arrays)["wi"], strict=True)] == [
        i != 5 for i in range(_E)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [1, 3])
def test_parts_have_the_fingerprint_of_the_whole(pieces):
    """The parts are cut along all dims, and added in any order."""
    whole = _fingerprints(_arrays())
    rng = np.random.default_rng(2)
    for (path, array), (_, spec) in zip(
        _arrays().FlattenItems(), _SPEC.FlattenItems(), strict=True
    ):
        sums = PartSums(spec.dims, array.shape)
        cuts = [np.linspace(0, size, pieces + 1).astype(int) for size in array.shape]
        places = list(np.ndindex(*[pieces] * array.ndim))
        for place in rng.permutation(len(places)):
            index = tuple(
                slice(int(cut[i]), int(cut[i + 1]))
                for cut, i in zip(cuts, places[place], strict=True)
            )
            sums.add(tuple(part.start for part in index), np.asarray(array[index]))
        assert sums.fingerprint() == whole[path], path
