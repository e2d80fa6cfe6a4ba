"""Models for transformers: the files equal its own, and it computes the same results.

export_model.py and load_export.py made exported.npz.

B batch, L target length, V vocabulary.
"""

import hashlib
import json
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.checkpoints.checkpoints import Checkpoints
from lingvo_gshard.files import safetensors_file
from lingvo_gshard.hugging_face import exporting, families, importing
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.runs import launch as launches
from lingvo_gshard.runs.run import open_run
from tests.hugging_face import export_model, models
from tests.layers import building

_GOLDEN = pathlib.Path(__file__).with_name("exported.npz")


def _opened(logdir):
    return open_run(launches.recorded(str(logdir)), str(logdir), 1)


def _tensors(folder):
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= safetensors_file.read(path).arrays
    return tensors


def _weights(logdir):
    with Checkpoints(logdir) as saved:
        arrays = saved.arrays(0).items()
        return {path: np.asarray(x) for path, x in arrays if path.startswith("theta.")}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["m2m_100", *[n for n in models.NAMES[:2]]])
def test_an_imported_model_is_exported_unchanged(tmp_path, name):
    """It is exported to several files, and imported again it is the same bit by bit."""
    importing.import_folder(models.MODELS / name, tmp_path / "run")
    notes = exporting.export_folder(_opened(tmp_path / "run"), tmp_path / "out", part_bytes=20_000)
    assert notes[0] == "The run has no vocabulary, so there is no tokenizer."
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2

    config = json.loads((models.MODELS / name / "config.json").read_text())
    got = _tensors(tmp_path / "out")
    want = _tensors(models.MODELS / name)
    assert got.keys() == want.keys()
    for tensor, value in want.items():
        value = np.float32(value)
        # The factor of experts' outputs is in the weights.
        if ".expert_" in tensor and ".fc2." in tensor:
            value *= np.float32(1 - config["moe_token_dropout"])
        np.testing.assert_array_equal(got[tensor], value, err_msg=tensor)

    written = json.loads((tmp_path / "out/config.json").read_text())
    changed = {"torch_dtype", "moe_token_dropout", "max_position_embeddings"}
    changed |= {"encoder_layerdrop", "decoder_layerdrop"}
    for key in written.keys() & config.keys() - changed:
        assert written[key] == config[key], key

    importing.import_folder(tmp_path / "out", tmp_path / "again")
    again = _weights(tmp_path / "again")
    for path, value in _weights(tmp_path / "run").items():
        np.testing.assert_array_equal(again[path], value, err_msg=path)


@pytest.mark.slow
def test_transformers_computes_the_same(tmp_path):
    """A model of ours: no biases, an embedding for each side, positions from 0, BOS first."""
    golden = np.load(_GOLDEN)
    run = export_model.write_run(tmp_path / "run")
    exporting.export_folder(run, tmp_path / "out")
    content = (tmp_path / "out/model.safetensors").read_bytes()
    assert hashlib.sha256(content).hexdigest() == str(golden["sha256"])

    task = run.params.task.Instantiate(building.Unannotated())
    weights = _weights(tmp_path / "run")
    theta = task.weight_specs.Pack(
        tf.constant(weights[f"theta.{path}"]) for path, _ in task.weight_specs.FlattenItems()
    )
    features = export_model.batch().Transform(tf.constant)
    logits, _ = task.FProp(theta, features, Context(Mode.EVAL))
    is_token = features.target_segment_ids.numpy() > 0
    np.testing.assert_allclose(
        logits.numpy()[is_token], golden["logits"][is_token], rtol=1e-4, atol=1e-4
    )

    @tf.function(jit_compile=True, autograph=False)
    def predict(theta, features):
        return task.Predict(theta, features, run.params.decode)

    found = predict(theta, features)
    for row, length, want in zip(found.ids[:, 0], found.lengths[:, 0], golden["ids"], strict=True):
        got = [1, *row.numpy()[:length]]
        assert got == want[: len(got)].tolist()
        assert len(got) == len(want) or got[-1] == 2


@pytest.mark.exhaustive
@pytest.mark.slow
def test_each_sides_own_table_comes_back(tmp_path):
    exporting.export_folder(export_model.write_run(tmp_path / "run"), tmp_path / "out")
    done = importing.import_folder(tmp_path / "out", tmp_path / "again")
    assert done.model == "nllb.MoE54B"
    before = _weights(tmp_path / "run")
    after = _weights(tmp_path / "again")
    for path, value in before.items():
        np.testing.assert_array_equal(after.pop(path), value, err_msg=path)
    # The others are biases of 0.
    assert after and all(path.endswith("_bias") and not after[path].any() for path in after)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ("task.encoder.layer.attention.head_dim=3",),
            "nllb-moe has no task.encoder.layer.attention.head_dim: 3, not 4",
        ),
        (
            ("task.decoder.moe.num_shared=1",),
            "nllb-moe has no task.decoder.moe.num_shared: 1, not 0",
        ),
        (
            ("task.encoder.dense.gated=True",),
            "nllb-moe has no task.encoder.dense.gated: True, not False",
        ),
        (
            ("task.embedding.sinusoids=False",),
            "nllb-moe has no task.embedding.sinusoids: False, not True",
        ),
        (
            ("task.encoder.moe.num_experts=8",),
            "nllb-moe has no task.encoder.moe.num_experts: 8, not 4",
        ),
    ],
)
def test_features_that_transformers_lacks_are_named(settings, message):
    launch = export_model.LAUNCH.changed(settings)
    params = launches.experiment_params(launch)
    with pytest.raises(ValueError, match=f"^--to=huggingface: {message}"):
        families.written(params, (0, 1, 2))


@pytest.mark.slow
def test_a_folder_that_is_not_empty_is_left_alone(tmp_path):
    run = export_model.write_run(tmp_path / "run")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("kept")
    with pytest.raises(ValueError, match="out is not empty: export to a new folder"):
        exporting.export_folder(run, tmp_path / "out")
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == ["mine.txt"]
