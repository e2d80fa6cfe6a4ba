"""A model of ours with the paper's settings, exported for transformers, and its results there.

Run the first command where this project is installed, and the second one where torch and
transformers are installed, in the root of the checkout:

    python -m tests.hugging_face.export_model /tmp/exported
    python -m tests.hugging_face.load_export /tmp/exported

The second one writes exported.npz beside itself: the digest of model.safetensors, a batch of ids,
the logits of its targets, and the ids that a beam search finds.

B batch, T source length, L target length.
"""

import pathlib
import sys
import tempfile

import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.hugging_face import exporting
from lingvo_gshard.runs.run import Run
from tests.hugging_face import runs
from xla_spmd.runtime import environment

V = 29
# No biases, an embedding for each side, positions from 0, a loop of layers.
LAUNCH = runs.launch_of(
    "toy.MoE8E12L",
    V,
    "task.dim=8",
    "task.product_dtype=float32",
    "decode.rules=HUGGING_FACE",
    "decode.length_norm_alpha=1.0",
    "decode.max_target_len=9",
    *[
        f"task.{side}.{setting}"
        for side in ("encoder", "decoder")
        for setting in (
            "num_layers=4",
            "dense.hidden_dim=12",
            "moe.hidden_dim=12",
            "moe.num_experts=4",
            "moe.group_size=None",
            "layer.attention.num_heads=2",
            "layer.attention.head_dim=4",
            "layer.norm.epsilon=1e-05",
        )
    ],
)


def write_run(logdir: pathlib.Path) -> Run:
    """Writes a run with random weights, also of its norms."""
    theta = runs.random_theta(LAUNCH, seed=4)
    theta.softmax *= 3  # So that the search prefers some hypotheses.
    theta.softmax[:, 2] *= 2  # So that hypotheses end.
    return runs.write(logdir, LAUNCH, theta)


def batch() -> NestedMap:
    """Returns our ids of sources [B, T] and targets [B, L], and their features."""
    rng = np.random.default_rng(3)
    features = NestedMap()
    for side, lengths in (("source", [7, 4, 2]), ("target", [6, 3, 5])):
        is_token = np.arange(max(lengths)) < np.array(lengths)[:, None]
        ids = rng.integers(4, V, is_token.shape) * is_token
        features[f"{side}_ids"] = ids.astype(np.int32)
        features[f"{side}_segment_ids"] = is_token.astype(np.int32)
        positions = np.arange(is_token.shape[1], dtype=np.int32)
        features[f"{side}_positions"] = np.tile(positions, (len(ids), 1))
    features.target_ids[:, 0] = 1  # BOS.
    return features


def main(folder: pathlib.Path) -> None:
    """Exports the model and writes the batch beside it."""
    environment.prepare(1, "cpu")
    with tempfile.TemporaryDirectory() as logdir:
        run = write_run(pathlib.Path(logdir))
        print(exporting.export_folder(run, folder))
    np.savez(folder / "batch.npz", **batch())


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
