"""BaseLayer: the tree of weights, and their initial values."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import base_layer
from lingvo_gshard.core.base_layer import BaseLayer
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import TensorSpec
from tests.layers import building
from tests.spmd import functions


class _Leaf(BaseLayer):
    @classmethod
    def Params(cls):
        p = super().Params()
        p.Define("size", 3, "")
        return p

    def __init__(self, params, *args):
        super().__init__(params, *args)
        self.CreateVariable("w", base_layer.gaussian((self.p.size, 4000), "E_", fan_in=16))
        self.CreateVariable("b", base_layer.constant((self.p.size,), "E", 0.5))


class _Root(BaseLayer):
    def __init__(self, params, *args):
        super().__init__(params, *args)
        self.CreateChild("one", _Leaf.Params().Set(size=8))
        self.CreateChildren("many", [_Leaf.Params().Set(size=2 + i) for i in range(2)])
        self.CreateVariable("scale", base_layer.constant((), "", 2.0))


def _root():
    return _Root.Params().Instantiate(building.Unannotated())


def test_weights_mirror_the_tree():
    root = _root()
    assert [(path, spec.shape) for path, spec in root.weight_specs.FlattenItems()] == [
        ("many[0].b", (2,)),
        ("many[0].w", (2, 4000)),
        ("many[1].b", (3,)),
        ("many[1].w", (3, 4000)),
        ("one.b", (8,)),
        ("one.w", (8, 4000)),
        ("scale", ()),
    ]
    assert root.num_weights == 13 * 4001 + 1
    assert [root.path, root.one.path, root.many[1].path] == ["", "one", "many[1]"]


def test_a_matrix_needs_its_dims():
    with pytest.raises(ValueError, match=r"a matrix of rows=1 and columns=1 needs .*got 'M'; a b"):
        base_layer.gaussian((3,), "M", fan_in=1)
    assert not base_layer.gaussian((3,), "M", fan_in=1, rows=0).is_matrix
    assert not base_layer.constant((3, 4), "ND", 0.0).is_matrix
    assert base_layer.constant((3, 4), "MH", 0.0, rows=1).stacked(5).is_matrix


@pytest.fixture(scope="module")
def started():
    """theta by (partitions, seed)."""
    found = {}
    for n in (1, 8):
        root = _Root.Params().Instantiate(Annotator(functions.partitioning(n)))

        def fn(seed, root=root):
            theta = root.InitTheta(seed.seed)
            return NestedMap(theta=NestedMap(one=theta.one, scale=theta.scale, many=theta.many))

        seed = NestedMap(seed=TensorSpec((2,), "int32", "_"))
        dims = {"theta.one.w": "E_", "theta.one.b": "E"}
        executable = building.compile_fn(fn, n, dims, seed=seed)
        for value in (1, 2):
            given = NestedMap(seed=np.array([value, 0], np.int32))
            found[n, value] = executable(given).theta.Transform(np.asarray)
    return found


def test_gaussians_have_the_fan_ins_deviation(started):
    w = started[1, 1].one.w
    assert abs(w.mean()) < 5 * 0.25 / w.size**0.5
    assert w.std() == pytest.approx(0.25, rel=5 / (2 * w.size) ** 0.5)
    np.testing.assert_array_equal(started[1, 1].one.b, np.full(8, 0.5))
    assert started[1, 1].scale == 2.0


def test_weights_and_seeds_start_with_different_values(started):
    a, b = started[1, 1], started[1, 2]
    rows = [a.one.w[0], a.many[0].w[0], a.many[1].w[0], b.one.w[0], a.one.w[1]]
    correlations = np.corrcoef(rows) - np.eye(len(rows))
    assert np.abs(correlations).max() < 5 / 4000**0.5


def test_the_same_start_for_any_partitioning(started):
    for (path, a), b in zip(started[8, 1].FlattenItems(), started[1, 1].Flatten(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, err_msg=path)


def test_a_layer_keeps_a_frozen_copy_of_its_params():
    params = _Leaf.Params()
    leaf = params.Instantiate(building.Unannotated())
    params.size = 9
    assert leaf.p.size == 3
    with pytest.raises(ValueError, match="frozen"):
        leaf.p.size = 4


def test_a_name_is_used_once():
    root = _root()
    for name in ("one", "many", "scale"):
        with pytest.raises(ValueError, match=f"_Root '' has a '{name}' already"):
            root.CreateVariable(name, base_layer.constant((), "", 0.0))
        with pytest.raises(ValueError, match=f"has a '{name}' already"):
            root.CreateChild(name, _Leaf.Params())


@pytest.mark.parametrize("name", ["annotate", "path", "p"])
def test_a_child_cannot_have_the_name_of_an_attribute(name):
    with pytest.raises(ValueError, match=f"_Root '' has a '{name}' already"):
        _root().CreateChild(name, _Leaf.Params())


def test_dims_must_fit_the_shape():
    with pytest.raises(ValueError, match=r"WeightSpec: shape \(2, 3\) does not fit dims 'M'"):
        base_layer.constant((2, 3), "M", 0.0)


def test_a_layer_without_fprop_says_so():
    with pytest.raises(NotImplementedError, match="_Leaf defines no FProp"):
        _Leaf.Params().Instantiate(building.Unannotated()).FProp(NestedMap())


def test_folded_seeds_differ_by_name_and_keep_the_seed():
    seed = tf.constant([3, 4])
    folded = [tuple(base_layer.fold_seed(seed, name).numpy()) for name in ("a", "b", "a.b")]
    assert len(set(folded)) == 3 and {first for first, _ in folded} == {3}
