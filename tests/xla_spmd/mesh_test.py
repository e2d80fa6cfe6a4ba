"""Mesh: names, sizes, device assignment."""

import pytest

from xla_spmd.mesh import Mesh


def test_sizes_and_devices():
    mesh = Mesh(("x", "y"), (2, 3))
    assert (mesh.num_partitions, mesh.size("x"), mesh.size("y")) == (6, 2, 3)
    assert mesh.devices == (0, 1, 2, 3, 4, 5)
    assert Mesh(("x",), (3,), (2, 0, 1)).devices == (2, 0, 1)
    assert Mesh.flat(4) == Mesh(("d",), (4,))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((("x",), (2, 3)), r"Mesh: 1 axis names \('x',\) but 2 sizes \(2, 3\)"),
        ((("x", "x"), (2, 3)), "Mesh: axis names must differ"),
        ((("x",), (0,)), "Mesh: the partitions of axis 'x' must be 1 or more, got 0"),
        ((("x",), ("8",)), "the partitions of axis 'x' must be a whole number, 1 or more, got '8'"),
        ((("x",), (2.5,)), "the partitions of axis 'x' must be a whole number, 1 or more, got 2.5"),
        (("x", (3,)), r"Mesh: axis_names: expected names, \('d',\), got str 'x'"),
        ((("x",), 3), r"Mesh: axis_sizes: expected sizes, \(4,\), got int 3"),
        ((("x",), (3,), (0, 1, 1)), r"must order 0 to 2, got \(0, 1, 1\)"),
        ((("x",), (3,), (0, 1)), "must order 0 to 2"),
    ],
)
def test_a_mesh_that_makes_no_sense_is_refused(args, message):
    with pytest.raises(ValueError, match=message):
        Mesh(*args)


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        ("z", "no axis 'z' in .*; the axes are x of 2, y of 3"),
        (3, "a name or a tuple of names, got 3"),
    ],
)
def test_an_unknown_axis_is_refused(axis, message):
    with pytest.raises(ValueError, match=message):
        Mesh(("x", "y"), (2, 3)).size(axis)
