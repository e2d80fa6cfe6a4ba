"""Settings as text: lists, TOML files, and suggestions for wrong paths."""

import pytest

from lingvo_gshard import registry
from lingvo_gshard.core import hyperparams, settings


@pytest.fixture(scope="module")
def params():
    return registry.get_params("toy.MoE8E4L")


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("batch_size", ["input.batch_size", "eval_input.batch_size", "decode.batch_size"]),
        ("num_experts", ["task.encoder.moe.num_experts", "task.decoder.moe.num_experts"]),
        ("task.decoder.num_expert", ["task.decoder.moe.num_experts"]),
        ("learning_rate", ["optimizer.schedule.multiplier", "optimizer.schedule.decay_start"]),
        ("train.max_step", ["train.max_steps"]),
        ("vocab_size", ["task.source_vocab_size", "task.target_vocab_size"]),
        ("beam", ["decode.beam_size"]),
    ],
)
def test_a_wrong_path_is_searched_for_in_the_whole_tree(params, wrong, right):
    assert hyperparams.similar(params, wrong)[: len(right)] == right
    with pytest.raises(
        ValueError, match=rf"--set={wrong}=1: No hyper.*; did you mean .*{right[0]}"
    ):
        hyperparams.apply_setting(params, f"{wrong}=1")


def test_an_unlike_name_has_no_suggestion(params):
    assert hyperparams.similar(params, "qqqq") == []
    assert hyperparams.similar(params, "lr") == []


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("train.max_steps=1e3", 1000),
        ("train.max_steps=2000.0", 2000),
        ("input.languages=['de', 'fr']", ("de", "fr")),
        ("train.ema_decay=1", 1.0),
    ],
)
def test_an_equal_value_of_another_type_is_taken(setting, value):
    params = registry.get_params("toy.MoE8E4L", [setting])
    taken = params.Get(setting.partition("=")[0])
    assert (taken, type(taken)) == (value, type(value))


@pytest.mark.parametrize("setting", ["train.max_steps=1e-3", "train.max_steps=inf"])
def test_a_fraction_is_not_a_number_of_steps(setting):
    with pytest.raises(ValueError, match="expected int, got (float|str)"):
        registry.get_params("toy.MoE8E4L", [setting])


@pytest.mark.parametrize("name", ["toy.MoE8E4L", "toy.LmMoE8E4L", "nllb.MoE54B", "m4.MoE2048E36L"])
def test_a_file_of_all_settings_changes_none(name, tmp_path):
    params = registry.get_params(name)
    path = tmp_path / "all.toml"
    path.write_text(settings.to_toml(params, name))
    model, changes = settings.from_toml(path)
    assert model == name and len(changes) > 50
    assert registry.get_params(model, changes) == params


def test_texts_of_a_file_may_hold_anything(tmp_path):
    params = hyperparams.Params()
    params.Define("text", 'a "b" \\ c\n\x01\x7fé\U0001f600', "")
    params.Define("pairs", (("theta\\..*", "SAME"),), "")
    params.Define("table", {"a b": 1, "c": True}, "")
    path = tmp_path / "texts.toml"
    path.write_text(settings.to_toml(params, "m"))
    _, changes = settings.from_toml(path)
    read = dict(map(hyperparams.parse_setting, changes))
    assert read["text"] == params.text and read["pairs"] == [["theta\\..*", "SAME"]]
    assert (read["table.a b"], read["table.c"]) == (1, True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such file"),
        ("[train\n", "expected a TOML file"),
        ("model = 3\n", "model: expected a name, got 3"),
    ],
)
def test_a_file_that_is_not_toml_is_refused(tmp_path, content, message):
    path = tmp_path / "config.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=rf"--config={path}: {message}"):
        settings.from_toml(path)


def test_settings_are_found_by_their_names_and_descriptions(params):
    listed = settings.listing(settings.matching(params, "max_steps"))
    assert listed == "train.max_steps = 2000\n    int. The step at which training ends."
    paths = [setting.path for setting in settings.matching(params, "experts")]
    assert "task.encoder.moe.num_experts" in paths and "train.max_steps" not in paths
    every = settings.listing(settings.matching(params, None))
    assert "task.encoder.moe.dispatch = EINSUM\n    EINSUM|GATHER|" in every
    assert "train.ema_decay = None\n    float or None. " in every
    assert "data_dir" not in every and ".cls" not in every
    with pytest.raises(ValueError, match="no setting has 'qqqq' in its name or description"):
        settings.matching(params, "qqqq")
