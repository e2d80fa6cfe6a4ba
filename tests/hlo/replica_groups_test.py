"""Groups of partitions in every form that XLA writes."""

import pytest

from lingvo_gshard.hlo import replica_groups


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("channel_id=1", ((0, 1, 2, 3, 4, 5),)),
        ("replica_groups={}, to_apply=%add", ((0, 1, 2, 3, 4, 5),)),
        ("replica_groups={{0,3},{4,1},{2,5}}", ((0, 3), (4, 1), (2, 5))),
        ("channel_id=2, source_target_pairs={{0,1},{1,0}}", ((0, 1), (1, 0))),
        ("replica_groups=[2,3]<=[6], dimensions={1}", ((0, 1, 2), (3, 4, 5))),
        ("replica_groups=[2,3]<=[3,2]T(1,0), x={1}", ((0, 2, 4), (1, 3, 5))),
        # Of a mesh, along the axes in braces, in their order.
        ("replica_groups=mesh['a'=2,'b'=3] {'b'}, dimensions={1}", ((0, 1, 2), (3, 4, 5))),
        ("replica_groups=mesh[a=2,b=3] {a}", ((0, 3), (1, 4), (2, 5))),
        ("replica_groups=mesh['a'=2,'b'=3] {'a','b'}", ((0, 1, 2, 3, 4, 5),)),
        ("replica_groups=mesh['a'=2,'b'=3] {'b','a'}", ((0, 3, 1, 4, 2, 5),)),
        ("replica_groups=mesh['a'=6] {}", tuple((i,) for i in range(6))),
        ("replica_groups=mesh['a'=6,'one'=1] {'one'}", tuple((i,) for i in range(6))),
        # The outer two of an axis' six, the inner three, the middle two of eight.
        ("replica_groups=mesh['a'=6] {'a':(1)2}", ((0, 3), (1, 4), (2, 5))),
        ("replica_groups=mesh['a'=6] {'a':(2)3}", ((0, 1, 2), (3, 4, 5))),
        ("replica_groups=mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        (
            "replica_groups=mesh['a'=2,'b'=3], device_ids=(5,0,3,1,4,2) {'b'}",
            ((5, 0, 3), (1, 4, 2)),
        ),
        (
            "replica_groups=mesh['a'=2,'b'=3], device_ids=([3,2]T(1,0)) {'a'}",
            ((0, 1), (2, 3), (4, 5)),
        ),
    ],
)
def test_every_form(written, groups):
    assert replica_groups.parse(written, 6) == groups


def test_an_unknown_form_is_refused():
    with pytest.raises(ValueError, match=r"in no known form: replica_groups=@mesh\{x\}, y=1"):
        replica_groups.parse("channel_id=1, replica_groups=@mesh{x}, y=1", 6)
