"""NestedMap: order, packing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lingvo_gshard.core.nested_map import NestedMap


def _tree():
    return NestedMap(b=NestedMap(y=2, x=1), a=[3, NestedMap(z=4)], c=5)


def test_items_are_sorted_by_key_at_each_level():
    assert _tree().FlattenItems() == [("a[0]", 3), ("a[1].z", 4), ("b.x", 1), ("b.y", 2), ("c", 5)]
    assert _tree().Flatten() == [3, 4, 1, 2, 5]


def test_attributes_are_keys():
    tree = _tree()
    tree.d = 6
    assert tree["d"] == tree.d == 6
    with pytest.raises(AttributeError, match="No 'q' in this NestedMap, which holds a, b, c, d"):
        _ = tree.q
    with pytest.raises(AttributeError, match="which holds nothing"):
        _ = NestedMap().q


def test_pack_keeps_the_structure():
    packed = _tree().Pack("vwxyz")
    assert packed == NestedMap(a=["v", NestedMap(z="w")], b=NestedMap(x="x", y="y"), c="z")
    assert isinstance(packed.a[1], NestedMap)


@pytest.mark.parametrize("count", [4, 6])
def test_pack_counts_the_leaves(count):
    with pytest.raises(ValueError, match=f"Pack: {count} leaves given, 5 expected"):
        _tree().Pack(range(count))


def test_transform():
    assert _tree().Transform(lambda x: 10 * x).Flatten() == [30, 40, 10, 20, 50]


_TREES = st.recursive(
    st.integers(),
    lambda inner: (
        st.dictionaries(st.sampled_from("abcd"), inner, min_size=1).map(NestedMap)
        | st.lists(inner, min_size=1, max_size=3)
    ),
)


@given(st.dictionaries(st.sampled_from("abcd"), _TREES).map(NestedMap))
def test_pack_undoes_flatten(tree):
    assert tree.Pack(tree.Flatten()) == tree
    assert len({path for path, _ in tree.FlattenItems()}) == len(tree.Flatten())
