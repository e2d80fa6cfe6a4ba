"""The decoders that write_decoders.py wrote, as ours: tasks, weights and batches."""

import json
import pathlib

import numpy as np

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.hugging_face import folder, importing
from lingvo_gshard.hugging_face.importing import Source
from lingvo_gshard.model.language_model import LanguageModelTask
from lingvo_gshard.runs import launch as launches
from tests.layers import building

MODELS = pathlib.Path(__file__).parent / "models"
NAMES = ("mixtral", "qwen3_moe", "olmoe", "hy_v3")


def source(name: str) -> Source:
    """Returns a model's folder as an import reads it."""
    return importing.read(MODELS / name)


def params(name: str, *settings: str) -> Params:
    """Returns the experiment of a model, with `path=value` settings."""
    return launches.experiment_params(source(name).launch(settings))


def weights(name: str, task: LanguageModelTask) -> NestedMap:
    """Returns theta from a model's files."""
    specs = building.theta_specs(task)
    files = folder.Folder(MODELS / name, source(name).config, specs)
    return specs.Pack(np.asarray(files.arrays[f"theta.{path}"]) for path, _ in specs.FlattenItems())


def golden(name: str) -> dict[str, np.ndarray]:
    """Returns transformers' results."""
    return dict(np.load(MODELS / name / "goldens.npz"))


def counts(name: str) -> dict[str, int]:
    """Returns how many weights transformers counts."""
    return json.loads((MODELS / name / "counts.json").read_text())


def ours(name: str, ids: np.ndarray) -> np.ndarray:
    """Returns our ids of theirs."""
    return np.argsort(source(name).config.order())[ids].astype(np.int32)


def features(ids: np.ndarray, lengths: np.ndarray | None = None) -> NestedMap:
    """Returns the features of our ids [B, L], of which each row may have its own length."""
    positions = np.tile(np.arange(ids.shape[1], dtype=np.int32), (len(ids), 1))
    is_token = np.full(ids.shape, True) if lengths is None else positions < lengths[:, None]
    return NestedMap(ids=ids, segment_ids=is_token.astype(np.int32), positions=positions)
