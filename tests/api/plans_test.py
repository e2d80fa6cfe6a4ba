"""Plans from Python: of a jitted function, and of an experiment with its data's vocabularies."""

import os
import types

import jax
import pytest

import lingvo_gshard as gshard
import xla_plan
from lingvo_gshard.api import plans
from lingvo_gshard.input.base_input import DataFacts
from lingvo_gshard.input.batches import TranslationInput
from lingvo_gshard.plans import kept_plans, plan_text
from tests.plans import tiny
from tests.xla_plan import foreign_models
from tests.xla_spmd import compilers
from xla_plan.machines import topology


@pytest.fixture
def cpu(monkeypatch):
    """Puts the devices at hand in the place of a topology."""
    monkeypatch.setattr(topology, "devices", lambda name: jax.devices())
    monkeypatch.setattr(topology, "places", lambda name: tiny.PLACES)
    monkeypatch.setattr(topology, "platform", lambda name: "cpu")


def test_a_jitted_function_is_planned_as_by_the_program(cpu):
    step, args = foreign_models.plain()
    report = gshard.plan(step, args, tiny.TOPOLOGY, roles=["weights=params"])
    assert report.plan.fits and "weights" in report.plan.memory_gib.roles
    assert str(report) == xla_plan.text(report.plan)


@pytest.mark.parametrize(
    ("jitted", "args", "message"),
    [
        (abs, (1,), r"expected a function of jax.jit, got <built-in .*>: jax.jit\(function\)"),
        (jax.jit(abs), 1, r"args: expected a tuple of the arguments, got int: \(args,\)"),
        (jax.jit(abs), {"x": 1}, r"args: expected a tuple of the arguments, got dict"),
    ],
)
def test_a_function_that_cannot_be_planned_is_refused(jitted, args, message):
    with pytest.raises(ValueError, match=message):
        gshard.plan(jitted, args, "v5e:2x2")


def test_an_experiments_plan_equals_the_programs(monkeypatch, tmp_path):
    """The compilers' part is replaced, but the topology's devices come from one."""
    compilers.need("v5e")
    asked = []

    def make(request, folder):
        asked.append((request, folder, os.environ["JAX_PLATFORMS"]))

    monkeypatch.setattr(kept_plans, "load_or_make", make)
    monkeypatch.setattr(plan_text, "screen", lambda made: "a screen")
    made = gshard.experiment(
        "toy.MoE8E4L", settings={"task.source_vocab_size": 80, "task.target_vocab_size": 80}
    )
    report = made.plan("v5e:2x2", programs=["train"], folder=tmp_path)
    ((request, folder, platform),) = asked
    assert str(report) == "a screen" and folder == tmp_path and platform == "cpu"
    assert (request.topology, request.programs) == ("v5e:2x2", ("train",))


def test_a_plan_has_the_datas_vocabularies(monkeypatch, tmp_path):
    compilers.need("v5e")
    facts = DataFacts(kind="parallel", source_vocab_size=340, target_vocab_size=330)
    monkeypatch.setattr(TranslationInput, "Facts", lambda data_dir: facts)
    requests = []
    monkeypatch.setattr(
        kept_plans, "load_or_make", lambda request, folder: requests.append(request)
    )
    monkeypatch.setattr(plan_text, "screen", lambda made: "a screen")
    gshard.experiment("toy.MoE8E4L", data_dir=tmp_path).plan("v5e:2x2")
    task = requests[0].params.task
    assert (task.source_vocab_size, task.target_vocab_size) == (340, 330)


def test_without_data_the_sizes_of_vocabularies_must_be_given():
    compilers.need("v5e")
    with pytest.raises(ValueError, match="no data to take task.source_vocab_size and task.targ"):
        gshard.experiment("toy.MoE8E4L").plan("v5e:2x2")


def test_the_data_has_the_sizes_that_an_experiment_leaves_open():
    facts = DataFacts(kind="parallel", source_vocab_size=340, target_vocab_size=330)
    params = gshard.experiment("toy.MoE8E4L").params
    missing = plans.vocabulary_settings(params, facts)
    assert missing == {"task.source_vocab_size": 340, "task.target_vocab_size": 330}
    fixed = types.SimpleNamespace(task=params.task.Set(source_vocab_size=340))
    assert plans.vocabulary_settings(fixed, facts) == {"task.target_vocab_size": 330}
