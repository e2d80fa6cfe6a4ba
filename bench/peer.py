"""The PyTorch peer beside ours: the same weights and batch, in a process of its own."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
from typing import Any

import numpy as np

from bench.torch_peer.sizes import Sizes
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.gating import SecondExpert

PYTHON = pathlib.Path(".venv-torch/bin/python")


class Peer:
    """The worker's process; a context manager."""

    def __init__(self, folder: pathlib.Path, params: Params, theta: NestedMap, batch: NestedMap):
        """Starts it.

        Args:
          folder: for what it reads.
          params: the experiment's, of a group size that is set.
          theta: the weights, of layers that are not stacked.
          batch: full rows, as synthetic.training_batch makes them.

        Raises:
          FileNotFoundError: the peer's virtual environment is missing.
        """
        if not PYTHON.exists():
            raise FileNotFoundError(
                f"{PYTHON} is missing; `make {PYTHON.parts[0]}/ready` makes it."
            )
        sizes = dataclasses.asdict(_sizes(params))
        (folder / "sizes.json").write_text(json.dumps(sizes))
        np.savez(folder / "weights.npz", **_state_dict(theta))
        labels = batch.labels.target_labels
        np.savez(folder / "batch.npz", **batch.features, target_labels=labels)
        command = [str(PYTHON), "-m", "bench.torch_peer.worker", str(folder)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, command: str) -> dict[str, float]:
        """The worker's answer; it stands still until asked again."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(command, file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.communicate()


def _sizes(params: Params) -> Sizes:
    task, stack = params.task, params.task.encoder
    attention, moe = stack.layer.attention, stack.moe
    return Sizes(
        num_layers=stack.num_layers,
        model_dim=task.dim,
        hidden_dim=moe.hidden_dim,
        num_heads=attention.num_heads,
        head_dim=attention.head_dim,
        num_experts=moe.num_experts,
        group_size=moe.group_size,
        capacity=moe.train_capacity.Instantiate().places(moe.group_size, moe.num_experts),
        source_vocab_size=task.source_vocab_size,
        target_vocab_size=task.target_vocab_size,
        dropout=stack.layer.residual_dropout.rate,
        label_smoothing=task.label_smoothing,
        aux_loss_weight=task.aux_loss_weight,
        random_second=moe.second_expert is SecondExpert.RANDOM,
    )


def _state_dict(theta: NestedMap) -> dict[str, np.ndarray]:
    """Ours by the peer's names and in its layouts: a Linear holds [out, in]."""
    weights = {
        path.replace("[", ".").replace("]", ""): np.asarray(leaf)
        for path, leaf in theta.FlattenItems()
    }
    result: dict[str, np.ndarray] = {}
    for path, weight in weights.items():
        owner, _, name = path.rpartition(".")
        match name:
            case "softmax":
                result["softmax.weight"] = weight.T
            case "table" | "scale":
                result[f"{owner}.weight"] = weight
            case "wq" | "wk" | "wv":
                three = [weights[f"{owner}.{each}"] for each in ("wq", "wk", "wv")]
                result[f"{owner}.project.weight"] = np.concatenate([_linear(w, 1) for w in three])
            case "wo" if owner.endswith("attention"):
                result[f"{owner}.out.weight"] = _linear(weight, 2)
            case "wi" | "wo" if weight.ndim == 2:
                result[f"{path}.weight"] = weight.T
            case _:
                result[path] = weight
    return result


def _linear(weight: np.ndarray, num_axes: int) -> np.ndarray:
    """[out, in] of a weight whose first num_axes dims are contracted."""
    return weight.reshape(np.prod(weight.shape[:num_axes], dtype=int), -1).T
