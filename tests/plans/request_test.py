"""Requests: settings, batches and mistakes."""

import pytest

from lingvo_gshard.plans import plan
from lingvo_gshard.plans.request import make_request
from tests.plans import tiny
from xla_plan.machines import topology

_VOCABULARIES = ("task.source_vocab_size=64", "task.target_vocab_size=64")


@pytest.fixture(autouse=True)
def _on_eight_cores(monkeypatch):
    """The devices of v3:2x2, without the TPU's library."""
    monkeypatch.setattr(topology, "devices", lambda name: range(8))


def test_a_batch_of_tokens_is_a_setting():
    request = make_request(tiny.MODEL, tiny.TOPOLOGY, _VOCABULARIES, batch_tokens=480)
    assert request.settings == (*_VOCABULARIES, "input.batch_size=10")
    assert request.params.input.batch_size == 10
    assert request.partitioning.mesh.num_partitions == 8


def test_mistakes_are_refused():
    with pytest.raises(
        ValueError,
        match="take task.source_vocab_size and .*; give --set=task.source_vocab_size=SIZE --set=",
    ):
        make_request(tiny.MODEL, tiny.TOPOLOGY, (), None)
    with pytest.raises(ValueError, match="--batch_tokens=100: expected a multiple of 48"):
        make_request(tiny.MODEL, tiny.TOPOLOGY, _VOCABULARIES, 100)
    with pytest.raises(ValueError, match="--batch_tokens or --set=input.batch_size, not both"):
        make_request(tiny.MODEL, tiny.TOPOLOGY, ("input.batch_size=10",), 480)


def test_the_requested_programs_decide_the_batches():
    request = tiny.request(programs=plan.PROGRAMS)
    assert request.batches == ["input", "eval_input", "decode"]
    assert request.step_only().batches == ["input"]


def test_some_programs_are_requested_in_the_order_of_a_plan():
    request = tiny.request(programs=plan.PROGRAMS)
    assert request.only(["decode", "evaluate"]).programs == ("evaluate", "decode")
    with pytest.raises(ValueError, match="'serve'; expected some of train, initialize, evaluate"):
        request.only(["train", "serve"])


def test_more_settings_may_change_the_partitioning():
    request = tiny.request()
    changed = request.changed(["mesh=data:2,experts:4", "sharding=BG:data+experts,E:experts"])
    assert changed.partitioning.mesh.shape == {"data": 2, "experts": 4}
    assert changed.settings == changed.settings[-2:] and request.settings == ()
    assert request.partitioning.mesh.shape == {"d": 8}
