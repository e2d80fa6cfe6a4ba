"""Arrays of stacks in other forms, against a list of layers."""

import itertools

import numpy as np
import pytest

from lingvo_gshard.checkpoints import stack_forms

# The layers of a block, or None for UNROLLED.
_FORMS = [None, 1, 2, 4]


def _layers(count=4, sizes=(3, 5)):
    rng = np.random.default_rng(0)
    return [rng.normal(size=sizes).astype(np.float32) for _ in range(count)]


def _named(layers, block_size):
    """Returns the arrays of two stacks of these layers, and one that is in no stack."""
    arrays = {"theta.softmax": np.full((2, 3), 7.0, np.float32)}
    for stack, sign in (("theta.encoder", 1), ("theta.decoder", -1)):
        signed = [sign * layer for layer in layers]
        if block_size is None:
            arrays |= {f"{stack}.layers[{i}].ff.wi": layer for i, layer in enumerate(signed)}
        else:
            for j in range(block_size):
                arrays[f"{stack}.block[{j}].ff.wi"] = np.stack(signed[j::block_size])
    return arrays


class _Counting:
    """An array that counts how often it is read."""

    def __init__(self, array):
        self.array = array
        self.shape = array.shape
        self.dtype = array.dtype
        self.reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return self.array[index]


@pytest.mark.parametrize(("before", "after"), itertools.product(_FORMS, _FORMS))
def test_every_form_takes_every_other(before, after):
    layers = _layers()
    wanted = _named(layers, after)
    old = {path: _Counting(array) for path, array in _named(layers, before).items()}
    renamed = stack_forms.Renamed(old, wanted)

    assert list(renamed) == list(wanted)
    for path, array in wanted.items():
        found = renamed[path]
        assert (found.shape, found.dtype) == (array.shape, array.dtype)
        for index in ((slice(None), slice(1, 2)), (slice(0, 1),), (slice(-1, None), slice(0, 2))):
            np.testing.assert_array_equal(found[index], array[index], err_msg=path)
    assert renamed.left() == []


def test_a_stack_is_made_from_a_stack_in_one_read():
    old = {path: _Counting(array) for path, array in _named(_layers(), 1).items()}
    renamed = stack_forms.Renamed(old, _named(_layers(), 2))
    value = renamed["theta.encoder.block[1].ff.wi"][slice(None), slice(None), slice(0, 2)]
    np.testing.assert_array_equal(value, np.stack(_layers()[1::2])[..., :2])
    assert [array.reads for array in old.values()] == [0, 1, 0]


def test_what_was_not_taken_is_left():
    old = _named(_layers(), None) | {"theta.encoder.layers[0].ff.bias": np.zeros(3)}
    renamed = stack_forms.Renamed(old, _named(_layers(), 2))
    for path in renamed:
        renamed[path]
    assert renamed.left() == ["theta.encoder.layers[0].ff.bias"]


def test_another_number_of_layers_is_refused():
    renamed = stack_forms.Renamed(_named(_layers(6), 1), _named(_layers(4), 2))
    message = "^theta.decoder has 4 layers, and 6 in the run to start from: a stack needs as many"
    with pytest.raises(ValueError, match=message):
        renamed["theta.decoder.block[1].ff.wi"]
    assert renamed["theta.softmax"].shape == (2, 3)


def test_layers_of_different_shapes_do_not_stack():
    layers = [*_layers(1), *_layers(1, (8, 3, 5))]
    old = {f"theta.encoder.layers[{i}].ff.wi": layer for i, layer in enumerate(layers)}
    renamed = stack_forms.Renamed(old, {"theta.encoder.block[0].ff.wi": np.zeros((2, 3, 5))})
    message = r"block\[0\].ff.wi: its layers were float32\[3, 5\] and float32\[8, 3, 5\]\.$"
    with pytest.raises(ValueError, match=message):
        renamed["theta.encoder.block[0].ff.wi"]


def test_a_missing_layer_is_named_as_in_the_old_run():
    old = _named(_layers(), 1)
    del old["theta.encoder.block[0].ff.wi"]
    old["theta.encoder.block[0].norm"] = np.zeros((4, 3))
    with pytest.raises(KeyError, match=r"theta.encoder.block\[0\].ff.wi"):
        stack_forms.Renamed(old, _named(_layers(), 2))["theta.encoder.block[1].ff.wi"]
