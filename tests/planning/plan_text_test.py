"""Plans as text, and side by side."""

import dataclasses

import pytest

from lingvo_gshard.planning import plan_text
from lingvo_gshard.planning.plan import Batch
from lingvo_gshard.planning.published import factors
from tests.planning import plans, published_steps
from tests.planning.published_steps import record


@pytest.fixture
def published(monkeypatch, tmp_path):
    """Puts three steps on v3 in the place of the published ones."""
    records = [record("a", 0.4), record("b", 0.7), record("c", 0.9)]
    path = published_steps.write(tmp_path / "bounds.json", *records)
    monkeypatch.setattr(factors, "BOUNDS", path)


def test_the_report_is_one_screen(published):
    kept = plans.plan(plans.cost(), suspicious=("all-gather of 3.0 MiB a step from encoder",))
    text = plan_text.screen(kept)
    assert len(text.splitlines()) < 40
    for part in (
        "m4.MoE128E12L on v3:8x8: 128 cores, 12.50 B weights, 8192 target tokens a core",
        "fits; a step needs 9.00 of 15.48 GiB a core",
        "1 GiB f32[8,256,32000] of softmax",
        "collectives of a step on one core            count  MiB\n",
        "all-to-all from encoder/layers_1/dispatch      8  8.0\n",
        "suspicious: all-gather of 3.0 MiB a step from encoder",
        "experts     3000      200.00      40.00      100.00   340.00",
        "at the roofline: 0.5 s a step, 2.00 steps/s, 2.10 M tokens/s",
        "expected: 0.833 s a step (0.556 to 1.25), 1.20 steps/s, 1.26 M tokens/s, 3.2 core-years",
        "expected on v3: the bound over 0.60, as 2 published training steps of somebody/lm",
        "XLA's optimal_seconds 0.6 s (its loops once: 0.2), 1000 instructions",
        "compiled in 40.0 s (60.0 of CPU)",
        "products 3.00 Tflop a core, of which the mathematics asks for 2.00",
        "recomputed for the gradient: 20% of the products, 25% of the roofline's time",
    ):
        assert part in text
    assert text in plan_text.markdown(kept)
    for name in ("memory.png", "time.png"):
        assert f"({name})" in plan_text.markdown(kept)


@pytest.mark.parametrize(
    ("tokens", "text"),
    [(2**20, "1.05 M tokens/s"), (73_730, "73.7 K tokens/s"), (512, "512 tokens/s")],
)
def test_rates_have_a_unit_of_their_size(tokens, text):
    batch = Batch(1, tokens, tokens)
    kept = plans.plan(plans.cost(1.0), batch=batch)
    assert f"at the roofline: 1 s a step, 1.00 steps/s, {text}" in plan_text.screen(kept)


def test_a_time_that_xla_does_not_give_is_left_out():
    """It gives none for GPUs, and negative ones for large programs."""
    without = dataclasses.replace(plans.cost(), xla_optimal_secs=0.0, xla_optimal_secs_once=0.0)
    kept = plans.plan(without)
    assert "XLA" not in plan_text.screen(kept) and "\n1000 instructions\n" in plan_text.screen(kept)
    assert "XLA optimal ms" not in plan_text.figures(kept)


def test_what_overlaps_counts_once_in_the_rates():
    overlapping = dataclasses.replace(plans.cost(0.5, 0.1), overlapped_secs=0.05)
    text = plan_text.screen(plans.plan(overlapping))
    assert "beside computation, by the schedule: 50.00 of 100.00 ms of the network" in text
    assert "at the roofline: 0.45 s a step, 2.22 steps/s" in text
    assert "beside computation" not in plan_text.screen(plans.plan(plans.cost()))


def test_kernels_that_are_not_counted_are_named():
    cost = dataclasses.replace(plans.cost(), uncounted_kernels=("flash_attention",))
    line = "train: what the kernel flash_attention computes is not counted"
    assert line in plan_text.screen(plans.plan(cost))


def test_the_sources_of_a_kind_are_counted():
    cost = plans.cost()
    more = [dataclasses.replace(cost.collectives[0], source=name) for name in ("b", "c", "d")]
    text = plan_text.screen(plans.plan(dataclasses.replace(cost, collectives=tuple(more))))
    assert "all-to-all from b, c and 1 more     24  24.0" in text


def test_the_report_of_a_plan_that_does_not_fit_gives_the_excess():
    unfit = plans.plan(None)
    text = plan_text.screen(unfit)
    assert "does NOT fit, by 4.52 GiB or more; a step needs 20.00 of 15.48 GiB a core" in text
    assert "  1 GiB f32[8,256,32000] of softmax" in text
    assert "(memory.png)" in plan_text.markdown(unfit)
    assert "time.png" not in plan_text.markdown(unfit)


def test_plans_side_by_side():
    first, second = plans.plan(plans.cost(0.5)), plans.plan(plans.cost(0.25))
    second = dataclasses.replace(second, settings=("task.encoder.moe.dispatch=GATHER",))
    lines = plan_text.comparison([first, second, plans.plan(None)]).splitlines()
    assert "dispatch=GATHER" in lines[1]
    rows = {line.rsplit(maxsplit=4)[0]: line.split()[-4:] for line in lines[4:]}
    assert rows["roofline step ms"] == ["500", "250", "-", "-"]
    assert rows["fits"] == ["1", "1", "0", "0.000"]
    assert rows["peak GiB"] == ["9", "9", "20", "2.222"]
    assert rows["all-to-all MiB"] == ["8", "8", "-", "-"]


def _with_programs(**programs):
    return plans.plan(
        plans.cost(), programs={"initialize": plans.program(plans.cost()), **programs}
    )


def test_all_programs_are_in_a_table_and_the_verdict_is_theirs():
    looping = dataclasses.replace(plans.cost(), uncounted_loops=("encoder/experts",))
    evaluate = plans.program(looping, suspicious=("all-gather of 3.0 MiB a call from encoder",))
    decode = plans.program(plans.cost(4.0), batch=Batch(128, 256, 64))
    kept = _with_programs(evaluate=evaluate, decode=decode)
    text = plan_text.screen(kept)
    assert kept.all_fit and "\nfits; a step needs 9.00 of 15.48 GiB a core" in text
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines()[-8:]}
    assert list(rows)[:5] == ["of", "train", "initialize", "evaluate", "decode"]
    # The AllToAlls, milliseconds, thousands of tokens a second, seconds of compiling.
    assert rows["decode"] == ["yes", "9", "8", "4000", "2.048", "40"]
    for line in (
        "suspicious in evaluate: all-gather of 3.0 MiB a call from encoder",
        "evaluate: a loop of unknown length, counted as one trip, in encoder/experts",
        "decode: counts all 64 steps; a search may end earlier",
    ):
        assert line in text.splitlines()


def test_the_bubble_of_a_pipeline_is_told():
    line = "train: counts the pipeline's bubble, 20.0% of the ticks of a stage"
    told = [plans.plan(plans.cost(), bubble=bubble) for bubble in (0.0, 0.2)]
    assert [line in plan_text.screen(kept).splitlines() for kept in told] == [False, True]


def test_a_program_that_does_not_fit_is_named():
    kept = _with_programs(evaluate=plans.program(None))
    text = plan_text.screen(kept)
    assert (
        not kept.all_fit
        and "\ndoes NOT fit: evaluate; a step needs 9.00 of 15.48 GiB a core" in text
    )
    (row,) = [line.split() for line in text.splitlines() if line.startswith("  evaluate ")]
    assert row == ["evaluate", "NO", "20", "-", "-", "-", "40"]


def test_figures_of_other_programs_follow_the_steps():
    figures = plan_text.figures(_with_programs(decode=plans.program(None)))
    assert figures["decode GiB"] == 20.0 and "decode ms" not in figures
    assert figures["initialize ms"] == 500.0 and "train ms" not in figures


def test_without_a_training_step_the_first_program_is_told(published):
    decode = plans.program(plans.cost(4.0), batch=Batch(128, 256, 64), suspicious=("a copy",))
    kept = plans.without_a_step(decode=decode)
    text = plan_text.screen(kept)
    for part in (
        "m4.MoE128E12L on v3:8x8: 128 cores, 12.50 B weights\n",
        "fits; a call of decode needs 9.00 of 15.48 GiB a core",
        "collectives of a call of decode on one core",
        "suspicious: a copy\n",
        "of a call",
        "products 3.00 Tflop a core\n",
        "bound, at the roofline: 4 s a call, 2.0 K tokens/s\n",
        "decode: counts all 64 steps",
    ):
        assert part in text
    # Nothing is published of other programs than training steps.
    for part in ("a step", "recomputed", "expected", "core-years"):
        assert part not in text
    assert ".png" not in plan_text.markdown(kept)

    lines = plan_text.comparison([kept, plans.plan(plans.cost())]).splitlines()
    rows = {line.rsplit(maxsplit=3)[0]: line.split()[-3:] for line in lines[4:]}
    assert rows["decode ms"] == ["4000", "-", "-"] and rows["peak GiB"] == ["-", "9", "-"]


def test_gpus_are_called_so():
    text = plan_text.screen(plans.plan(plans.cost(), topology="h100:16x8"))
    assert "collectives of a step on one GPU" in text and "core" not in text


def test_what_is_expected_stands_beside_the_bound(published):
    first = plans.plan(plans.cost(0.5))
    second = plans.plan(plans.cost(0.25), topology="h100:16x8")
    lines = plan_text.comparison([first, second, plans.plan(plans.cost(1.0))]).splitlines()
    rows = {line.rsplit(maxsplit=4)[0]: line.split()[-4:] for line in lines[3:-2]}
    assert rows["roofline step ms"] == ["500", "250", "1000", "2.000"]
    assert rows["expected ms"] == ["833.3", "-", "1667", "2.000"]
    assert rows["expected, at least ms"] == ["555.6", "-", "1111", "2.000"]
    assert rows["expected, at most ms"] == ["1250", "-", "2500", "2.000"]

    # What it rests on is told once for each machine.
    assert lines[-2].startswith("expected on v3: the bound over 0.60, as 2 published")
    assert lines[-1].startswith("expected on h100: unknown, for want of published steps")


def test_a_machine_without_published_steps_has_only_a_bound(published):
    text = plan_text.screen(plans.plan(plans.cost(), topology="h100:16x8"))
    assert "bound, at the roofline: 0.5 s a step" in text and "\nexpected: " not in text
    assert "expected on h100: unknown, for want of published steps; the bound is all" in text
