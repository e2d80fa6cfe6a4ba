"""Figure 1 and Tables 1 to 3 beside ours, with and without plans."""

import dataclasses
import functools

import pytest

from lingvo_gshard.layers.numerics import Remat
from repro.tables import paper, paper_text
from repro.tables.as_printed import FAMILY
from repro.tables.family import PlannedRun
from tests.xla_plan import samples
from xla_plan.plans.program_plan import Batch

_PEAK_FLOPS = 61.5e12  # A TPU v3 core's peak, from its page.


@functools.cache
def _rows():
    return paper.rows(None)


def _cells(text, name):
    """Returns the cells after a model's name, a list for each line that begins with its row."""
    found = []
    for line in text.splitlines():
        before, has_name, after = line.partition(name)
        if has_name and before.strip(" |") in ("", "*", "(1)", "(6)"):
            found.append(after.replace("|", " ").split())
    return found


@pytest.mark.slow
def test_days_and_core_years_follow_from_the_printed_rates_as_they_are_printed():
    for row in _rows():
        if row.run.steps_per_sec is None:
            assert row.days is row.core_years is None
        else:
            assert row.days == pytest.approx(row.run.days, rel=0.1)
            assert row.core_years == pytest.approx(row.run.core_years, rel=0.1)


@pytest.mark.slow
def test_the_share_of_the_peak_by_hand():
    """MoE(128E, 12L): 6 flops per weight and token, 2 experts, attention to 256 tokens."""
    row = _rows()[0]
    assert row.run.name == "MoE(128E, 12L)"
    attention, ffn, gate, layers = 4 * 1024 * 2048, 2 * 1024 * 8192, 1024 * 128, 6
    encoder = layers * attention + 3 * ffn + 3 * (2 * ffn + gate)
    decoder = encoder + layers * attention + 1024 * 32_000
    pairs = layers * 2 * 256 * 2048 * 3  # Per token: the encoder's, and the decoder's two.
    flops = 6 * 2**20 * (encoder + decoder + pairs)
    assert row.own.step_flops == pytest.approx(flops, rel=1e-3)
    share = flops * 2.16 / 128 / _PEAK_FLOPS
    assert row.share_of_peak(half=False) == pytest.approx(share, rel=1e-3)
    assert row.share_of_peak(half=True) == pytest.approx(share / 2, rel=1e-3)


@pytest.mark.slow
def test_recomputed_shares_come_from_kept_plans(tmp_path):
    kept = samples.plan(samples.cost(), model="m4.MoE128E24L")
    samples.save(kept, tmp_path / "MoE128E24L")
    shares = paper.recomputed(tmp_path)
    assert [share.layers for share in shares] == sorted(share.layers for share in shares)
    assert {share.layers: share.printed for share in shares} == {12: 0, 24: 0, 36: 0.28, 60: 0.34}

    (found,) = [share for share in shares if share.plan is not None]
    assert (found.model, found.plan) == ("m4.MoE128E24L", kept)
    assert found.own.remat is Remat.BLOCK
    (cells,) = _cells(paper_text.page([], shares), "m4.MoE128E24L")
    assert cells == ["26.41", "B", "BLOCK", "0", "20", "25"]


@pytest.mark.slow
def test_figure_1_is_drawn_with_and_without_plans(tmp_path):
    whole = samples.plan(samples.cost(1.0), batch=Batch(4096, 256, 256))
    with_plan = dataclasses.replace(_rows()[0], planned=PlannedRun(FAMILY[0], whole))
    drawn = []
    for name, rows in {"without": _rows(), "with": [with_plan, *_rows()[1:]]}.items():
        paper.draw_figure_1(rows, tmp_path / f"{name}.png")
        drawn.append((tmp_path / f"{name}.png").read_bytes())
    assert drawn[0].startswith(b"\x89PNG") and drawn[0] != drawn[1]
