"""The programs of the benchmark run, and send bytes where the table lists them."""

import numpy as np
import pytest

from bench import uneven

_ROWS = 16
_NUM_DEVICES = 2


def _pair(kind, name):
    (pair,) = [
        pair
        for pair in uneven.pairs(_ROWS, _NUM_DEVICES)
        if pair.kind == kind and pair.name.startswith(name)
    ]
    return pair


def test_only_a_split_dim_sends_a_halo():
    pair = _pair("halo", "convolution")
    plain = pair.plain()
    costly = pair.costly()
    report = costly.executable.report()
    assert report.count("collective-permute") > 0
    assert plain.executable.report().count("collective-permute") == 0
    assert costly.collective_bytes > plain.collective_bytes

    (ratio,) = uneven.ratios(plain, costly, rounds=1, calls=1)
    assert ratio > 0


def test_an_uneven_program_computes_its_own_rows():
    pair = _pair("uneven", "softmax over rows, 15 rows beside 16")
    shapes = [
        measured.executable(measured.batch).d.shape for measured in (pair.plain(), pair.costly())
    ]
    assert shapes == [(16, 256), (15, 256)]


@pytest.mark.parametrize("name", ["reverse", "segment sum"])
def test_a_repair_changes_the_program(name):
    pair = _pair("repair", name)
    plain = pair.plain()
    costly = pair.costly()
    assert plain.collective_bytes != costly.collective_bytes
    assert np.isfinite(np.asarray(costly.executable(costly.batch).y))
