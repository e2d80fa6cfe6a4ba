"""Arrays of stacks in other forms, against a list of layers."""

import itertools

import numpy as np
import pytest

from lingvo_gshard.checkpoints import restacked
from tests.checkpoints import in_memory

# The number of layers of a block, perhaps after the number of layers before the first block; None
# for UNROLLED.
_FORMS = [None, 1, 2, 4, (1, 1), (2, 2)]


def _layers(count=4, sizes=(3, 5)):
    rng = np.random.default_rng(0)
    return [rng.normal(size=sizes).astype(np.float32) for _ in range(count)]


def _named(layers, block_size):
    """Returns the arrays of two stacks of these layers, and one outside of stacks."""
    arrays = {"theta.softmax": np.full((2, 3), 7.0, np.float32)}
    for stack, sign in (("theta.encoder", 1), ("theta.decoder", -1)):
        signed = [sign * layer for layer in layers]
        if block_size is None:
            arrays |= {f"{stack}.layers[{i}].ff.wi": layer for i, layer in enumerate(signed)}
        else:
            first, size = block_size if isinstance(block_size, tuple) else (0, block_size)
            for i in range(first):
                arrays[f"{stack}.layers[{i}].ff.wi"] = signed[i]
            for j in range(size):
                arrays[f"{stack}.block[{j}].ff.wi"] = np.stack(signed[first + j :: size])
    return arrays


def _files(arrays):
    """Returns the files of arrays by path, which have fingerprints."""
    files = {}
    for path, values in arrays.items():
        files[path] = in_memory.File(values, "RMH"[-values.ndim :], path)
    return files


def _renamed(old, new):
    files = _files(old)
    return restacked.Renamed({path: file.array for path, file in files.items()}, new), files


@pytest.mark.parametrize(("before", "after"), itertools.product(_FORMS, _FORMS))
def test_every_form_converts_to_every_other_form(before, after):
    layers = _layers()
    wanted = _named(layers, after)
    renamed, _ = _renamed(_named(layers, before), wanted)

    assert list(renamed) == list(wanted)
    for path, array in wanted.items():
        found = renamed[path]
        assert (found.shape, found.dtype) == (array.shape, array.dtype)
        for index in (np.s_[:, 1:2], np.s_[0:1, :], np.s_[-1:, 0:2]):
            np.testing.assert_array_equal(found[index], array[index], err_msg=path)
    assert renamed.left() == []


def test_layers_are_checked_by_the_fingerprints_of_the_old_run():
    old = _named(_layers(), 1)
    renamed, files = _renamed(old, _named(_layers(), 2))
    files["theta.encoder.block[0].ff.wi"].values[3, 0, 0] += 1
    message = r"^theta\.encoder\.block\[0\]\.ff\.wi is not what was saved"
    with pytest.raises(ValueError, match=message):
        renamed["theta.encoder.block[1].ff.wi"][0:1, :]
    np.testing.assert_array_equal(renamed["theta.decoder.block[1].ff.wi"][0:1, :], [-_layers()[1]])


def test_unused_arrays_remain_in_the_checkpoint():
    old = _named(_layers(), None) | {"theta.encoder.layers[0].ff.bias": np.zeros((3, 2))}
    renamed, _ = _renamed(old, _named(_layers(), 2))
    for path in renamed:
        renamed[path]
    assert renamed.left() == ["theta.encoder.layers[0].ff.bias"]


def test_another_number_of_layers_is_refused():
    renamed, _ = _renamed(_named(_layers(6), 1), _named(_layers(4), 2))
    message = "^theta.decoder has 4 layers, and 6 in the run to start from: a stack needs as many"
    with pytest.raises(ValueError, match=message):
        renamed["theta.decoder.block[1].ff.wi"]
    assert renamed["theta.softmax"].shape == (2, 3)


def test_layers_of_different_shapes_do_not_stack():
    layers = [*_layers(1), *_layers(1, (8, 3, 5))]
    old = {f"theta.encoder.layers[{i}].ff.wi": layer for i, layer in enumerate(layers)}
    renamed, _ = _renamed(old, {"theta.encoder.block[0].ff.wi": np.zeros((2, 3, 5))})
    message = r"block\[0\].ff.wi: its layers were float32\[3, 5\] and float32\[8, 3, 5\]\.$"
    with pytest.raises(ValueError, match=message):
        renamed["theta.encoder.block[0].ff.wi"]


def test_a_missing_layer_is_named_as_in_the_old_run():
    old = _named(_layers(), 1)
    del old["theta.encoder.block[0].ff.wi"]
    old["theta.encoder.block[0].norm"] = np.zeros((4, 3))
    renamed, _ = _renamed(old, _named(_layers(), 2))
    with pytest.raises(KeyError, match=r"theta.encoder.block\[0\].ff.wi"):
        renamed["theta.encoder.block[1].ff.wi"]
