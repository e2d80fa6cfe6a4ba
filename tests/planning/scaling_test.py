"""Tables of the family from plans made by hand."""

import dataclasses

import pytest

from lingvo_gshard import registry
from lingvo_gshard.planning import paper, scaling
from tests.planning import plans


def _rows():
    rows = []
    for run in paper.FAMILY:
        network = 0.2 if run.cores == 2048 else 0.05
        cost = None if run.layers == 60 else plans.cost(0.5, network, 1000 + run.cores // 16)
        tokens = run.batch_tokens / run.cores
        made = plans.plan(
            cost,
            cores=run.cores,
            model=run.model,
            tokens_per_core=tokens,
            compile_cpu_secs=30.0 + run.layers + run.cores / 128,
        )
        rows.append(scaling.Row(run, made))
    return rows


def test_the_family_is_registered_on_as_many_cores():
    for run in paper.FAMILY:
        params = registry.get_params(run.model)
        assert params.task.encoder.num_layers + params.task.decoder.num_layers == run.layers
        assert params.task.encoder.moe.num_experts == run.cores
        assert params.input.batch_size * params.input.target_len == run.batch_tokens


def test_core_years_follow_from_the_papers_own_figures():
    """Cores * 10^12 tokens / (steps/s * tokens of a batch): Table 3 is consistent to 20 %."""
    for run in paper.FAMILY:
        if run.steps_per_sec and run.core_years:
            secs = 1e12 / run.batch_tokens / run.steps_per_sec
            assert run.cores * secs / 3.156e7 == pytest.approx(run.core_years, rel=0.2)


def test_every_table_shows_the_papers_values(tmp_path):
    text = scaling.text(_rows())
    for part in ("Table 3", "Figure 7", "Figure 8", "Figure 9", "paper 3.75", "paper 1.7"):
        assert part in text
    first = next(line for line in text.splitlines() if line.startswith("MoE(2048E, 36L)"))
    assert first.split()[2:] == [
        *("2048", "12.50", "600", "500", "2.00", "0.72", "36%", "7.7", "22.4"),
    ]
    assert "does not fit" in text
    scaling.draw(_rows(), tmp_path)
    for name in ("figure_7.png", "figure_8.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_growth_is_per_token():
    # On 2048 cores, a core has a quarter of the tokens; an equal step is four times a token's.
    text = scaling.text(_rows())
    assert (
        "a token's step x4.00 (paper 1.7, by its Table 3 x4.02), its AllToAll x16.00 (paper 3.75)"
        in text
    )
    assert "instructions x1.12" in text


def test_seconds_to_compile_are_compared():
    text = scaling.text(_rows())
    assert "12 layers: weights' GiB x1.000, CPU seconds to compile x1.35" in text
    assert "36 layers against 12 on 2048 cores: CPU seconds to compile x1.41" in text
    assert "60 layers against" not in text  # It did not fit, so that its compilation ended early.
    row = next(
        line for line in text.partition("Compiling")[2].splitlines() if "(128E, 12L)" in line
    )
    assert row.split()[2:] == ["10.0", "40.0", "43.0", "1008", "3.5", "600"]


def test_suspicious_programs_are_listed():
    rows = _rows()
    assert "none that fits gathers weights, experts or tokens" in scaling.text(rows)
    gathering = dataclasses.replace(rows[0].plan, suspicious=("all-gather of 3.0 MiB a step",))
    rows[0] = dataclasses.replace(rows[0], plan=gathering)
    text = scaling.text(rows)
    assert "suspicious in MoE(2048E, 36L): all-gather of 3.0 MiB a step" in text
    assert "none that fits gathers" not in text


def test_the_model_of_figure_9_grows_as_the_paper_measured():
    lines = scaling.text(_rows()).splitlines()
    growths = {
        line.split(" MiB")[0]: float(line.rpartition("x")[2]) for line in lines if " MiB " in line
    }
    assert growths["all-to-all 8"] == growths["all-to-all 32"]
    assert growths["all-to-all 8"] == pytest.approx(paper.FIGURE_9_ALL_TO_ALL_GROWTH, rel=0.3)
    assert growths["all-reduce 8"] == pytest.approx(1.0, abs=0.2)
