"""Which rows of a batch are a process's."""

import numpy as np
import pytest

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.spmd import specs
from lingvo_gshard.train import rows
from lingvo_gshard.train.rows import WHOLE, Share


@pytest.mark.parametrize(
    ("held", "want"),
    [
        # Rows over the processes' devices, in their order, or not.
        ({0: {0, 1}, 1: {2, 3}}, [Share(0, 2), Share(1, 2)]),
        ({0: {2, 3}, 1: {0, 1}}, [Share(1, 2), Share(0, 2)]),
        # Two processes hold the same rows; all hold all rows.
        ({0: {0, 1}, 1: {0, 1}, 2: {2, 3}}, [Share(0, 2), Share(0, 2), Share(1, 2)]),
        ({0: {0, 1, 2}, 1: {0, 1, 2}}, [WHOLE, WHOLE]),
        # Not adjacent; not on a part's border; not equally many.
        ({0: {0, 2}, 1: {1, 3}}, [WHOLE, WHOLE]),
        ({0: {0, 3}, 1: {1, 2}}, [WHOLE, WHOLE]),
        ({0: {0}, 1: {1, 2, 3}}, [WHOLE, WHOLE]),
    ],
)
def test_the_share_of_each_process(held, want):
    size = 1 + max(max(part) for part in held.values())
    assert [rows.share_of(held, process, size) for process in held] == want


def test_one_process_holds_all():
    assert rows.own_share(Partitioning.from_dict(Mesh.flat(4), {"B": "d"})) == WHOLE
    batch = NestedMap(x=np.zeros((2, 3)))
    assert rows.assembled(batch, NestedMap(), NestedMap(), WHOLE) is batch


def test_rows_of_all_along_their_dim_alone():
    assert rows.of_all((5, 2, 3), "KBL", Share(1, 4)) == (5, 8, 3)
    assert rows.of_all((5, 2), "VM", Share(1, 4)) == (5, 2)


def test_other_than_the_share_is_refused():
    parts = Partitioning.from_dict(Mesh.flat(4), {"B": "d"})
    spec = NestedMap(x=TensorSpec((8, 3), "float32", "BL"))
    shardings = specs.shardings(parts, spec, specs.device_mesh(parts))
    with pytest.raises(ValueError, match=r"batch.x: \[8, 3\] given, \[8, 3\] with one of 2"):
        rows.assembled(NestedMap(x=np.zeros((8, 3))), spec, shardings, Share(0, 2))
