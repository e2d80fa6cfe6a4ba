"""Logits and searches of NLLB-MoE and M2M-100 equal transformers': see write_models.py.

B batch, T source length, L target length, V vocabulary, k beam.
"""

import json
import shutil

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.beam_search.beam import Stopping
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.hugging_face import importing
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.runs import launch as launches
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from tests import exhaustive
from tests.hugging_face import models
from tests.layers import building
from xla_spmd.mesh import Mesh

_LOOP = ("task.encoder.layers_as=LOOP", "task.decoder.layers_as=LOOP")
_UNROLLED = ("task.encoder.layers_as=UNROLLED", "task.decoder.layers_as=UNROLLED")
# transformers' early_stopping.
_STOPPING = {False: Stopping.LIKELY, True: Stopping.FIRST, "never": Stopping.DECIDED}
_FORCED = 40  # write_models.TARGET_LANGUAGE.


def _golden(name):
    return dict(np.load(models.MODELS / name / "goldens.npz"))


def _assert_close(logits, golden):
    """Compares logits [B, L, V] with theirs, whose first two ids are exchanged."""
    logits = np.concatenate([logits[..., [1, 0]], logits[..., 2:]], -1)
    is_token = golden["target"] != models.PAD
    np.testing.assert_allclose(
        logits[: len(is_token)][is_token], golden["logits"][is_token], rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("name", models.NAMES)
@pytest.mark.parametrize("settings", [pytest.param(_LOOP, marks=pytest.mark.slow), _UNROLLED])
def test_logits(name, settings):
    if settings == _LOOP and name == "nllb_moe_sparse":
        settings = ("task.encoder.layers_as=LOOP",)  # Its decoder is less than a block.
    golden = _golden(name)
    task = models.params(name, *settings).task.Instantiate(building.Unannotated())
    theta = models.weights(name, task).Transform(tf.constant)
    features = models.features(golden["source"], golden["target"]).Transform(tf.constant)
    logits, _ = task.FProp(theta, features, Context(Mode.EVAL))
    _assert_close(logits.numpy(), golden)


@pytest.mark.slow
@pytest.mark.parametrize("num_partitions", [*exhaustive.only(1, 2, 4), 8])
@pytest.mark.parametrize("name", models.NAMES)
def test_logits_on_partitions(name, num_partitions):
    golden = _golden(name)
    if num_partitions == 8 and name != "nllb_moe_sparse":
        partitioning = building.REPLICATED_EXPERTS
    else:
        # All devices have all three experts.
        letters = "BGU" if name == "nllb_moe_sparse" else "BGUE"
        table = dict.fromkeys(letters, "d")
        partitioning = Partitioning.from_dict(Mesh.flat(num_partitions), table)
    settings = () if name == "nllb_moe_sparse" else _LOOP
    task = models.params(name, *settings).task.Instantiate(Annotator(partitioning))

    # Rows of padding fill the batch up to a multiple of the devices.
    missing = -len(golden["source"]) % num_partitions
    source, target = (
        np.pad(golden[side], ((0, missing), (0, 0)), constant_values=models.PAD)
        for side in ("source", "target")
    )
    features = models.features(source, target)
    executable = building.compile_fn(
        lambda theta, batch: NestedMap(logits=task.FProp(theta, batch, Context(Mode.EVAL))[0]),
        partitioning,
        {"logits": "ULV"},
        theta=building.theta_specs(task),
        batch=features.Transform(lambda x: TensorSpec(x.shape, x.dtype.name, "BL")),
    )
    got = executable(models.weights(name, task), features)
    _assert_close(np.asarray(got.logits), golden)


def _found(name, decode):
    """Returns a model's hypotheses in their ids, from </s> on, and their scores."""
    task = models.params(name).task.Instantiate(building.Unannotated())
    golden = _golden(name)
    source = models.features(golden["source"])
    source.first_ids = np.full(len(golden["source"]), _FORCED, np.int32)

    @tf.function(jit_compile=True, autograph=False)
    def predict(theta, features):
        predictions = task.Predict(theta, features, decode)
        return predictions.ids, predictions.lengths, predictions.scores

    theta = models.weights(name, task).Transform(tf.constant)
    ids, lengths, scores = (x.numpy() for x in predict(theta, source.Transform(tf.constant)))

    found = []
    for row, length in zip(ids.reshape(-1, ids.shape[-1]), lengths.reshape(-1), strict=True):
        found.append([2, *models.ours(row[:length]).tolist()])  # Its own inverse.
    return found, scores


def _decode(params, settings):
    """Returns the settings of a search, given the options of transformers' generate."""
    num_beams = settings["num_beams"]
    return params.decode.Set(
        beam_size=num_beams,
        num_best=settings.get("num_return_sequences", 1),
        # Without a beam, the likeliest token is taken at each step.
        length_norm_alpha=settings["length_penalty"] if num_beams > 1 else 0.0,
        max_target_len=settings["max_length"] - 1,  # generate counts </s> at the beginning.
        stopping=_STOPPING[settings["early_stopping"]],
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", models.NAMES)
@pytest.mark.parametrize("index", [0, *exhaustive.only(1, 2, 3, 4, 5, 6)])
def test_searches(name, index):
    search = json.loads((models.MODELS / name / "searches.json").read_text())[index]
    found, scores = _found(name, _decode(models.params(name), search["settings"]))
    for got, want in zip(found, search["ids"], strict=True):
        assert got + [models.PAD] * (len(want) - len(got)) == want
    if search["scores"] is not None:
        np.testing.assert_allclose(scores.reshape(-1), search["scores"], atol=1e-5)


_GENERATED = json.loads((models.MODELS / "generate.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("generated", [_GENERATED[0], *exhaustive.only(*_GENERATED[1:])])
def test_an_imported_run_searches_as_generate_without_arguments(tmp_path, generated):
    """The options are in generation_config.json; generate.py made the golden."""
    folder = tmp_path / "theirs"
    shutil.copytree(models.MODELS / "m2m_100", folder)
    (folder / "generation_config.json").write_text(json.dumps(generated["config"]))
    launch = importing.read(folder).launch()
    decode = launches.experiment_params(launch).decode
    found, _ = _found("m2m_100", decode)
    for got, want in zip(found, generated["ids"], strict=True):
        assert got + [models.PAD] * (len(want) - len(got)) == want
