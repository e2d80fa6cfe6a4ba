"""The placement of tensors in a function and in the program made from it."""

import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding import annotate
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.spmd import annotations
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.annotations import TensorDescription
from tests.spmd import functions
from xla_spmd.mesh import Mesh


def test_the_moe_layer():
    parts = functions.partitioning(4)
    text = annotations.describe(functions.moe_dispatch(parts), parts)
    assert (text.name, text.mesh) == ("moe", Mesh.flat(4))
    whole = [
        ("weights.wi_EMH", (8, 5, 6), "EMH", "d,-,-", (2, 5, 6)),
        ("weights.wo_EHM", (8, 6, 5), "EHM", "d,-,-", (2, 6, 5)),
        ("batch.mask_GSEC", (16, 7, 8, 3), "GSEC", "d,-,-,-", (4, 7, 8, 3)),
        ("batch.x_GSM", (16, 7, 5), "GSM", "d,-,-", (4, 7, 5)),
        ("y_GSM", (16, 7, 5), "GSM", "d,-,-", (4, 7, 5)),
    ]
    got = [(t.name, t.shape, t.dims, t.sharding, t.shard_shape) for t in text.tensors[:5]]
    assert got == whole
    assert [t.shard_bytes for t in text.tensors[:5]] == [240, 240, 2688, 560, 560]
    assert [t.role for t in text.tensors] == ["argument"] * 4 + ["result"] + ["inside"] * 2
    sent, back = text.tensors[5:]
    assert (sent.shape, sent.dims, sent.sharding) == ((8, 16, 3, 5), "EGCM", "d,-,-,-")
    assert (back.shape, back.dims, back.shard_shape) == ((16, 8, 3, 5), "GECM", (4, 8, 3, 5))


def _many_annotations(parts: Partitioning) -> AnnotatedFn:
    """Uses each form of annotation once, including a loop's and a manual one."""

    def fn(state: NestedMap) -> NestedMap:
        x_BM = Annotator(parts).annotate(tf.nn.relu(state.x_BM, name="relu"), "BM")
        two = annotate.shard(tf.abs(x_BM, name="two"), [[0, 1, 2, 3], [4, 5, 6, 7]])
        odd = annotate.shard(tf.square(two, name="odd"), [[7, 6, 5, 4, 3, 2, 1, 0]])
        whole = annotate.replicate(tf.tanh(odd, name="whole"))
        part = Annotator(parts).annotate(tf.cast(whole, tf.bfloat16, name="part"), "_M")
        both = annotate.mesh_split(tf.abs(part, name="both"), parts.mesh, (None, ("y", "x")))
        part = tf.cast(both, tf.bfloat16)

        def body(i, x_BM):
            return i + 1, Annotator(parts).annotate(tf.nn.softmax(x_BM), "BM")

        _, x_BM = tf.while_loop(lambda i, _: i < 5, body, [tf.constant(0), x_BM])
        return NestedMap(part=part, x_BM=x_BM, total=tf.reduce_sum(x_BM))

    args = (NestedMap(x_BM=functions.f32((6, 12), "BM")),)
    return AnnotatedFn("many", fn, ("state",), args, {"x_BM": "BM"})


_TWO_AXES = Partitioning.from_dict(Mesh(("x", "y"), (2, 4)), {"B": "x", "M": "y"})


def test_every_form_of_annotation():
    tensors = annotations.describe(_many_annotations(_TWO_AXES), _TWO_AXES).tensors
    argument, part, total, x_BM, *inside = tensors
    assert argument == TensorDescription(
        "argument", "state.x_BM", "float32", (6, 12), "BM", "x,y", (3, 3)
    )
    assert argument.shard_bytes == 36
    assert (part.role, part.name, part.dtype, part.sharding, part.shard_bytes) == (
        "result", "part", "bfloat16", "replicated", 144,
    )  # fmt: skip
    assert (total.name, total.shape, total.dims, total.shard_bytes) == ("total", (), "", 4)
    assert (x_BM.name, x_BM.sharding) == ("x_BM", "x,y")
    by_name = {tensor.name: tensor for tensor in inside}
    assert {name: (t.dims, t.sharding, t.shard_shape) for name, t in by_name.items()} == {
        "relu": ("BM", "x,y", (3, 3)),
        "two": ("", "x,y", (3, 3)),
        # An uneven dim, in an order that no axes have: 12 over 8 is rounded up.
        "odd": ("", "-,8 ways on 7,6,5,4,3,2,1,0", (6, 2)),
        "whole": ("", "replicated", (6, 12)),
        "part": ("_M", "-,y", (6, 3)),
        "both": ("", "-,y+x", (6, 2)),
        **{name: ("BM", "x,y", (3, 3)) for name in by_name if "Softmax" in name},
    }
    (loop,) = (name for name in by_name if "Softmax" in name)
    assert loop.startswith("while_body")
    assert by_name["part"].shard_bytes == 2 * 6 * 3


def test_the_table():
    parts = functions.partitioning(4)
    described = annotations.describe(functions.moe_dispatch(parts), parts)
    first, head, *lines = described.table().splitlines()
    assert first == "moe on 4 devices: d=4"
    assert head.split() == ["tensor", "dtype", "shape", "dims", "sharding", "shard", "bytes/device"]
    assert len({len(line) for line in lines}) == 1
    assert lines[0].replace(" ", "") == "argumentweights.wi_EMHfloat32[8,5,6]EMHd,-,-[2,5,6]240"
    assert lines[-2].split() == ["argument", "all", "3728"]
    for tensor, line in zip(described.tensors, lines[:-2], strict=True):
        assert tensor.name in line and line.endswith(f" {tensor.shard_bytes}")


@pytest.mark.parametrize(
    ("how", "sharding", "shard_shape"),
    [
        (lambda x: annotate.split(x, 0, 2), "d:(4)2,-", (4, 6)),
        (lambda x: annotate.split(x, 0, 4), "d:(2)4,-", (2, 6)),
        (lambda x: annotate.shard(x, [[3, 1], [0, 2]]), "2,2 ways on 3+7,1+5,0+4,2+6", (4, 3)),
    ],
)
def test_few_slices_have_several_devices_each(how, sharding, shard_shape):
    args = (NestedMap(x=functions.f32((8, 6), "__")),)
    fn = AnnotatedFn("few", lambda s: NestedMap(y=2.0 * how(tf.abs(s.x))), ("state",), args)
    *_, inside = annotations.describe(fn, functions.partitioning(8)).tensors
    assert (inside.sharding, inside.shard_shape) == (sharding, shard_shape)


def test_an_uneven_argument_is_described_by_its_largest_part():
    described = annotations.describe(functions.sgd_step(), functions.partitioning(3))
    x_BM = next(tensor for tensor in described.tensors if tensor.name == "batch.x_BM")
    assert (x_BM.shape, x_BM.sharding, x_BM.shard_shape) == ((16, 5), "d,-", (6, 5))
