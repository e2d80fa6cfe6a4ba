"""Plans that are kept in folders."""

import dataclasses
import importlib
import json

import pytest

from lingvo_gshard.plans import kept_plans, plan, plan_pictures, run_programs
from tests.plans import tiny
from tests.repro.published import published_steps
from tests.repro.published.published_steps import record
from tests.xla_plan import samples
from xla_plan.expected import factors
from xla_plan.plans import own_process


@pytest.fixture
def asked(monkeypatch):
    """Makes plans at once in place of processes; returns the list of requests."""
    requests = []

    def make(function, request):
        assert function.func is run_programs.make_plan
        requests.append(request)
        made = samples.plan(samples.cost(), settings=request.settings)
        programs = {name: dataclasses.replace(made.step, name=name) for name in request.programs}
        return dataclasses.replace(made, programs=programs)

    monkeypatch.setattr(own_process, "call", make)
    monkeypatch.setattr(plan_pictures, "draw_step", lambda *_: None)  # It takes its time.
    return requests


def test_a_plan_is_made_once(asked, tmp_path):
    first = kept_plans.load_or_make(tiny.request(), tmp_path)
    assert kept_plans.load_or_make(tiny.request(), tmp_path) == first == samples.load(tmp_path)
    assert len(asked) == 1
    other = tiny.request(params=tiny.params().Set(**{"input.batch_size": 64}))
    kept_plans.load_or_make(other, tmp_path)
    kept_plans.load_or_make(dataclasses.replace(other, topology="v3:4x4"), tmp_path)
    assert len(asked) == 3


def test_expected_times_of_a_kept_plan_follow_the_published_steps(asked, monkeypatch, tmp_path):
    def expected_secs(share):
        path = published_steps.write(tmp_path / f"{share}.json", record("a", share))
        monkeypatch.setattr(factors, "BOUNDS", path)
        kept_plans.load_or_make(tiny.request(), tmp_path / "kept")
        text = (tmp_path / "kept" / "report.md").read_text()
        assert f"the bound over {share:.2f}" in text
        values = json.loads((tmp_path / "kept" / "plan.json").read_text())
        return values["expected"]["step_secs"]

    assert expected_secs(0.5) == 2 * expected_secs(1.0)
    assert len(asked) == 1  # Nothing was compiled again.


def test_other_options_of_the_compilers_make_another_plan(asked, monkeypatch, tmp_path):
    def plans_made(**environment):
        with monkeypatch.context() as patch:
            for name in ("LIBTPU_INIT_ARGS", "XLA_FLAGS"):
                patch.setenv(name, environment.get(name, ""))
            kept_plans.load_or_make(tiny.request(), tmp_path)
        return len(asked)

    assert plans_made() == 1
    assert plans_made(LIBTPU_INIT_ARGS="--xla_tpu_scoped_vmem_limit_kib=8192") == 2
    assert plans_made(LIBTPU_INIT_ARGS=" --xla_tpu_scoped_vmem_limit_kib=8192 ") == 2
    assert plans_made(XLA_FLAGS="--xla_gpu_enable_latency_hiding_scheduler=false") == 3
    # The number of virtual devices changes no program for a topology.
    assert plans_made() == 4
    assert plans_made(XLA_FLAGS="--xla_force_host_platform_device_count=8") == 4


def test_a_changed_layer_of_a_user_makes_another_plan(asked, monkeypatch, tmp_path):
    source = tmp_path / "own_layers.py"
    source.write_text(
        "from lingvo_gshard.layers.feed_forward import FeedForwardLayer\n"
        "class OwnLayer(FeedForwardLayer):\n"
        "    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    layer = importlib.import_module("own_layers").OwnLayer
    request = tiny.request(params=tiny.params().Set(**{"task.encoder.dense.cls": layer}))

    for _ in range(2):
        kept_plans.load_or_make(request, tmp_path / "plan")
    assert len(asked) == 1

    with source.open("a") as file:
        file.write("    # It computes something else now.\n")
    kept_plans.load_or_make(request, tmp_path / "plan")
    assert len(asked) == 2


def test_programs_that_a_kept_plan_lacks_are_added(asked, tmp_path):
    kept_plans.load_or_make(tiny.request(), tmp_path)
    everything = tiny.request(programs=plan.PROGRAMS)
    whole = kept_plans.load_or_make(everything, tmp_path)
    assert [each.programs for each in asked] == [(name,) for name in plan.PROGRAMS]
    assert tuple(whole.programs) == plan.PROGRAMS
    assert kept_plans.load_or_make(tiny.request(), tmp_path) == whole
    assert kept_plans.load_or_make(everything, tmp_path) == whole
    assert len(asked) == 4


def test_a_step_that_is_planned_after_decoding_comes_first(asked, tmp_path):
    decoding = tiny.request(programs=("decode",))
    assert list(kept_plans.load_or_make(decoding, tmp_path).programs) == ["decode"]
    whole = kept_plans.load_or_make(tiny.request(), tmp_path)
    assert list(whole.programs) == ["train", "decode"] and whole.main.name == "train"
    assert len(asked) == 2


def test_programs_that_were_planned_before_a_mistake_are_kept(asked, monkeypatch, tmp_path):
    make = own_process.call

    def fails(function, request):
        if request.programs == ("evaluate",):
            raise ValueError("evaluate: B=30 is not divisible by the 8 partitions")
        return make(function, request)

    everything = tiny.request(programs=plan.PROGRAMS)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="^evaluate: B=30"):
        patch.setattr(own_process, "call", fails)
        kept_plans.load_or_make(everything, tmp_path)
    assert list(samples.load(tmp_path).programs) == ["train", "initialize"]
    kept_plans.load_or_make(everything, tmp_path)
    assert [each.programs for each in asked] == [(name,) for name in plan.PROGRAMS]


def test_sizes_that_cannot_be_are_refused(asked, tmp_path):
    experiment = tiny.params()
    experiment.task.encoder.moe.num_experts = 0
    with pytest.raises(ValueError, match="task.encoder.moe.num_experts = 0: expected 1 or more"):
        kept_plans.load_or_make(tiny.request(params=experiment), tmp_path)
    assert not asked
