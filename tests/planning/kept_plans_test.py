"""Plans that are kept in folders."""

import dataclasses
import json

import pytest

from lingvo_gshard.planning import kept_plans, plan, plan_pictures, plan_text
from lingvo_gshard.planning.compiled import own_process, run_programs
from lingvo_gshard.planning.published import factors
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.sharding.mesh import Mesh
from tests.planning import plans, published_steps, tiny
from tests.planning.published_steps import record


@pytest.fixture
def asked(monkeypatch):
    """Makes plans at once in place of processes; returns the list of requests."""
    requests = []

    def make(function, request):
        assert function.func is run_programs.make_plan
        requests.append(request)
        made = plans.plan(plans.cost(), settings=request.settings)
        programs = dict.fromkeys(request.programs, made.step)
        return dataclasses.replace(made, programs=programs)

    monkeypatch.setattr(own_process, "call", make)
    monkeypatch.setattr(plan_pictures, "draw_step", lambda *_: None)  # It takes its time.
    return requests


def test_a_plan_is_made_once(asked, tmp_path):
    first = kept_plans.load_or_make(tiny.request(), tmp_path)
    assert kept_plans.load_or_make(tiny.request(), tmp_path) == first == plan.load(tmp_path)
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
    assert list(whole.programs) == ["train", "decode"] and whole.main == "train"
    assert len(asked) == 2


def test_every_program_is_reported_and_the_pictures_are_drawn_once(asked, monkeypatch, tmp_path):
    reported = []
    drawn = []

    def markdown(made):
        reported.append(list(made.programs))
        return ""

    monkeypatch.setattr(plan_text, "markdown", markdown)
    monkeypatch.setattr(plan_pictures, "draw_step", lambda made, _: drawn.append(made))
    kept_plans.load_or_make(tiny.request(programs=plan.PROGRAMS), tmp_path)
    assert reported == [list(plan.PROGRAMS[:n]) for n in (1, 2, 3, 4)]
    assert [list(made.programs) for made in drawn] == [["train"]]


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
    assert list(plan.load(tmp_path).programs) == ["train", "initialize"]
    kept_plans.load_or_make(everything, tmp_path)
    assert [each.programs for each in asked] == [(name,) for name in plan.PROGRAMS]


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_kept_plan_that_is_damaged_is_made_again(asked, tmp_path, damage):
    whole = kept_plans.load_or_make(tiny.request(), tmp_path)
    file = tmp_path / "plan.json"
    file.unlink() if damage == "missing" else file.write_text(file.read_text()[:-9])
    assert kept_plans.load_or_make(tiny.request(), tmp_path) == whole == plan.load(tmp_path)
    assert len(asked) == 2


def test_an_interrupted_plan_is_made_again_and_others_are_kept(asked, monkeypatch, tmp_path):
    kept_plans.load_or_make(tiny.request(), tmp_path / "first")

    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(plan, "save", killed)
        kept_plans.load_or_make(tiny.request(), tmp_path / "second")
    kept_plans.load_or_make(tiny.request(), tmp_path / "first")
    assert len(asked) == 2
    kept_plans.load_or_make(tiny.request(), tmp_path / "second")
    assert len(asked) == 3


def test_sizes_that_the_mesh_does_not_divide_are_refused(asked, tmp_path):
    with pytest.raises(ValueError, match="16 partitions .* do not divide .*num_experts = 8"):
        sixteen = Partitioning.parse(Mesh.flat(16), "BGE:d")
        kept_plans.load_or_make(tiny.request(partitioning=sixteen), tmp_path)
    assert not asked
