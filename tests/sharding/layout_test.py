"""The table from letters to mesh axes."""

import pytest

from lingvo_gshard.sharding.layout import Partitioning, TensorSpec, is_weight
from xla_spmd.mesh import Mesh

_FLAT = Partitioning.from_dict(Mesh.flat(4), {"B": "d", "G": "d", "E": "d"})
_TWO = Partitioning.from_dict(Mesh(("x", "y"), (2, 3)), {"B": "x", "E": "x", "H": "y"})
# Experts x data: as many partitions as groups, but fewer experts.
_BOTH = Partitioning.from_dict(
    Mesh(("x", "y"), (2, 3)), {"B": ("x", "y"), "G": ("x", "y"), "E": "y"}
)


@pytest.mark.parametrize(
    ("parts", "dims", "axes", "factor"),
    [
        (_FLAT, "EGCM", ("d", None, None, None), (4, 1, 1, 1)),
        (_FLAT, "GECM", ("d", None, None, None), (4, 1, 1, 1)),
        (_FLAT, "MEC", (None, "d", None), (1, 4, 1)),
        (_FLAT, "_M", (None, None), (1, 1)),
        (_FLAT, "", (), ()),
        (_TWO, "EMH", ("x", None, "y"), (2, 1, 3)),
        (_TWO, "HBE", ("y", "x", None), (3, 2, 1)),
        (_BOTH, "BM", (("x", "y"), None), (6, 1)),
        (_BOTH, "GECM", (("x", "y"), None, None, None), (6, 1, 1, 1)),
        (_BOTH, "EGCM", ("y", "x", None, None), (3, 2, 1, 1)),
    ],
)
def test_the_first_letter_whose_axis_is_free_takes_it(parts, dims, axes, factor):
    assert parts.axes(dims) == axes
    assert parts.factor(dims) == factor


def test_shard_shapes_round_up():
    assert _FLAT.shard_shape(TensorSpec((15, 7), "float32", "BM")) == (4, 7)
    assert _TWO.shard_shape(TensorSpec((4, 5, 10), "float32", "EMH")) == (2, 5, 4)


def test_a_table_that_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="a letter is used twice"):
        Partitioning(Mesh.flat(2), (("B", "d"), ("B", "d")))
    for axis in ("e", ("d", "e")):
        with pytest.raises(ValueError, match="no axis 'e' in .*; the axes are d"):
            Partitioning(Mesh.flat(2), (("B", axis),))
    with pytest.raises(ValueError, match=r"an axis is used twice, 'd' in \('d', 'd'\)"):
        Partitioning(Mesh.flat(2), (("B", ("d", "d")),))


@pytest.mark.parametrize("key", ["BM", "_", ""])
def test_a_key_that_no_dim_could_have_is_refused(key):
    with pytest.raises(ValueError, match=f"expected single letters, got '{key}'"):
        Partitioning.from_dict(Mesh.flat(2), {"B": "d", key: "d"})


def test_a_spec_has_a_letter_for_each_dim():
    with pytest.raises(ValueError, match=r"shape \(2, 3\) has rank 2, but dims 'BLM' name 3"):
        TensorSpec((2, 3), "float32", "BLM")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (((2, -3), "float32", "BL"), r"shape \(2, -3\): expected the size of each dim"),
        (((2, 3), "flaot32", "BL"), "dtype 'flaot32': expected a name such as 'float32'"),
        (((2, 3), "float32", "B1"), "dims 'B1': expected letters, or `_`"),
        (((2, 3), "float32", ("B", "L")), "dims: expected a letter for each dim, .*, got tuple"),
    ],
)
def test_a_spec_that_no_tensor_could_have_is_refused(args, message):
    with pytest.raises(ValueError, match=f"TensorSpec: {message}"):
        TensorSpec(*args)
    assert TensorSpec((2, 3), "float", "BL").dtype == "float64"  # NumPy's name.


def test_a_table_needs_a_mesh_and_letters():
    with pytest.raises(ValueError, match="Partitioning: mesh: expected a Mesh, .*, got int 4"):
        Partitioning.from_dict(4, {"B": "d"})
    with pytest.raises(ValueError, match="Partitioning: table: expected a dict, .*, got list"):
        Partitioning.from_dict(Mesh.flat(4), [("B", "d")])


def test_a_dim_is_named_once():
    with pytest.raises(ValueError, match=r"shape \(2, 3, 2\): dims 'BLB' name B twice"):
        TensorSpec((2, 3, 2), "float32", "BLB")
    assert TensorSpec((2, 3, 2), "float32", "_L_").dims == "_L_"


def test_other_letters_stand_in_for_a_missing_row():
    """The optimizer's dims use their capitals' axes, and the batch at the softmax uses B's."""
    partitioning = Partitioning.from_dict(Mesh(("x", "y"), (2, 3)), {"B": "x", "H": "y", "e": "x"})
    assert partitioning.axes("UhE") == ("x", "y", None)
    assert partitioning.axes("eh") == ("x", "y")
    assert partitioning.axes("u") == (None,)


def test_a_table_in_text():
    mesh = Mesh(("x", "y"), (2, 3))
    wanted = Partitioning.from_dict(mesh, {"B": ("x", "y"), "G": ("x", "y"), "E": "y", "U": ()})
    assert Partitioning.parse(mesh, "BG:x+y, E:y,U:-") == wanted
    assert Partitioning.parse(mesh, "") == Partitioning(mesh, ())
    for text in ("BGE", "B:", ":x", "B:x,,E:y"):
        with pytest.raises(ValueError, match="expected letters with their axes"):
            Partitioning.parse(mesh, text)


_SQUARE = Mesh(("x", "y"), (2, 3))


def test_a_row_for_only_weights():
    """The dims of "An Efficient 2D Method": two rows of M."""
    table = Partitioning.parse(_SQUARE, "BGE:x,M:y,weights.M:x,HNV:y")
    axes = {
        "BLM": ("x", None, "y"),
        "BLH": ("x", None, "y"),
        "GSM": ("x", None, "y"),
        "ULM": ("x", None, "y"),
        "MH": ("x", "y"),
        "HM": ("y", "x"),
        "MND": ("x", "y", None),
        "EMH": ("x", None, "y"),  # E takes x first.
        "M": ("x",),
    }
    for dims, expected in axes.items():
        assert table.axes(dims) == expected, dims

    # The optimizer's dims use the weights' rows, unless they have separate rows.
    assert table.axes("mh") == ("x", "y")
    own = Partitioning.parse(_SQUARE, "B:x,M:y,weights.M:x,m:-")
    assert (own.axes("mh"), own.axes("MH")) == ((None, None), ("x", None))


def test_rows_for_a_stack_replace_those_of_the_model():
    table = Partitioning.parse(
        _SQUARE, "BG:x,HN:y,m:x,encoder.BG:x+y,encoder.HN:-,decoder.weights.M:x"
    )
    encoder = Partitioning.parse(_SQUARE, "BG:x+y,HN:-,m:x")
    assert table.stacks == {"encoder", "decoder"}
    assert table.in_stack("encoder") == encoder
    assert table.in_stack("decoder") == Partitioning.parse(_SQUARE, "BG:x,HN:y,m:x,weights.M:x")
    assert table.in_stack("elsewhere") is table and encoder.in_stack("encoder") is encoder

    # Tensors outside the stacks use the whole model's rows.
    for stack, axes in {"": (None, "y"), "encoder": (None, None), "decoder": ("x", "y")}.items():
        spec = TensorSpec((4, 6), "float32", "MH", stack)
        assert table.axes_of(spec) == axes
        ways = tuple(map(_SQUARE.size, axes))
        assert table.shard_shape(spec) == (4 // ways[0], 6 // ways[1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("weights.m:x", "a lowercase letter names a dim of the optimizer, .*; write 'm'"),
        ("encoder.weights.m:x", "a lowercase letter names .*; write 'encoder.m'"),
        ("weights.B:x", "'weights.B': no weight has the dim B"),
        ("weights.encoder.M:x", "got 'weights.encoder.M' .* key weights.M, one for a stack"),
        ("a.b.M:x", "expected single letters, got 'a.b.M'"),
        (".M:x", "expected single letters, got '.M'"),
        ("weights.:x", "expected letters with their axes"),
        ("weights.M:x,weights.M:y", "a letter is used twice"),
    ],
)
def test_a_wrong_scope_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Partitioning.parse(_SQUARE, text)


@pytest.mark.parametrize(
    ("dims", "expected"),
    [("MH", True), ("rmh", True), ("_", True), ("BLM", False), ("EGH", False), ("ULV", False)],
)
def test_a_weight_has_no_rows(dims, expected):
    assert is_weight(dims) is expected


def test_order_of_the_table_does_not_matter():
    one = Partitioning.from_dict(Mesh.flat(2), {"B": "d", "E": "d"})
    assert one == Partitioning.from_dict(Mesh.flat(2), {"E": "d", "B": "d"})
    assert one.mesh.num_partitions == 2
