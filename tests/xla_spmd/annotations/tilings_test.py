"""Tilings: the text of GSPMD's annotations, and the axes of a mesh that divide alike."""

import itertools

import numpy as np
import pytest

from xla_spmd.annotations import tilings
from xla_spmd.mesh import Mesh

_FLAT = Mesh.flat(8)
_GRID = Mesh(("x", "y"), (2, 4))


def _axes(text, mesh):
    dims = tilings.along(tilings.parse(text), mesh)
    return None if dims is None else [" ".join(map(str, axes)) for axes in dims]


@pytest.mark.parametrize(
    ("text", "mesh", "axes"),
    [
        ("{replicated}", _GRID, []),
        ("{devices=[8,1]0,1,2,3,4,5,6,7}", _FLAT, ['"d"', ""]),
        ("{devices=[8,1]0,1,2,3,4,5,6,7}", _GRID, ['"x" "y"', ""]),
        ("{devices=[1,8]<=[8]}", _GRID, ["", '"x" "y"']),
        ("{devices=[4,2]<=[2,4]T(1,0)}", _GRID, ['"y"', '"x"']),
        # Copies, and parts of an axis.
        ("{devices=[2,1,4]<=[8] last_tile_dim_replicate}", _GRID, ['"x"', ""]),
        ("{devices=[4,1,2]<=[8] last_tile_dim_replicate}", _FLAT, ['"d":(1)4', ""]),
        ("{devices=[4,1,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}", _FLAT, ['"d":(2)4', ""]),
        ("{devices=[2,4]0,4,1,5,2,6,3,7}", _GRID, ['"y":(1)2', '"y":(2)2 "x"']),
        ("{devices=[2,2,2]<=[2,2,2]T(2,1,0)}", _FLAT, ['"d":(4)2', '"d":(2)2', '"d":(1)2']),
        # The copies of a part may be listed in any order.
        ("{devices=[2,1,4]3,1,2,0,7,6,5,4 last_tile_dim_replicate}", _GRID, ['"x"', ""]),
        # The axes cannot express these orders.
        ("{devices=[8]1,0,2,3,4,5,6,7}", _FLAT, None),
        ("{devices=[8]7,6,5,4,3,2,1,0}", _GRID, None),
        ("{devices=[2,1,4]0,1,2,5,4,3,6,7 last_tile_dim_replicate}", _FLAT, None),
        ("{devices=[2,3]0,2,4,1,3,5}", Mesh(("x", "y"), (3, 2)), ['"y"', '"x"']),
        ("{devices=[3,2]0,2,4,1,3,5}", Mesh(("x", "y"), (3, 2)), None),
        # Six devices in halves of three: a third of an axis of six would not be whole.
        ("{devices=[3,2]<=[6]}", Mesh.flat(6), ['"d":(1)3', '"d":(3)2']),
        ("{devices=[2,3]<=[6]}", Mesh(("x", "y"), (3, 2)), None),
    ],
)
def test_a_tiling_along_axes(text, mesh, axes):
    assert _axes(text, mesh) == axes


@pytest.mark.parametrize("mesh", [Mesh.flat(12), Mesh(("x", "y", "z"), (2, 3, 2))])
def test_axes_give_each_device_the_part_of_the_tiling(mesh):
    """Every split of two dims along axes of the mesh, read back from its devices."""
    devices = np.arange(12).reshape(2, 3, 2)
    for order in itertools.permutations(range(3)):
        grid = devices.transpose(order)
        for first, second in itertools.combinations_with_replacement(range(4), 2):
            ways = [int(np.prod(grid.shape[i:j])) for i, j in ((0, first), (first, second))]
            tiled = grid.reshape(*ways, -1)
            text = f"{{devices={list(tiled.shape)}{','.join(map(str, tiled.flat))}"
            text = text.replace(" ", "") + " last_tile_dim_replicate}"
            dims = tilings.along(tilings.parse(text), mesh)
            assert dims is not None
            for part, members in np.ndenumerate(np.arange(12).reshape(12)):
                place = np.argwhere(tiled == members)[0]
                assert _place(dims, mesh, part[0]) == tuple(place[:2])


def _place(dims, mesh, device):
    """The part of each dim that a device holds, by the axes: a literal reading of Shardy."""
    coordinates = dict(zip(mesh.axis_names, np.unravel_index(device, mesh.axis_sizes), strict=True))
    place = []
    for axes in dims:
        part = 0
        for axis in axes:
            digits = (axis.pre_size, axis.size, axis.axis_size // axis.pre_size // axis.size)
            _, digit, _ = np.unravel_index(coordinates[axis.axis], digits)
            part = part * axis.size + digit
        place.append(part)
    return tuple(place)


@pytest.mark.parametrize("text", ["{maximal device=3}", "{manual}", "{devices=[2,2]<=[4] last}"])
def test_other_annotations_are_refused(text):
    with pytest.raises(ValueError, match="is neither replicated nor tiled over all devices"):
        tilings.parse(text)


@pytest.mark.parametrize(
    ("dims", "listed"),
    [
        # XLA can slice these: one axis a dim, or sizes that divide each other.
        ((("x",), ("y",)), None),
        ((("z", "x"), ()), None),
        # In the mesh's order, the parts are listed along the other axis first.
        ((("x", "y"), ("z",)), (("y", "x"), ("z",))),
        ((("y", "x"), ("z",)), (("y", "x"), ("z",))),
    ],
)
def test_a_dim_over_axes_that_do_not_divide_each_other_is_listed_in_another_order(dims, listed):
    mesh = Mesh(("x", "y", "z"), (2, 3, 2))
    sizes = {"x": 2, "y": 3, "z": 2}

    def sub_axes(names):
        return tuple(tilings.SubAxis(name, 1, sizes[name], sizes[name]) for name in names)

    tiling = tilings.sliceable([sub_axes(names) for names in dims], mesh)
    if listed is None:
        assert tiling is None
        return

    # The devices as a grid of the axes, whose dims are brought into the order of the parts.
    order = ["xyz".index(name) for names in listed for name in names]
    devices = np.arange(12).reshape(2, 3, 2).transpose(order).reshape(-1, 1)
    assert tiling.ways == (6, 2)
    assert tiling.devices == tuple(map(tuple, devices.tolist()))
