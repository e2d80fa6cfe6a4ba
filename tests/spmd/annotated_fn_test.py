"""Requirements for a function to be traced, and errors that name the problem."""

import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.spmd import annotated_fn
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from tests.spmd import functions
from xla_spmd.mesh import Mesh

_STATE = (NestedMap(x_BM=TensorSpec((4, 3), "float32", "BM")),)


def test_results_get_the_dims_of_donated_arguments_and_of_names():
    """Other results are whole, or begin with `unnamed_dims`."""

    def fn(state):
        return NestedMap(state=state, y=state.x_BM, z=tf.transpose(state.x_BM), loss=1.0)

    annotated = AnnotatedFn(
        "f", fn, ("state",), _STATE, result_dims={"y": "_M"}, donate=("state",), unnamed_dims="B"
    )
    _, results = annotated_fn.trace(annotated, functions.partitioning(1))
    dims = {path: spec.dims for path, spec in results.FlattenItems()}
    assert dims == {"state.x_BM": "BM", "y": "_M", "z": "B_", "loss": ""}
    assert results.z == TensorSpec((3, 4), "float32", "B_")


def test_results_belong_to_the_stacks_of_donated_and_named_arguments():
    state = NestedMap(w=TensorSpec((4, 6), "float32", "MH", "encoder"))
    annotated = AnnotatedFn(
        "f",
        lambda state: NestedMap(state=state, y=2.0 * state.w, z=3.0 * state.w),
        ("state",),
        (state,),
        result_dims={"y": "MH", "z": "MH"},
        donate=("state",),
        result_stacks={"y": "encoder"},
    )
    rows = Partitioning.parse(Mesh.flat(2), "M:d,encoder.M:-,encoder.H:d")
    _, results = annotated_fn.trace(annotated, rows)
    assert results.state.w == results.y == state.w
    assert rows.shard_shape(results.y) == (4, 3) and rows.shard_shape(results.z) == (2, 6)


def test_a_name_for_each_argument_is_needed():
    with pytest.raises(ValueError, match=r"f: 2 argument names \('a', 'b'\) but 1 arguments"):
        AnnotatedFn("f", lambda s: s, ("a", "b"), _STATE)


def _identity_of(x_BM: tf.Tensor) -> NestedMap:
    return NestedMap(state=NestedMap(x_BM=x_BM))


@pytest.mark.parametrize(
    ("fn", "dims", "message"),
    [
        (lambda s: _identity_of(s.x_BM[:, :2]), {}, r"argument state.x_BM is .*\(4, 3\)"),
        (lambda s: NestedMap(), {}, "state.x_BM is .* comes back as None"),
        (lambda s: _identity_of(s.x_BM), {"y": "B"}, "no result y is returned"),
        (
            lambda s: NestedMap(_identity_of(s.x_BM), y=tf.boolean_mask(s.x_BM, s.x_BM > 0)),
            {},
            "result y has shape .* a static shape is expected",
        ),
    ],
)
def test_a_result_that_breaks_the_contract_is_refused(fn, dims, message):
    annotated = AnnotatedFn("f", fn, ("state",), _STATE, dims, ("state",))
    with pytest.raises(ValueError, match=message):
        annotated_fn.trace(annotated, functions.partitioning(2))


def test_a_variable_is_refused():
    variable = tf.Variable([1.0, 2.0, 3.0], name="hidden_weight")
    annotated = AnnotatedFn("f", lambda s: _identity_of(s.x_BM + variable), ("state",), _STATE)
    with pytest.raises(ValueError, match="reads the variables hidden_weight"):
        annotated_fn.trace(annotated, functions.partitioning(2))


def test_an_unknown_donated_argument_is_refused():
    with pytest.raises(ValueError, match="donates 'weights', which is not one of"):
        AnnotatedFn("f", lambda s: s, ("state",), _STATE, donate=("weights",))
