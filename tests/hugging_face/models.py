"""The models that write_models.py wrote, as ours: tasks, weights and batches.

B batch, T source length, L target length.
"""

import pathlib

import numpy as np

from lingvo_gshard import registry
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.hugging_face import families, folder
from lingvo_gshard.model.translation import TranslationTask
from tests.layers import building

MODELS = pathlib.Path(__file__).parent / "models"
NAMES = ("nllb_moe", "nllb_moe_sparse", "m2m_100", "m2m_100_untied")
PAD = 1  # Theirs.


def params(name: str, *settings: str) -> Params:
    """Returns the experiment of a model, with `path=value` settings."""
    model, overrides = families.read(MODELS / name).launched_model()
    return registry.get_params(model, (*overrides, *settings))


def weights(name: str, task: TranslationTask) -> NestedMap:
    """Returns theta from a model's files."""
    specs = building.theta_specs(task)
    files = folder.Folder(MODELS / name, families.read(MODELS / name), specs)
    return specs.Pack(np.asarray(files.arrays[f"theta.{path}"]) for path, _ in specs.FlattenItems())


def ours(ids: np.ndarray) -> np.ndarray:
    """Converts their ids to ours: padding and BOS change places."""
    return np.where(ids < 2, 1 - ids, ids).astype(np.int32)


def features(source: np.ndarray, target: np.ndarray | None = None) -> NestedMap:
    """Returns the features of sources [B, T] and targets [B, L], given their ids."""
    batch = NestedMap()
    sides = {"source": source} if target is None else {"source": source, "target": target}
    for side, ids in sides.items():
        batch[f"{side}_ids"] = ours(ids)
        batch[f"{side}_segment_ids"] = (ids != PAD).astype(np.int32)
        positions = np.arange(ids.shape[1], dtype=np.int32)
        batch[f"{side}_positions"] = np.tile(positions, (len(ids), 1))
    if target is not None:
        batch.target_ids[:, 0] = 1  # BOS; the model itself takes </s> for it.
    return batch
