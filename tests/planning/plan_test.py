"""Plans as files, and what follows from them."""

import dataclasses
import json

import pytest

from lingvo_gshard.planning import plan, plan_comparison, plan_report
from tests.planning import plans


@pytest.mark.parametrize("made", [plans.cost(), None])
def test_a_plan_comes_back_from_its_file_as_it_was(tmp_path, made):
    kept = plans.plan(made)
    plan.save(kept, tmp_path)
    assert plan.load(tmp_path) == kept


def test_the_files_fields(tmp_path):
    plan.save(plans.plan(plans.cost()), tmp_path)
    values = json.loads((tmp_path / "plan.json").read_text())
    asked = """model topology cores weights tokens_per_core fits memory_gib collectives
        flops_per_core roofline_secs xla_optimal_secs lower_secs compile_secs instructions
        host_peak_gib"""
    assert set(asked.split()) <= values.keys()
    assert set(values["memory_gib"]) == {
        *("capacity", "replicated_weights", "expert_weights", "optimizer_slots"),
        *("temporaries", "peak"),
    }
    assert set(values["roofline_secs"]) == {"compute", "memory", "network", "step"}
    assert set(values["collectives"][0]) == {"kind", "count", "bytes", "source"}
    assert values["steps_per_sec"] == {"at_roofline": 2.0, "at_papers_share": 0.96}


def test_a_refused_plan_has_no_times(tmp_path):
    plan.save(plans.plan(None), tmp_path)
    values = json.loads((tmp_path / "plan.json").read_text())
    assert values["fits"] is False and values["memory_gib"]["peak"] == 20.0
    assert values["roofline_secs"] is values["collectives"] is values["steps_per_sec"] is None


def test_rates_and_core_years():
    kept = plans.plan(plans.cost(step_secs=0.5), cores=128, tokens_per_core=8192.0)
    assert kept.steps_per_sec() == 2.0 and kept.steps_per_sec(0.48) == 0.96
    assert kept.tokens_per_sec() == 2.0 * 8192 * 128
    years = 1e12 / (2 * 8192) / (365.25 * 24 * 3600)
    assert kept.core_years() == pytest.approx(years)
    assert plans.plan(None).core_years() == float("inf")


def test_what_is_no_plan_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"no plan.json there; `plan --out=.*` makes one"):
        plan.load(tmp_path)
    plan.save(plans.plan(plans.cost()), tmp_path)
    values = json.loads((tmp_path / "plan.json").read_text())
    del values["memory_gib"]["peak"]
    (tmp_path / "plan.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"plan.json: is damaged or of another version: TypeError"):
        plan.load(tmp_path)


def test_few_weights_are_told_in_millions():
    kept = plans.plan(plans.cost(), weights=3_270_000)
    assert "cores, 3.27 M weights" in plan_report.text(kept)


def test_the_report_is_one_screen_that_says_all(tmp_path):
    kept = plans.plan(plans.cost(), suspicious=("all-gather of 3.0 MiB a step from encoder",))
    text = plan_report.text(kept)
    assert len(text.splitlines()) < 40
    for part in (
        "m4.MoE128E12L on v3:8x8: 128 cores, 12.50 B weights, 8192 target tokens a core",
        "fits: 9.00 of 15.48 GiB a core",
        "1 GiB f32[8,256,32000] of softmax",
        "all-to-all               8        8.0 MiB  encoder/layers_1/dispatch",
        "suspicious: all-gather of 3.0 MiB a step from encoder",
        "at 100% of the roofline: 0.5 s a step, 2.00 steps/s, 2.10 M tokens/s",
        "at 48% of the roofline: 1.04 s a step, 0.96 steps/s",
        "XLA's optimal_seconds 0.6 s (its loops once: 0.2), 1000 instructions",
        "compiled in 40.0 s (60.0 of CPU)",
        "products 3.00 Tflop a core, of which the mathematics asks for 2.00",
    ):
        assert part in text
    plan_report.write(kept, tmp_path)
    assert text in (tmp_path / "report.md").read_text()
    for name in ("memory.png", "time.png"):
        assert f"({name})" in (tmp_path / "report.md").read_text()
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_the_report_of_what_does_not_fit_says_by_how_much(tmp_path):
    refused = plans.plan(None)
    assert "does NOT fit, by 4.52 GiB or more: 20.00 of 15.48 GiB a core" in plan_report.text(
        refused
    )
    assert "  1 GiB f32[8,256,32000] of softmax" in plan_report.text(refused)
    plan_report.write(refused, tmp_path)
    assert "time.png" not in (tmp_path / "report.md").read_text()


def test_plans_side_by_side():
    first, second = plans.plan(plans.cost(0.5)), plans.plan(plans.cost(0.25))
    second = dataclasses.replace(second, settings=("task.encoder.moe.dispatch=GATHER",))
    lines = plan_comparison.table([first, second, plans.plan(None)]).splitlines()
    assert any("dispatch=GATHER" in line for line in lines)
    rows = {line[:24].strip(): line[24:].split() for line in lines[4:]}
    assert rows["roofline step ms"] == ["500", "250", "-", "-"]
    assert rows["fits"] == ["1", "1", "0", "0.000"]
    assert rows["peak GiB"] == ["9", "9", "20", "2.222"]
    assert rows["all-to-all MiB"] == ["8", "8", "-", "-"]
