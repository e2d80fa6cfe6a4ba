"""Imported decoders are exported bit by bit, and layers that no family has are refused."""

import json
import shutil

import numpy as np
import pytest

from lingvo_gshard import registry
from lingvo_gshard.files import json_fields, safetensors_file
from lingvo_gshard.hugging_face import exporting, families, importing
from lingvo_gshard.runs import launch as launches
from lingvo_gshard.runs.run import open_run
from tests.hugging_face import decoders


def _tensors(folder):
    return safetensors_file.read(folder / "model.safetensors").arrays


@pytest.mark.slow
@pytest.mark.parametrize("name", decoders.NAMES)
def test_an_export_has_the_bits_of_the_import(tmp_path, name):
    theirs = decoders.MODELS / name
    run_dir = str(tmp_path / "run")
    imported = importing.import_folder(theirs, run_dir)
    assert imported.num_weights == decoders.counts(name)["all"]

    exporting.export_folder(open_run(launches.recorded(run_dir), run_dir, 1), tmp_path / "out")
    got = _tensors(tmp_path / "out")
    want = _tensors(theirs)
    assert sorted(got) == sorted(want)
    for tensor, values in want.items():
        np.testing.assert_array_equal(got[tensor], values, err_msg=tensor, strict=True)

    # The same model again, with all values that transformers reads.
    before = families.read(theirs)
    after = families.read(tmp_path / "out")
    assert after.launched_model() == before.launched_model()
    assert after.rows == before.rows
    for field, value in after.values.values.items():
        if field not in ("pad_token_id", "head_dim", "mlp_only_layers", "num_experts"):
            assert before.values.values[field] == value, field


@pytest.mark.slow
def test_no_ordinary_piece_is_exported_as_padding(tmp_path):
    """Without padding, an import takes an ordinary piece's id; transformers would mask it."""
    theirs = tmp_path / "theirs"
    shutil.copytree(decoders.MODELS / "qwen3_moe", theirs)
    fields = json.loads((theirs / "config.json").read_text()) | {"pad_token_id": None}
    (theirs / "config.json").write_text(json.dumps(fields))
    run_dir = str(tmp_path / "run")
    importing.import_folder(theirs, run_dir)

    exporting.export_folder(open_run(launches.recorded(run_dir), run_dir, 1), tmp_path / "out")
    for file in ("config.json", "generation_config.json"):
        written = json.loads((tmp_path / "out" / file).read_text())
        assert written.get("pad_token_id") is None
    assert families.read(tmp_path / "out").rows == families.read(theirs).rows


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("mixtral", ["task.embedding.scaled=True"], "mixtral has no task.embedding.scaled: True"),
        ("qwen3_moe", ["task.decoder.moe.num_shared=1"], "qwen3_moe has no .*num_shared: 1, not 0"),
        ("hy_v3", ["task.decoder.moe.gating.normalized=False"], "hy_v3 has no .*normalized: False"),
        ("olmoe", ["task.decoder.layer.attention.scaled=False"], "olmoe has no .*scaled: False"),
    ],
)
def test_features_that_a_family_lacks_are_refused(name, settings, message):
    with pytest.raises(ValueError, match=f"^--to=huggingface: {message}"):
        families.written(decoders.params(name, *settings), (0, 1, 2))


@pytest.mark.parametrize(
    ("model", "message"),
    [("toy.LmDense4L", "decoders without experts"), ("toy.LmMoE8E4L", "decoders without rotary")],
)
def test_other_decoders_are_refused(model, message):
    params = registry.get_params(model)
    params.task.vocab_size = 100
    with pytest.raises(ValueError, match=f"^--to=huggingface: {message}"):
        families.written(params, (0, 1, 2))


def test_experts_on_one_side_alone_are_refused():
    params = registry.get_params("toy.MoE8E4L")
    params.task.decoder.moe = None
    with pytest.raises(ValueError, match="^--to=huggingface: experts on one side alone"):
        families.written(params, (0, 1, 2))


def _changed(tmp_path, name, **fields):
    """Writes a model's config.json with other fields."""
    given = json.loads((decoders.MODELS / name / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(given | fields))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("mixtral", {"num_key_value_heads": 3}, "num_key_value_heads is 3; expected a divisor of"),
        ("mixtral", {"sliding_window": 64}, "sliding_window is 64; expected None"),
        ("mixtral", {"vocab_size": "x"}, "vocab_size is 'x'; expected 1 to"),
        ("mixtral", {"hidden_act": "tanh"}, "hidden_act is 'tanh'; expected one of relu"),
        ("mixtral", {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters is .* 'default'"),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5; expected 1 to 4"),
        ("mixtral", {"eos_token_id": 61}, "eos_token_id is 61; expected an id below vocab_size 61"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0; expected None"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0; expected 1 or more"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers is 3; expected a list of layers"),
        ("hy_v3", {"mlp_layer_types": ["dense"]}, "mlp_layer_types is .*; expected 3 of dense and"),
        ("hy_v3", {"num_shared_experts": 0}, "num_shared_experts is 0; expected 1 or more"),
    ],
)
def test_configs_with_another_function_are_refused(tmp_path, name, fields, message):
    with pytest.raises(ValueError, match=rf"config\.json: {message}"):
        families.read(_changed(tmp_path, name, **fields))


@pytest.mark.parametrize(
    ("fields", "rows"),
    [
        ({"pad_token_id": None}, (0, 1, 40)),
        ({"pad_token_id": 40, "bos_token_id": None}, (1, 0, 40)),
        ({"eos_token_id": [7, 40]}, (57, 1, 7)),
        ({"eos_token_id": 0, "bos_token_id": None, "pad_token_id": None}, (2, 1, 0)),
    ],
)
def test_special_tokens_have_other_ids(tmp_path, fields, rows):
    config = families.read(_changed(tmp_path, "olmoe", **fields))
    assert config.rows == rows
    order = config.order()
    assert tuple(order[:3]) == rows
    assert sorted(order) == list(range(61))
    moved = set(np.flatnonzero(order != np.arange(61)).tolist())
    assert moved <= {0, 1, 2, *rows}


def _read(folder):
    """Returns our reading of a folder's config.json, and the lines that name its unused fields."""
    config = families.read(folder)
    read = (config.launched_model(), config.rows, config["vocab_size"])
    return read, json_fields.not_used(config.values)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "qwen3_moe" else pytest.mark.slow)
        for name in decoders.NAMES
    ],
)
def test_each_field_changes_the_model_or_is_refused_or_named(tmp_path, name):
    """As apart_test.py does it: no field of any value is ignored in silence."""
    given = json.loads((decoders.MODELS / name / "config.json").read_text())
    before, _ = _read(_changed(tmp_path, name))
    for field in given:
        numbers = (7, -1, 2**40, 10**400, float("nan"))
        for value in (*numbers, "x", [9], {"rope_theta": "x"}, None, True):
            if value == given[field]:
                continue
            try:
                after, not_used = _read(_changed(tmp_path, name, **{field: value}))
            except ValueError as error:
                assert "config.json" in str(error) and "\n" not in str(error), (field, value)
                continue
            named = any(field in line for line in not_used)
            assert after != before or named or value is None, (field, value)
