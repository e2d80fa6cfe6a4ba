"""Tables 1 to 3 and Figure 1 against each other, and against the registered experiments."""

import pytest

from lingvo_gshard import registry
from lingvo_gshard.planning.tables import as_printed
from lingvo_gshard.planning.tables.as_printed import DENSE, FAMILY

_RATED = FAMILY[:-1]  # Table 3 lacks MoE(2048E, 60L).


def test_the_family_is_registered_on_as_many_cores():
    for run in FAMILY:
        params = registry.get_params(run.model)
        assert params.task.encoder.num_layers + params.task.decoder.num_layers == run.layers
        assert params.task.encoder.moe.num_experts == run.cores
        assert params.input.batch_size * params.input.target_len == run.batch_tokens


def test_core_years_follow_from_the_papers_own_figures():
    """Cores * 10^12 tokens / (steps/s * tokens of a batch): Table 3 is consistent to 20 %."""
    for run in FAMILY:
        if run.steps_per_sec and run.core_years:
            secs = 1e12 / run.batch_tokens / run.steps_per_sec
            assert run.cores * secs / 3.156e7 == pytest.approx(run.core_years, rel=0.2)


@pytest.mark.parametrize("run", [*_RATED, DENSE], ids=lambda run: run.name)
def test_days_and_core_years_of_table_3_are_one_figure(run):
    assert run.cores * run.days / 365 == pytest.approx(run.core_years, rel=0.05)


@pytest.mark.parametrize("run", [*_RATED, DENSE], ids=lambda run: run.name)
def test_bleu_is_the_baselines_and_the_difference_to_them(run):
    assert run.bleu - run.delta_bleu == pytest.approx(as_printed.BASELINES_BLEU)


def test_experts_in_all_are_those_of_every_other_layer_but_for_two_misprints():
    wrong = {run.name for run in FAMILY if run.printed_experts != run.experts}
    assert wrong == {"MoE(2048E, 12L)", "MoE(2048E, 36L)"}
    for run in FAMILY:
        task = registry.get_params(run.model).task
        layers = task.encoder.num_layers // 2 + task.decoder.num_layers // 2
        assert run.experts == task.encoder.moe.num_experts * layers


def test_deeper_models_need_fewer_tokens_as_section_4_5_says():
    """Three times the depth needs two to three times fewer tokens to the first cross entropy."""
    by_name = {run.name: run.billion_tokens[0] for run in _RATED}
    for experts in (128, 512, 2048):
        ratio = by_name[f"MoE({experts}E, 12L)"] / by_name[f"MoE({experts}E, 36L)"]
        assert 2.0 < ratio < 3.2


def test_the_models_of_24_layers_are_registered():
    for model in as_printed.MODELS_OF_24_LAYERS:
        task = registry.get_params(model).task
        assert task.encoder.num_layers + task.decoder.num_layers == 24
        assert 24 in as_printed.RECOMPUTED_SHARES


def test_the_names_of_a_row():
    assert [run.name for run in FAMILY[-2:]] == ["MoE(2048E, 36L)", "MoE(2048E, 60L)"]
    assert FAMILY[-1].model == "m4.MoE2048E60L"
    assert DENSE.name == "T(96L)" and DENSE.model == "m4.T96L" and DENSE.experts == 0


def test_the_time_of_a_token_needs_a_printed_rate():
    # 2.16 steps a second of 2^20 tokens on 128 cores.
    assert FAMILY[0].token_secs == pytest.approx(128 / 2**20 / 2.16)
    assert FAMILY[-1].token_secs is None
