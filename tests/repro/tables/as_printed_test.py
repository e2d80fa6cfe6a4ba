"""Tables 1 to 3 and Figure 1, checked against each other and the registered experiments."""

import pytest

from lingvo_gshard import registry
from repro.tables.as_printed import FAMILY


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


def test_all_experts_are_in_every_other_layer_except_for_two_misprints():
    wrong = {run.name for run in FAMILY if run.printed_experts != run.experts}
    assert wrong == {"MoE(2048E, 12L)", "MoE(2048E, 36L)"}
    for run in FAMILY:
        task = registry.get_params(run.model).task
        layers = task.encoder.num_layers // 2 + task.decoder.num_layers // 2
        assert run.experts == task.encoder.moe.num_experts * layers


def test_the_time_of_a_token_needs_a_printed_rate():
    # There are 2.16 steps a second, of 2^20 tokens, on 128 cores.
    assert FAMILY[0].token_secs == pytest.approx(128 / 2**20 / 2.16)
    assert FAMILY[-1].token_secs is None
