"""Weights of another run: the rules, their errors, and the printed lines."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lingvo_gshard.checkpoints import warm_start
from lingvo_gshard.checkpoints.checkpoints import Checkpoints
from lingvo_gshard.checkpoints.warm_start import PieceRows, Rule, WarmStart
from tests.checkpoints import in_memory
from tests.train import regression
from tests.train.regression import H, V


def _random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _begin(rule, before, new, dims, **options):
    start = WarmStart("old", ((r"a\..*", rule),), **options)
    before_dims = dims if before.ndim == new.ndim else re.sub("[Ee]", "", dims)
    old = {"a.w": in_memory.array(before, before_dims, "a.w")}
    value, line = start.first_value("a.w", dims, old, jnp.asarray(new))
    return np.asarray(value), line


def test_the_first_rule_that_matches_the_whole_path_holds():
    start = WarmStart("old", ((r"theta\.x", Rule.SAME), (r"theta\..*", Rule.COPY_EXPERTS)))
    value = jnp.zeros(2)
    zeros = in_memory.array(np.zeros(2, np.float32), "_")
    old = dict.fromkeys(("theta.x", "theta.xy", "step", "slots.theta.x"), zeros)
    assert [start.first_value(path, "_", old, value)[1] for path in old] == [
        "theta.x: restored, float32[2]",
        "theta.xy: float32[2] copied to float32[2]",
        "step: new, float32[2]",
        "slots.theta.x: new, float32[2]",
    ]


def test_experts_grow_by_copies():
    before, new = _random(2, 3, 5), _random(6, 3, 5, seed=1)
    value, line = _begin(Rule.COPY_EXPERTS, before, new, "EMH")
    for expert in range(6):
        np.testing.assert_array_equal(value[expert], before[expert % 2])
    assert line == "a.w: float32[2, 3, 5] copied to float32[6, 3, 5]"
    # The gate's columns follow their experts.
    gate, _ = _begin(Rule.COPY_EXPERTS, before[0, :, :2], new[0, :, :4], "M_")
    np.testing.assert_array_equal(gate[:, 3], before[0, :, 1])


@pytest.mark.parametrize(("dims", "shape"), [("EMH", (3, 5)), ("REMH", (2, 3, 5)), ("em", (3,))])
def test_a_layer_without_experts_becomes_each_of_them(dims, shape):
    """The array is of a layer, of a stack, or an optimizer's slot with lowercase letters."""
    before = _random(*shape)
    axis = dims.upper().index("E")
    new_shape = [*shape[:axis], 4, *shape[axis:]]
    value, line = _begin(Rule.COPY_EXPERTS, before, _random(*new_shape, seed=1), dims)
    for expert in range(4):
        np.testing.assert_array_equal(np.take(value, expert, axis), before)
    one = [*shape[:axis], 1, *shape[axis:]]
    assert line == f"a.w: float32{one} copied to float32{new_shape}"


def test_arrays_for_several_devices_are_read_once():
    file = in_memory.File(_random(2, 3), "EM", chunk_shape=(1, 3))
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("experts", "copies"))
    new = jax.device_put(_random(4, 3), NamedSharding(mesh, PartitionSpec("experts")))
    start = WarmStart("old", ((".*", Rule.COPY_EXPERTS),))
    value, _ = start.first_value("a.w", "EM", {"a.w": file.array}, new)
    np.testing.assert_array_equal(value, np.tile(file.values, (2, 1)))
    assert [index[0] for index in file.reads] == [slice(0, 1), slice(1, 2)]


@pytest.mark.parametrize("dims", ["VM", "MV"])
def test_a_vocabulary_changes_piece_by_piece(dims):
    rows = warm_start.rows_by_piece(["<pad>", "a", "b", "c"], ["<pad>", "c", "x", "a", "y"])
    assert rows.ids.tolist() == [0, 3, -1, 1, -1]
    before, new = _random(4, 3), _random(5, 3, seed=1)
    transpose = np.transpose if dims == "MV" else np.asarray
    value, line = _begin(
        Rule.BY_PIECE, transpose(before), transpose(new), dims, pieces=((r"a\..*", rows),)
    )
    want = np.stack([before[0], before[3], new[2], before[1], new[4]])
    np.testing.assert_array_equal(transpose(value), want)
    assert "restored 3 of 5 pieces, the others new" in line


@pytest.mark.parametrize("dims", ["VM", "MV"])
def test_new_pieces_start_at_means_of_old_ones(dims):
    old, new = ["<pad>", "a", "b", "c"], ["<pad>", "a", "b", "c", "like a", "new", "like b and c"]
    like = (("like b and c", "b c"), ("like a", "a"))
    rows = warm_start.rows_by_piece(old, new, like)
    assert rows.ids.tolist() == [0, 1, 2, 3, 5, -1, 4] and rows.means == ((2, 3), (1,))

    before, initial = _random(4, 3), _random(7, 3, seed=1)
    transpose = np.transpose if dims == "MV" else np.asarray
    pieces = ((r"a\..*", rows),)
    value, line = _begin(Rule.BY_PIECE, transpose(before), transpose(initial), dims, pieces=pieces)
    mean = (before[2] + before[3]) / 2
    want = np.stack([*before, before[1], initial[5], mean])
    np.testing.assert_allclose(transpose(value), want, rtol=1e-6)
    assert "restored 6 of 7 pieces, the others new" in line


@pytest.mark.parametrize(
    ("like", "message"),
    [
        (("a", "b"), "a is in the old vocabulary already"),
        (("x", "b q"), "q, for x, is not in the old vocabulary"),
        (("x", " "), r"expected pairs such as .* got \('x', ' '\)"),
    ],
)
def test_invalid_sources_of_new_pieces_are_refused(like, message):
    with pytest.raises(ValueError, match=f"^train.warm_start_pieces: .*{message}"):
        warm_start.rows_by_piece(["a", "b"], ["a", "b", "x"], (like,))


@pytest.mark.parametrize(
    ("rule", "before", "shape", "dims", "message"),
    [
        (
            Rule.SAME,
            (2, 3),
            (4, 3),
            "EM",
            r"a.w is float32\[2, 3\], .*\[4, 3\]; rule SAME needs the same",
        ),
        (
            Rule.COPY_EXPERTS,
            (2, 3),
            (3, 3),
            "EM",
            r"float32\[3, 3\]; rule COPY_EXPERTS needs a multiple",
        ),
        (Rule.COPY_EXPERTS, (2, 3), (2, 3, 1), "EMH", r"this model's float32\[2, 3, 1\]"),
        (Rule.BY_PIECE, (2, 3), (4, 3), "VM", "a.w: rule BY_PIECE, but no vocabulary is known"),
        # Whole copies of a dense layer's hidden units are not experts.
        (Rule.COPY_EXPERTS, (3, 5), (4, 3, 10), "EMH", "the experts must have the shape of the d"),
        (Rule.SAME, (3, 5), (4, 3, 5), "EMH", r"this model's float32\[4, 3, 5\]\.$"),
    ],
)
def test_shapes_that_do_not_suit_the_rule_are_refused(rule, before, shape, dims, message):
    with pytest.raises(ValueError, match=message):
        _begin(rule, _random(*before), _random(*shape), dims)


def test_a_missing_array_is_named():
    start = WarmStart("old", ((".*", Rule.SAME),))
    with pytest.raises(ValueError, match="old has no a.w, which rule SAME needs"):
        start.first_value("a.w", "M", {}, jnp.zeros(3))


def _train(folder, max_steps, **options):
    estimator = regression.make(folder, 2, **options)
    return estimator.train(lambda p: regression.Batches(), max_steps=max_steps)


def _arrays(folder, step):
    with Checkpoints(folder) as saved:
        return {path: array[()] for path, array in saved.arrays(step).items()}


_RULES = (("theta.*", Rule.SAME),)


@pytest.mark.slow
def test_a_run_starts_from_another_runs_folder_or_file(tmp_path, capsys):
    old = _train(tmp_path / "old", 4)
    printed = old.export_weights(tmp_path / "old.safetensors")
    assert f"theta.w_HV    float32[{H}, {V}]" in printed and "2 tensors, 27 weights" in printed
    for name in ("old", "old.safetensors"):
        begun = tmp_path / f"from_{name}"
        _train(begun, 1, warm_start=WarmStart(str(tmp_path / name), _RULES))
    printed = capsys.readouterr().out
    assert "theta.w_HV: restored, float32[8, 3]" in printed
    assert " arrays that are not weights, such as slots: new" in printed
    from_folder = _arrays(tmp_path / "from_old", 1)
    from_file = _arrays(tmp_path / "from_old.safetensors", 1)
    for path, array in from_folder.items():
        np.testing.assert_array_equal(array, from_file[path], err_msg=path)
    # It equals the old run's fifth step, except that the batch and the momentum are new.
    assert from_folder["step"] == 1
    moved = from_folder["theta.w_HV"] - _arrays(tmp_path / "old", 4)["theta.w_HV"]
    np.testing.assert_allclose(moved, -0.05 * from_folder["momentum.w_HV"], rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_a_run_with_checkpoints_continues_from_them(tmp_path, capsys):
    _train(tmp_path / "old", 2)
    _train(tmp_path / "new", 2)
    _train(tmp_path / "new", 3, warm_start=WarmStart(str(tmp_path / "old"), _RULES))
    assert "restored" not in capsys.readouterr().out


def test_an_invalid_source_is_refused(tmp_path):
    for name in ("nothing", "nothing.safetensors"):
        with pytest.raises((ValueError, FileNotFoundError), match=name):
            _train(tmp_path / "new", 1, warm_start=WarmStart(str(tmp_path / name), _RULES))


@pytest.mark.parametrize("rule", [Rule.SAME, Rule.COPY_EXPERTS])
def test_another_vocabulary_of_the_same_size_is_refused(rule):
    given = (rule, _random(2, 3), _random(2, 3, seed=1), "VM")
    with pytest.raises(ValueError, match="a.w: the source has another vocabulary: try BY_PIECE"):
        _begin(*given, pieces=((r"a\..*", PieceRows(np.array([1, 0]))),))
    value, _ = _begin(*given, pieces=((r"a\..*", PieceRows(np.array([0, 1]))),))
    np.testing.assert_array_equal(value, given[1])
