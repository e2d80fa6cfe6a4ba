"""Plans of experiments as text, and side by side."""

import dataclasses

import pytest

from lingvo_gshard.plans import plan, plan_text
from tests.repro.published import published_steps
from tests.repro.published.published_steps import record
from tests.xla_plan import samples
from xla_plan.expected import factors
from xla_plan.plans import plan_folder
from xla_plan.plans.program_plan import Batch

# Each kind of line once.
_SCREEN = (
    "m4.MoE128E12L on v3:8x8: 128 cores, 12.50 B weights, 8192 target tokens a core",
    "tokens reach their experts by EINSUM",
    "does NOT fit: evaluate; a step needs 9.00 of 15.48 GiB a core",
    "  optimizer slots                        8  0.250        0.250",
    "  all-to-all from encoder/layers_1/dispatch      8  8.0     -",
    "suspicious: all-gather of 3.0 MiB a step from encoder",
    "  experts       200.000     40.000     100.000  340.000  3000.0",
    "  recomputed      20.000      0.000      25.000  125.000",
    "beside computation, by the schedule: 50 of 100 ms of the network",
    "  evaluate     NO   20            -     -           -         40",
    "train: counts the pipeline's bubble, 20.0% of the ticks of a stage",
    "decode: a loop of unknown length, counted as one trip, in decoder",
)


@pytest.fixture
def published(monkeypatch, tmp_path):
    """Replaces the published steps by three steps on v3."""
    records = [record("a", 0.4), record("b", 0.7), record("c", 0.9)]
    path = published_steps.write(tmp_path / "bounds.json", *records)
    monkeypatch.setattr(factors, "BOUNDS", path)


def test_the_screen_of_a_plan(published):
    looping = dataclasses.replace(samples.cost(4.0), uncounted_loops=("decoder",))
    decode = samples.program(looping, batch=Batch(128, 256, 64), suspicious=("a copy",))
    kept = samples.plan(
        dataclasses.replace(samples.cost(0.5, 0.1), overlapped_secs=0.05),
        suspicious=("all-gather of 3.0 MiB a step from encoder",),
        programs={"evaluate": samples.program(None), "decode": decode},
        bubble=0.2,
        dispatch="EINSUM",
    )
    lines = plan_text.screen(kept).splitlines()
    assert not set(_SCREEN) - set(lines)
    assert any(line.startswith("expected: 0.75 s a step (0.5 to 1.12), ") for line in lines)
    report = plan_text.markdown(kept)
    assert plan_text.screen(kept) in report and "(memory.png)" in report and "(time.png)" in report


def test_a_plan_that_does_not_fit_gives_the_excess():
    unfit = samples.plan(None)
    text = plan_text.screen(unfit)
    assert "does NOT fit, by 4.52 GiB or more; a step needs 20.00 of 15.48 GiB a core" in text
    assert "  1 GiB f32[8,256,32000] of softmax" in text and "bound" not in text
    assert "(memory.png)" in plan_text.markdown(unfit)
    assert "time.png" not in plan_text.markdown(unfit)


def test_a_time_that_xla_does_not_report_is_left_out():
    """XLA does not give a time for GPUs, and gives negative times for large programs."""
    without = dataclasses.replace(samples.cost(), xla_optimal_secs=0.0, xla_optimal_secs_once=0.0)
    kept = samples.plan(without)
    assert "XLA" not in plan_text.screen(kept) and "\n1000 instructions\n" in plan_text.screen(kept)
    assert "XLA optimal ms" not in plan_text.figures(kept)


def test_plans_side_by_side(published):
    plans = [
        samples.plan(samples.cost(0.5)),
        samples.plan(samples.cost(0.25), topology="h100:16x8", settings=("train.seed=4",)),
        samples.plan(None),
    ]
    lines = plan_text.comparison(plans).splitlines()
    assert "train.seed=4" in lines[1]
    rows = {line.rsplit(maxsplit=4)[0]: line.split()[-4:] for line in lines[4:-2]}
    assert rows["roofline step ms"] == ["500", "250", "-", "-"]
    assert rows["fits"] == ["1", "1", "0", "0.000"]
    assert rows["peak GiB"] == ["9", "9", "20", "2.222"]
    assert rows["all-to-all MiB"] == ["8", "8", "-", "-"]
    assert rows["expected ms"] == ["833.3", "-", "-", "-"]

    # The basis of each machine's expected times is given once.
    assert lines[-2].startswith("expected on v3: the bound over 0.60, as 2 published")
    assert lines[-1].startswith("expected on h100: unknown, as no steps on it are published")


def test_plans_of_any_programs_side_by_side(tmp_path):
    """One program alone, beside the training step of an experiment."""
    looping = dataclasses.replace(samples.cost(0.25), uncounted_loops=("mlp_1", "mlp_2", "x"))
    alone = samples.program(looping, name="step.export", mesh={"data": 4, "model": 2})
    plan_folder.save(alone, tmp_path / "alone", "")
    samples.save(samples.plan(samples.cost(0.5)), tmp_path / "experiment")
    plans = [plan.load_any(tmp_path / name) for name in ("alone", "experiment")]
    assert plans[0] == alone and plans[1].step.cost == samples.cost(0.5)

    lines = plan_text.comparison(plans).splitlines()
    assert lines[0] == "1: step.export on v3:8x8, mesh data=4 x model=2"
    assert "1: a loop of unknown length, counted as one trip, in mlp_1, and 1 alike" in lines
    assert "1: a loop of unknown length, counted as one trip, in x" in lines
    rows = {line.rsplit(maxsplit=3)[0]: line.split()[-3:] for line in lines}
    assert rows["cores"] == ["8", "128", "16.000"]
    assert rows["roofline step ms"] == ["250", "500", "2.000"]
    assert rows["expert weights GiB"] == ["2", "2", "1.000"]
    with pytest.raises(ValueError, match="no plan.json there"):
        plan.load_any(tmp_path)


def test_without_a_training_step_the_first_program_is_described(published):
    decode = samples.program(samples.cost(4.0), batch=Batch(128, 256, 64))
    kept = samples.without_a_step(decode=decode)
    text = plan_text.screen(kept)
    for part in (
        "m4.MoE128E12L on v3:8x8: 128 cores, 12.50 B weights\n",
        "fits; a call of decode needs 9.00 of 15.48 GiB a core",
        "products 3 Tflop a core\n",
        "bound, at the roofline: 4 s a call of decode, 2.0 K tokens/s\n",
    ):
        assert part in text
    # Only training steps are published.
    assert "expected" not in text and "core-years" not in text
    assert ".png" not in plan_text.markdown(kept)
    assert plan_text.figures(kept)["decode ms"] == 4000.0


def test_gpus_are_named_gpus(published):
    text = plan_text.screen(samples.plan(samples.cost(), topology="h100:16x8"))
    assert "collectives of a step on one GPU" in text and "core" not in text
    assert "expected on h100: unknown, as no steps on it are published" in text
