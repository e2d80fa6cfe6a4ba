"""Runs with remat=AUTO: what is decided, kept and resumed, with a compiler made by hand."""

import jax
import pytest

from lingvo_gshard.input.base_input import DataFacts
from lingvo_gshard.layers.numerics import Remat
from lingvo_gshard.model import remats
from lingvo_gshard.runs import launch as launches
from lingvo_gshard.runs import run
from lingvo_gshard.runs.launch import Launch
from lingvo_gshard.train.estimator import Estimator
from tests.runs import data_folder

_AUTO = ("task.encoder.remat=AUTO", "task.decoder.remat=AUTO")
_GIB = 2**30
_NEEDED = dict(zip(Remat.order(), (4 * _GIB, 3 * _GIB, 2 * _GIB, _GIB), strict=True))


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """Returns (settings, GiB of a device) -> the run in one folder, and what was compiled."""
    launch = Launch("toy.MoE8E4L", (), "/data", DataFacts(8, 8, ("de",)))
    data_dir = data_folder.prepare(tmp_path / "data", b"ours", b"english", launch).data_dir
    logdir = str(tmp_path / "run")
    compiled = []

    def training_bytes(estimator, batch_spec):
        task = estimator.params.task
        compiled.append(task.decoder.remat)
        assert batch_spec.features.source_ids.shape == (32, 64)
        return _NEEDED[task.decoder.remat]

    monkeypatch.setattr(Estimator, "training_bytes", training_bytes)
    monkeypatch.setattr(remats, "_first_by_estimate", lambda *_: 1)
    monkeypatch.setattr(run.loss_products, "of_experiment", lambda params: [])

    def opened(settings, gib, model="toy.MoE8E4L"):
        compiled.clear()
        monkeypatch.setattr(run.devices, "memory_bytes", lambda: gib * _GIB)
        settings = (*settings, "task.product_dtype=float32")
        launch = launches.launch_of(model, settings, data_dir, logdir)
        made = run.open_run(launch, logdir, 1, trains=True)
        return made, list(compiled)

    return opened


def _kept(made):
    """Records a run as training does; returns the remats in its params.txt."""
    launches.record(made.launch, made.logdir)
    with made.estimator.claimed():
        with open(f"{made.logdir}/params.txt") as file:
            lines = file.read().splitlines()
    return [line for line in lines if "remat" in line.partition(" : ")[0]]


@pytest.mark.parametrize(
    ("gib", "remat"),
    [(4, "NONE"), (3, "ALL_BUT_PROJECTIONS"), (2, "ALL_BUT_PRODUCTS"), (1, "BLOCK")],
)
def test_a_new_run_gets_the_least_that_fits(launched, gib, remat):
    made, _ = launched(_AUTO, gib)
    assert made.computing == f"float32 products, remat {remat}"
    assert made.launch.overrides[:2] == tuple(s.replace("AUTO", remat) for s in _AUTO)
    assert [line.partition(" : ")[2] for line in _kept(made)] == [remat, remat]


def test_an_existing_run_keeps_its_remat_on_a_larger_machine(launched):
    made, _ = launched(_AUTO, 2)
    before = _kept(made)
    for settings, model in ((_AUTO, "toy.MoE8E4L"), ((), None)):
        again, compiled = launched(settings, 4, model)
        assert not compiled and _kept(again) == before

    # The user may change it; results stay the same.
    again, compiled = launched(("task.encoder.remat=NONE",), 4, None)
    assert not compiled and again.computing.endswith("NONE (encoder), ALL_BUT_PRODUCTS (decoder)")
    _kept(again)


def test_a_run_that_never_recorded_its_remat_decides(launched):
    """Such as one that was imported, with the remat of its experiment."""
    made, compiled = launched((), 4)
    assert not compiled
    _kept(made)
    made, compiled = launched(_AUTO, 3, None)
    assert compiled == [Remat.ALL_BUT_PROJECTIONS, Remat.NONE]
    assert [line.rpartition(" ")[2] for line in _kept(made)] == ["ALL_BUT_PROJECTIONS"] * 2


def test_a_fixed_stack_stays_as_it_is(launched):
    made, _ = launched(("task.encoder.remat=BLOCK", "task.decoder.remat=AUTO"), 3)
    assert made.computing.endswith("remat BLOCK (encoder), ALL_BUT_PROJECTIONS (decoder)")


def test_nothing_fits(launched, tmp_path):
    message = (
        r"^remat=AUTO: nothing fits\. With BLOCK, a training step needs 1\.000 GiB, and a device "
        r"has 0\.500 GiB: use more devices, .*\)\.$"
    )
    with pytest.raises(ValueError, match=message):
        launched(_AUTO, 0.5)
    assert not (tmp_path / "run").exists()


def test_a_compiler_may_refuse_what_is_too_large(launched, monkeypatch):
    errors = {
        Remat.ALL_BUT_PROJECTIONS: "RESOURCE_EXHAUSTED: Used 20.0G of 15.5G hbm.\nLargest buffers",
        Remat.ALL_BUT_PRODUCTS: "RESOURCE_EXHAUSTED: Used 16.0G of 15.5G hbm.",
    }

    def training_bytes(estimator, batch_spec):
        remat = estimator.params.task.decoder.remat
        if remat in errors:
            raise jax.errors.JaxRuntimeError(errors[remat])
        return _NEEDED[remat]

    monkeypatch.setattr(Estimator, "training_bytes", training_bytes)
    made, _ = launched(_AUTO, 1)
    assert made.computing.endswith("remat BLOCK")
    errors[Remat.BLOCK] = "RESOURCE_EXHAUSTED: Used 15.6G of 15.5G hbm."
    with pytest.raises(ValueError, match=r"BLOCK, .* needs more than the compiler .* 15\.6G of"):
        launched(_AUTO, 1)
    errors[Remat.BLOCK] = "INTERNAL: no such instruction"
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        launched(_AUTO, 1)


def test_a_run_that_does_not_train_compiles_no_training_step(launched, tmp_path):
    made, _ = launched((), 4)
    launch = made.launch.changed(_AUTO)
    again = run.open_run(launch, str(tmp_path / "other"), 1)
    assert again.computing.endswith("remat BLOCK")


@pytest.mark.slow  # Compiles three training steps.
def test_the_compiler_decides(tmp_path, monkeypatch):
    launch = Launch("toy.MoE8E4L", (), "/data", DataFacts(32, 32, ("de",)))
    data_dir = data_folder.prepare(tmp_path / "data", b"ours", b"english", launch).data_dir
    logdir = str(tmp_path / "run")

    def opened(remat):
        settings = [setting.replace("AUTO", remat) for setting in _AUTO]
        launch = launches.launch_of("toy.MoE8E4L", tuple(settings), data_dir, logdir)
        return run.open_run(launch, logdir, 1, trains=True)

    fixed = opened("NONE")
    batch_spec = fixed.params.input.cls.batch_specs(fixed.params.input)
    num_bytes = fixed.estimator.training_bytes(batch_spec)
    monkeypatch.setattr(run.devices, "memory_bytes", lambda: num_bytes - 1)
    assert opened("AUTO").computing.endswith("remat ALL_BUT_PROJECTIONS")
