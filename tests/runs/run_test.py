"""Runs: sizes that must divide others, and the rules of a warm start."""

import pytest

from lingvo_gshard.input.base_input import DataFacts
from lingvo_gshard.runs import run
from lingvo_gshard.runs.launch import Launch, experiment_params


def _params(*overrides):
    facts = DataFacts(4000, 2000, ("de", "fr", "qta"))
    return experiment_params(Launch("toy.MoE8E4L", overrides, "/data", facts))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("('.*', 'COPY')", r"expected \(pattern, rule\), got \('.*', 'COPY'\); rules are SAME, "),
        ("('(', 'SAME')", r"Warm start: .*got \('\(', 'SAME'\); rules are SAME, .*\(missing \)"),
    ],
)
def test_invalid_rules_of_a_warm_start_are_refused(tmp_path, rule, message):
    p = _params("train.warm_start_from=/old", f"train.warm_start_rules=({rule},)")
    with pytest.raises(ValueError, match=message):
        run.make_estimator(p, str(tmp_path), 1)


def test_a_run_without_a_whole_checkpoint_is_started_warm(tmp_path, monkeypatch):
    """After a kill before the first save, and while another process creates the folder."""
    made = []
    monkeypatch.setattr(run, "Estimator", lambda *_, warm_start, **__: made.append(warm_start))
    p = _params("train.warm_start_from=/old")
    (tmp_path / "checkpoints").mkdir()
    run.make_estimator(p, str(tmp_path), 1)
    monkeypatch.setattr(run.saved_steps, "whole_steps", lambda logdir: [4])
    run.make_estimator(p, str(tmp_path), 1)
    assert made[0].source == "/old" and made[1] is None


def test_a_folder_of_checkpoints_alone_is_started_from_without_vocabularies(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    assert run._warm_start(_params(f"train.warm_start_from={tmp_path}")).pieces == ()


def test_exported_weights_lack_the_vocabularies_that_pieces_are_found_by(tmp_path):
    source = tmp_path / "weights.safetensors"
    rules = "(('.*', 'BY_PIECE'),)"
    p = _params(f"train.warm_start_from={source}", f"train.warm_start_rules={rules}")
    with pytest.raises(
        ValueError, match=f"^train.warm_start_from={source}: BY_PIECE needs a run's"
    ):
        run.make_estimator(p, str(tmp_path), 1)


@pytest.mark.parametrize(
    ("num_partitions", "overrides", "message"),
    [
        (0, (), "the partitions of axis '.*' must be 1 or more, got 0"),
        (1, ("task.encoder.moe.group_size=100",), "encoder.moe.group_size 100 does not divide"),
        (1, ("task.decoder.moe.group_size=0",), "decoder.moe.group_size 0 does not divide"),
        (1, ("decode.batch_size=0",), "decode.batch_size = 0: expected 1 or more"),
        (4, ("mesh=data:*,experts:8",), "experts:8: expected a multiple of 8 devices, got 4"),
        (4, ("mesh=x:*,y:*",), "expected axes with their sizes, of which one may be the rest"),
        (4, ("sharding=BGE:data",), "no axis 'data' in .*; the axes are d of 4"),
        (4, ("sharding=BGE",), "sharding=BGE: expected letters with their axes"),
        (4, ("sharding=B:d,weights.b:d",), "'weights.b': a lowercase letter names a dim of the"),
        (4, ("sharding=B:d,layers.M:d",), "no stack 'layers'; rows may be for encoder, decoder"),
        (4, ("device_assignment=[0,1,2,2]",), "device_assignment must order 0 to 3"),
        (1, ("task.dim=0",), "sizes must be 1 or more, got VM = .*, 0], fan_in 0"),
        (1, ("task.decoder.num_layers=0",), "decoder: num_layers must be 1 or more, got 0"),
        (1, ("task.input_dropout.rate=1.0",), r"source_dropout: rate must be in \[0, 1\), got 1.0"),
        (1, ("task.label_smoothing=-0.1",), r"label_smoothing must be in \[0, 1\), got -0.1"),
    ],
)
def test_sizes_that_cannot_be_or_do_not_divide_are_refused(num_partitions, overrides, message):
    p = _params("input.batch_size=32", "input.source_len=64", "input.target_len=48", *overrides)
    with pytest.raises(ValueError, match=message):
        run.make_estimator(p, "/nowhere", num_partitions)
