"""Launches: their settings, and the record in a run's folder."""

import dataclasses
import functools
import shutil
import types

import pytest

from lingvo_gshard import registry
from lingvo_gshard.input import manifest, tokenizer
from lingvo_gshard.input.base_input import DataFacts
from lingvo_gshard.input.batches import TranslationInput
from lingvo_gshard.layers.gating_layers import TaskTop2Gating
from lingvo_gshard.runs import launch as launches
from lingvo_gshard.runs.launch import Launch
from lingvo_gshard.train.hooks import NonFinite
from tests.runs import data_folder
from xla_spmd.files import digests

_FACTS = DataFacts(4000, 2000, ("de", "fr", "qta"))
_LAUNCH = Launch("toy.Dense4L", (), "/data", _FACTS)


def _params(*overrides, model="toy.MoE8E4L"):
    return launches.experiment_params(Launch(model, overrides, "/data", _FACTS))


def test_settings_apply_in_order_and_the_data_binds_the_vocabularies():
    p = _params("train.max_steps=5", "train.max_steps=7", "optimizer.beta2=0.9")
    assert (p.train.max_steps, p.optimizer.beta2) == (7, 0.9)
    assert (p.task.source_vocab_size, p.task.target_vocab_size) == (4000, 2000)
    assert p.input.data_dir == p.eval_input.data_dir == "/data"


def test_settings_of_eval_input_hold_for_both_splits_that_are_evaluated():
    launch = Launch("toy.MoE8E4L", ("eval_input.batch_size=8", "input.batch_size=4"), "/d", _FACTS)
    params = launches.experiment_params(launch)
    dev, test = (launches.evaluated_input(launch, params, split) for split in ("dev", "test"))
    assert (dev.split, test.split) == ("dev", "test")
    assert test.Copy().Set(split="dev") == dev and test.batch_size == 8
    with pytest.raises(ValueError, match="--split=flores: --mode=eval evaluates dev or test"):
        launches.evaluated_input(launch, params, "flores")


def _data_with_text(folder, *splits):
    """Returns a launch with data whose one language has the text of some splits, by name alone."""
    launch = data_folder.prepare(folder, b"source", b"target", _LAUNCH)
    data = manifest.load(folder)
    text = {split: data.source_vocabulary.file for split in splits}
    manifest.save(
        dataclasses.replace(data, languages=(manifest.Language("de", {}, text, {}),)), folder
    )
    return launch


def _write_checkpoints(logdir, *steps):
    """Writes the files by which complete checkpoints are known, and the settings of their model."""
    for step in steps:
        (logdir / f"checkpoints/{step}").mkdir(parents=True)
        (logdir / f"checkpoints/{step}/commit_success.txt").touch()
    (logdir / "params.txt").write_text(_params(model="toy.Dense4L").ToText())


def test_a_misspelled_split_is_not_decoded(tmp_path):
    launch = _data_with_text(tmp_path / "data", "test", "flores")
    launches.record(launch, str(tmp_path / "run"))
    _write_checkpoints(tmp_path / "run", 4)
    launches.check_to_decode(launch, str(tmp_path / "run"), "flores")
    message = "--split=tset: no language of .*data has text of it to decode; .* are flores, test.$"
    with pytest.raises(ValueError, match=message):
        launches.check_to_decode(launch, str(tmp_path / "run"), "tset")


_train = functools.partial(launches.check_to_train, evaluates=True)
_evaluate = functools.partial(launches.check_to_evaluate, split="dev")
_decode = functools.partial(launches.check_to_decode, split="test")


@pytest.mark.parametrize("check", [_train, _evaluate, _decode])
def test_nothing_is_computed_on_data_of_another_vocabulary(tmp_path, check):
    launch = _data_with_text(tmp_path / "data", "test")
    launches.record(launch, str(tmp_path / "run"))
    (tmp_path / "run/vocab/target.model").write_bytes(b"other")
    with pytest.raises(ValueError, match=r"run/vocab/target.model: .* another vocabulary than"):
        check(launch, str(tmp_path / "run"))


@pytest.mark.parametrize("check", [_train, _decode, launches.check_weights])
def test_the_folder_of_another_model_is_refused(tmp_path, check):
    launch = _data_with_text(tmp_path / "data", "test")
    launches.record(launch, str(tmp_path / "run"))
    _write_checkpoints(tmp_path / "run", 4)
    check(launch, str(tmp_path / "run"))
    with pytest.raises(ValueError, match="holds another model; choose .* differs in task.dim: 32"):
        check(launch.changed(["task.dim=32"]), str(tmp_path / "run"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["decode.average_checkpoints=3"], r"mean of 3 .* step 8 .* are \[4, 8\]: give 1 to 2"),
        (["decode.average_checkpoints=0"], "the mean of 0 checkpoints up to step 8 was asked for"),
        (["decode.checkpoint_step=6"], r"checkpoints/6: no whole checkpoint; there are \[4, 8\]"),
        (["decode.average_checkpoints=2", "decode.checkpoint_step=4"], r"there are \[4\]: give 1"),
    ],
)
def test_checkpoints_that_are_missing_are_not_evaluated(tmp_path, settings, message):
    logdir = str(tmp_path / "run")
    launch = _data_with_text(tmp_path / "data", "test")
    launches.record(launch, logdir)
    with pytest.raises(ValueError, match=r"run: there is no checkpoint; train first\.$"):
        _decode(launch, logdir)

    _write_checkpoints(tmp_path / "run", 4, 8)
    _decode(launch.changed(["decode.average_checkpoints=2"]), logdir)
    with pytest.raises(ValueError, match=message):
        _decode(launch.changed(settings), logdir)


def test_damage_is_left_to_whoever_reads_the_checkpoints(tmp_path):
    launch = _data_with_text(tmp_path / "data", "test")
    launches.record(launch, str(tmp_path / "run"))
    (tmp_path / "run/damaged_checkpoints").mkdir()
    _decode(launch, str(tmp_path / "run"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["optimizer.schedule.cool_down_steps=50", "optimizer.schedule.total_steps=200"],
            "max_steps is 300, but .* zero at step 200: set optimizer.schedule.total_steps=300",
        ),
        (["train.early_stop_patience=3"], "patience=3 needs --mode=train_and_eval"),
        (["train.warm_start_from=/none"], "warm_start_from=/none: there is no such run or file"),
    ],
)
def test_settings_that_training_could_not_follow_are_refused(tmp_path, settings, message):
    launch = data_folder.prepare(tmp_path / "data", b"ours", b"english", _LAUNCH)
    launch = launch.changed(["train.max_steps=300"])
    launches.check_to_train(launch, str(tmp_path / "run"), evaluates=False)
    with pytest.raises(ValueError, match=message):
        changed = launch.changed(settings)
        launches.check_to_train(changed, str(tmp_path / "run"), evaluates=False)


@pytest.mark.parametrize("remat", ["BLOCK", "AUTO"])
def test_sizes_are_checked_whatever_recomputation_fits(tmp_path, remat):
    launch = data_folder.prepare(tmp_path / "data", b"ours", b"english", _LAUNCH)
    launch = launch.changed([f"task.encoder.remat={remat}"])
    launches.check_sizes(launch, ["input"], 2)
    with pytest.raises(ValueError, match=r"input\.batch_size = 0: expected 1 or more"):
        launches.check_sizes(launch.changed(["input.batch_size=0"]), ["input"], 2)


@pytest.mark.parametrize("check", [launches.check_to_decode, launches.check_to_evaluate])
def test_a_folder_without_a_run_is_not_decoded(tmp_path, check):
    launch = _data_with_text(tmp_path / "data", "test")
    with pytest.raises(ValueError, match="none: no experiment.json; give the --logdir of a traine"):
        check(launch, str(tmp_path / "none"), "test")


@pytest.mark.parametrize(
    ("split", "check"),
    [
        ("train", lambda launch, _: launches.check_files(launch, ["input", "eval_input"])),
        ("dev", lambda launch, _: launches.check_files(launch, ["input", "eval_input"])),
        ("dev", functools.partial(launches.check_to_evaluate, split="dev")),
        ("test", functools.partial(launches.check_to_evaluate, split="test")),
    ],
)
def test_missing_records_are_named_before_the_devices_start(tmp_path, split, check):
    launch = data_folder.prepare(tmp_path / "data", b"source", b"target", _LAUNCH)
    launches.record(launch, str(tmp_path / "run"))
    data = manifest.load(tmp_path / "data")
    records = {}
    for name in ("train", "dev", "test"):
        file = data.source_vocabulary.file  # It is there.
        if name == split:
            file = digests.File(f"records/{split}/de.array_record", 1, "")
        shard = manifest.Shard(file, data.source_vocabulary.file, 5)
        records[name] = manifest.Records((shard,), 1, 1, 0)
    languages = (manifest.Language("de", records, {}, {}),)
    manifest.save(dataclasses.replace(data, languages=languages), tmp_path / "data")
    with pytest.raises(ValueError, match=f"records/{split}/de.array_record is missing; put it"):
        check(launch, str(tmp_path / "run"))


def test_an_experiment_without_test_is_not_evaluated_on_it(monkeypatch):
    monkeypatch.setattr(registry, "get_class", lambda name: object)
    with pytest.raises(ValueError, match=r"--split=test: toy.Dense4L has no Test\(\)"):
        launches.evaluated_input(_LAUNCH, None, "test")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.max_stps=5", "No hyperparameter 'train.max_stps'; did you mean train.max_steps"),
        ("train.max_steps=many", r"train.max_steps is \d+; expected int, got str"),
        ("train.max_steps=2.5", "expected int, got float"),
        ("decode.tell_attention=1", "expected bool, got int"),
        ("train.warm_start_from=3", "is None; expected str or None, got int"),
        ("task=3", "task is a group of settings; set one of them, such as task."),
        ("sharding=3", "sharding is 'BGE:d'; expected str, got int"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_line(override, message):
    with pytest.raises(ValueError, match=f"--set={override}: .*{message}") as error:
        _params(override)
    assert "\n" not in str(error.value)


def test_optional_settings_take_none_and_floats_take_ints():
    p = _params("train.eval_batches=None", "train.save_checkpoints_secs=60", "optimizer.beta2=1")
    assert (p.train.eval_batches, p.train.save_checkpoints_secs) == (None, 60)
    assert p.optimizer.beta2 == 1


def test_new_settings_replace_a_continued_runs(tmp_path, fastest):
    """Repeating the command records each setting once."""
    fastest("float32")
    launch = dataclasses.replace(_LAUNCH, overrides=("train.max_steps=5", "train.seed=2"))
    launches.record(
        data_folder.prepare(tmp_path / "data", b"ours", b"english", launch), str(tmp_path)
    )
    for _ in range(2):
        launch = launches.launch_of(None, ("train.max_steps=9",), None, str(tmp_path))
        launch, _ = launches.with_product_dtype(launch, str(tmp_path))
        assert launch.overrides[:2] == ("train.max_steps=9", "train.seed=2")
        assert launch.overrides[2:] == ("task.product_dtype=float32",)
        launches.record(launch, str(tmp_path))
        fastest("bfloat16")  # On another machine, the run has the same dtype.


def test_an_enum_is_set_by_name():
    assert _params("train.on_nonfinite=SKIP").train.on_nonfinite is NonFinite.SKIP
    with pytest.raises(ValueError, match="train.on_nonfinite is one of STOP, SKIP"):
        _params("train.on_nonfinite=skip")


def test_neither_a_model_nor_a_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no run yet .*: give both --model and --data_dir"):
        launches.launch_of("toy.MoE8E4L", (), None, str(tmp_path))


def test_data_of_another_vocabulary_is_refused():
    with pytest.raises(ValueError, match=r"task.source_vocab_size is 512, but .* 4000 pieces"):
        _params("task.source_vocab_size=512")


def test_tokens_of_languages_are_forced():
    facts = dataclasses.replace(_LAUNCH.facts, language_tokens=("deu_Latn", "fra_Latn"))
    launch = dataclasses.replace(_LAUNCH, facts=facts)
    assert launches.experiment_params(launch).decode.forces_first
    assert not launches.experiment_params(_LAUNCH).decode.forces_first


def test_data_of_another_kind_is_refused_in_one_line():
    of_text = DataFacts(30, 30, ("web",), "text")
    p = launches.experiment_params(Launch("toy.LmDense4L", (), "/data", of_text))
    assert p.task.vocab_size == 30
    for model, facts, kinds in (
        ("toy.LmDense4L", _FACTS, "kind text, but /data holds kind parallel"),
        ("toy.Dense4L", of_text, "kind parallel, but /data holds kind text"),
    ):
        with pytest.raises(ValueError, match=f"{model} learns from data of {kinds}") as error:
            launches.experiment_params(Launch(model, (), "/data", facts))
        assert "\n" not in str(error.value)


def test_text_has_one_vocabulary(tmp_path):
    launch = Launch("toy.LmDense4L", (), "/data", DataFacts(8, 8, ("web",), "text"))
    launch = data_folder.prepare_text(tmp_path / "data", b"pieces", launch)
    logdir = str(tmp_path / "run")
    launches.record(launch, logdir)
    assert [path.name for path in (tmp_path / "run/vocab").iterdir()] == ["text.model"]
    assert launches.recorded(logdir) == launch
    assert [path.read_bytes() for path in launches.vocabularies(logdir)] == [b"pieces"] * 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no experiment.json; give the --logdir of a trained model"),
        ("{", "experiment.json is damaged"),
        ("{}", "experiment.json has no version, expected 1"),
        (
            '{"version": 1, "launch": {}}',
            "experiment.json is damaged: its contents do not match its digest",
        ),
    ],
)
def test_a_folder_without_a_run_is_refused(tmp_path, text, message):
    if text is not None:
        (tmp_path / "experiment.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        launches.recorded(str(tmp_path))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "experiment.json has no 'launch'"),
        ({"launch": {"model": "m"}, "data": {}}, "experiment.json has no '"),
    ],
)
def test_a_record_that_lacks_something_is_refused(tmp_path, fields, message):
    digests.write_json(tmp_path / "experiment.json", 1, fields)
    with pytest.raises(ValueError, match=message):
        launches.recorded(str(tmp_path))


def test_a_record_holds_the_vocabularies_and_refuses_others(tmp_path):
    logdir = str(tmp_path / "run")
    launch = data_folder.prepare(tmp_path / "a", b"ours", b"english", _LAUNCH)
    launches.record(launch, logdir)
    launches.record(launch, logdir)  # As if the run continued.
    copies = tokenizer.vocabulary_files(logdir, "parallel")
    assert [p.read_bytes() for p in copies] == [b"ours", b"english"]
    with pytest.raises(ValueError, match=r"run/vocab/target.model: .* another vocabulary than"):
        launches.record(data_folder.prepare(tmp_path / "b", b"ours", b"other", _LAUNCH), logdir)
    assert launches.recorded(logdir) == launch
    assert [p.read_bytes() for p in launches.vocabularies(logdir)] == [b"ours", b"english"]
    (tmp_path / "run/vocab/source.model").write_bytes(b"0urs")
    with pytest.raises(ValueError, match=r"run/vocab/source.model has SHA-256"):
        launches.vocabularies(logdir)


def _with_facts(launch):
    """Returns the launch with the current facts of its folder."""
    facts = dataclasses.replace(
        launch.facts, fingerprint=TranslationInput.Facts(launch.data_dir).fingerprint
    )
    return dataclasses.replace(launch, facts=facts)


def test_other_data_with_the_same_vocabularies_is_refused(tmp_path):
    """In another folder, or made again in the same one. Equal data may have moved."""
    logdir = str(tmp_path / "run")
    folder = tmp_path / "data"
    launch = _with_facts(data_folder.prepare(folder, b"ours", b"english", _LAUNCH))
    launches.record(launch, logdir)

    shutil.copytree(folder, tmp_path / "moved")
    moved = dataclasses.replace(launch, data_dir=str(tmp_path / "moved"))
    launches.check_data(moved, logdir)

    data = manifest.load(folder)
    (folder / "text").write_text("Haus\thouse\n")
    text = {"test": digests.describe(folder, "text")}
    languages = (manifest.Language("de", {}, text, {}),)
    manifest.save(dataclasses.replace(data, languages=languages), folder)
    for other in (launch, _with_facts(launch)):
        with pytest.raises(ValueError, match=f"{folder} holds other data than {logdir} was"):
            launches.record(other, logdir)
    assert launches.recorded(logdir) == launch


def test_paths_are_recorded_for_every_working_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(TranslationInput, "Facts", lambda data_dir: _FACTS)
    data_folder.prepare(tmp_path / "data", b"ours", b"english", _LAUNCH)
    monkeypatch.chdir(tmp_path)
    settings = ("train.warm_start_from=older/run", "train.max_steps=3")
    launch = launches.launch_of("toy.Dense4L", settings, "data", "run")
    launches.record(launch, "run")

    monkeypatch.chdir("/")
    again = launches.launch_of(None, (), None, str(tmp_path / "run"))
    assert again == launch
    assert again.data_dir == str(tmp_path / "data")
    assert again.overrides[0] == f"train.warm_start_from={tmp_path}/older/run"
    launches.check_data(again, str(tmp_path / "run"))


def test_a_damaged_vocabulary_is_not_recorded(tmp_path):
    launch = data_folder.prepare(tmp_path / "data", b"ours", b"english", _LAUNCH)
    (tmp_path / "data/vocab/source.model").write_bytes(b"0urs")
    with pytest.raises(ValueError, match=r"vocab/source.model has SHA-256"):
        launches.record(launch, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.fixture
def fastest(monkeypatch):
    """Sets the dtype that the CPU multiplies fastest."""

    def set_dtype(dtype):
        monkeypatch.setattr(launches.environment, "multiplies_bfloat16", lambda: True)
        monkeypatch.setattr(launches.product_speed, "fastest_dtype", lambda model_dim: dtype)

    return set_dtype


def _product_dtype(folder, *overrides, model="toy.MoE8E4L"):
    data_dir = None if model is None else str(folder / "data")
    launch = launches.launch_of(model, overrides, data_dir, str(folder / "run"))
    launch, params = launches.with_product_dtype(launch, str(folder / "run"))
    dtype = registry.get_params(launch.model, launch.overrides).task.product_dtype
    assert params.task.product_dtype == dtype
    return dtype


def test_a_new_run_multiplies_in_the_dtype_that_is_faster_here(tmp_path, fastest):
    data_folder.prepare(tmp_path / "data", b"ours", b"english", _LAUNCH)
    sizes = "task.source_vocab_size=8", "task.target_vocab_size=8"
    for dtype in ("bfloat16", "float32"):
        fastest(dtype)
        assert _product_dtype(tmp_path) == dtype
        assert _product_dtype(tmp_path, *sizes, model="m4.MoE128E12L") == "float32"
        assert _product_dtype(tmp_path, "task.product_dtype=float32") == "float32"


def test_nothing_is_measured_on_a_cpu_without_bfloat16_products(tmp_path, monkeypatch):
    monkeypatch.setattr(launches.environment, "multiplies_bfloat16", lambda: False)
    monkeypatch.setattr(launches.product_speed, "fastest_dtype", None)
    data_folder.prepare(tmp_path / "data", b"ours", b"english", _LAUNCH)
    assert _product_dtype(tmp_path) == "float32"


@pytest.mark.parametrize("model", ["toy.Dense4L", None])
@pytest.mark.parametrize("recorded", ["float32", "bfloat16"])
def test_a_run_keeps_its_products_on_another_machine(tmp_path, fastest, model, recorded):
    launch = dataclasses.replace(_LAUNCH, overrides=(f"task.product_dtype={recorded}",))
    launches.record(
        data_folder.prepare(tmp_path / "data", b"ours", b"english", launch), str(tmp_path / "run")
    )
    for dtype in ("bfloat16", "float32"):
        fastest(dtype)
        assert _product_dtype(tmp_path, model=model) == recorded


def test_a_run_that_recorded_no_dtype_stays_at_float32(tmp_path, fastest):
    launches.record(
        data_folder.prepare(tmp_path / "data", b"ours", b"english", _LAUNCH), str(tmp_path / "run")
    )
    fastest("bfloat16")
    assert _product_dtype(tmp_path) == "float32"


def test_a_language_without_training_text_is_not_listed(monkeypatch):
    file = digests.File("a", 1, "0")
    records = manifest.Records((manifest.Shard(file, file, 1),), 3, 3, 0)
    given = [("de", {"train": records, "dev": records}), ("fr", {"dev": records})]
    languages = tuple(manifest.Language(code, each, {}, {}) for code, each in given)
    side = manifest.Vocabulary(file, 8)
    data = types.SimpleNamespace(
        languages=languages,
        source_vocabulary=side,
        target_vocabulary=side,
        kind=manifest.Kind.PARALLEL,
        fingerprint="",
    )
    monkeypatch.setattr(manifest, "load", lambda _: data)
    assert TranslationInput.Facts("data").languages == ("de",)


def _by_task(num_tasks, facts):
    gating = TaskTop2Gating.Params().Set(num_tasks=num_tasks)
    params = registry.get_params("toy.MoE8E4L")
    params.task.encoder.moe.gating = gating
    launches._check_tasks(params, dataclasses.replace(_LAUNCH, facts=facts))


def test_routing_by_task_needs_data_whose_sources_name_their_targets():
    several = DataFacts(4000, 2000, ("de", "en-de", "en-fr", "fr"))
    _by_task(3, several)  # English, German and French.
    with pytest.raises(ValueError, match=r"gating\.num_tasks is 2, but /data has 3 target lang"):
        _by_task(2, several)
    for facts in (_FACTS, dataclasses.replace(several, language_tokens=("deu_Latn", "fra_Latn"))):
        with pytest.raises(ValueError, match="TaskTop2Gating needs data of several target langu"):
            _by_task(1, facts)
