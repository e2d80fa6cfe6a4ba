"""Annotations by the letters of dims."""

import pytest
import tensorflow as tf

from lingvo_gshard.sharding.annotator import DIMS_ATTRIBUTE, Annotator
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from xla_spmd.mesh import Mesh

_TWO = Partitioning.from_dict(Mesh(("x", "y"), (2, 3)), {"B": "x", "R": "x", "H": "y"})


@pytest.fixture(autouse=True)
def graph():
    with tf.Graph().as_default() as graph:
        yield graph


def _states():
    return tf.zeros([2, 3, 2], name="states")


def test_an_annotation_keeps_its_letters():
    annotated = Annotator(_TWO).annotate(_states(), "BH_")
    assert annotated.shape == [2, 3, 2]
    assert annotated.op.type == "XlaSharding"
    assert annotated.op.get_attr(DIMS_ATTRIBUTE) == b"BH_"


def test_an_annotation_inside_a_map_names_the_mapped_dim():
    annotator = Annotator(_TWO).over("R")
    assert annotator.annotate(_states(), "BH_").op.get_attr(DIMS_ATTRIBUTE) == b"RBH_"
    with pytest.raises(ValueError, match="dims 'RRH_' name R twice"):
        annotator.annotate(_states(), "RH_")


def test_a_tensor_outside_a_map_is_whole_along_the_axes_of_the_mapped_dim():
    mapped = Annotator(_TWO).over("R").annotate_outside(_states(), "BH_")
    without_B = Annotator(_TWO).annotate(_states(), "_H_")
    split = Annotator(_TWO).annotate(_states(), "BH_")
    assert mapped.op.get_attr("sharding") == without_B.op.get_attr("sharding")
    assert mapped.op.get_attr("sharding") != split.op.get_attr("sharding")
    assert mapped.op.get_attr(DIMS_ATTRIBUTE) == b"BH_"


def test_a_letter_is_needed_for_each_dim():
    with pytest.raises(ValueError, match=r"annotate: states.* rank 3, but dims 'BLMH' name 4"):
        Annotator(_TWO).annotate(_states(), "BLMH")


def test_a_letter_names_one_dim():
    message = r"annotate: states:0 of shape \(2, 3, 2\): dims 'BLB' name B twice"
    with pytest.raises(ValueError, match=message):
        Annotator(_TWO).annotate(_states(), "BLB")


def test_the_dims_of_a_gradient():
    assert Annotator(_TWO).gradient_dims("MH") == "mh"
    assert Annotator(_TWO, scatter_gradients=False).gradient_dims("MH") == "MH"


def test_factors():
    assert Annotator(_TWO).factor("BMH") == (2, 1, 3)


def test_a_stack_has_its_own_rows():
    rows = {"B": "x", "H": "y", "encoder.B": ("x", "y"), "encoder.H": ()}
    annotator = Annotator(Partitioning.from_dict(_TWO.mesh, rows))
    inside = annotator.in_stack("encoder")
    assert annotator.in_stack("decoder") is annotator and inside.stack == "encoder"
    assert (annotator.factor("BH"), inside.factor("BH")) == ((2, 3), (6, 1))

    spec = TensorSpec((6, 3), "float32", "BH", "encoder")
    by_spec = annotator.annotate_as(tf.zeros([6, 3]), spec)
    by_stack = inside.annotate(tf.zeros([6, 3]), "BH")
    outside = annotator.annotate(tf.zeros([6, 3]), "BH")
    assert by_spec.op.get_attr("sharding") == by_stack.op.get_attr("sharding")
    assert by_spec.op.get_attr("sharding") != outside.op.get_attr("sharding")
