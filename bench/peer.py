"""Starts the peers of bench/torch_peer and bench/ctranslate2_peer; exchanges lines with them."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
import subprocess
from typing import Any

import numpy as np

from bench.torch_peer.sizes import Sizes
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import vocabulary
from lingvo_gshard.layers.gating import SecondExpert
from lingvo_gshard.layers.moe_sizes import train_places
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.spmd import lowering, tracer
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import compile_program
from lingvo_gshard.spmd.program import Program
from xla_spmd.mesh import Mesh

PYTHON = ".venv-torch/bin/python"
CTRANSLATE2_PYTHON = ".venv-ctranslate2/bin/python"


class Peer:
    """The process of a peer's module; a context manager that ends the process.

    The process answers each line of its standard input with a line of JSON, and is idle otherwise.
    """

    def __init__(self, module: str, *arguments: str, python: str = PYTHON) -> None:
        """Starts the process.

        Args:
          module: the module's name, such as bench.torch_peer.worker.
          arguments: the module's arguments.
          python: a Python with the packages of the requirements.txt in the module's folder.

        Raises:
          FileNotFoundError: `python` is missing.
        """
        if shutil.which(python) is None:
            raise FileNotFoundError(
                f"{python} is missing; `make .venv-torch/ready` or `make .venv-ctranslate2/ready` "
                "makes a peer's Python."
            )
        self._module = module
        self._process = subprocess.Popen(
            [python, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, question: str) -> dict[str, Any]:
        """Sends one line and returns the answer.

        Raises ChildProcessError if the process has ended; its own message is on standard error.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(question, file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise ChildProcessError(
                f"{self._module} ended with status {self._process.wait()} before it answered."
            )
        return dict(json.loads(answer))

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.communicate()


def start_worker(
    folder: str,
    params: Params,
    theta: NestedMap,
    batch: NestedMap,
    *how: str,
    python: str = PYTHON,
) -> Peer:
    """Starts the peer that trains the same model from the same weights on the same batch.

    Args:
      folder: an empty folder for the peer's files.
      params: the experiment's Params, with a group size.
      theta: the weights of a model whose layers are not stacked.
      batch: a batch of full rows, such as synthetic.training_batch returns.
      how: PyTorch's device, `cpu` or `cuda`, and perhaps `compiled`.
      python: the Python of a virtual environment with torch_peer's requirements.

    Raises:
      FileNotFoundError: `python` is missing.
    """
    path = pathlib.Path(folder)
    (path / "sizes.json").write_text(sizes_json(params), encoding="utf-8")
    np.savez(path / "weights.npz", **_state_dict(theta))
    labels = batch.labels.target_labels
    np.savez(path / "batch.npz", **batch.features, target_labels=labels)
    return Peer("bench.torch_peer.worker", folder, *how, python=python)


def start_dense_worker(
    folder: str, params: Params, theta: NestedMap, num_positions: int, python: str
) -> Peer:
    """Starts CTranslate2 with the weights of a dense model of this project.

    Args:
      folder: an empty folder for the peer's files.
      params: the experiment's Params.
      theta: the weights of a model whose layers are not stacked.
      num_positions: the length of the longest source or hypothesis, in tokens.
      python: the Python of a virtual environment with ctranslate2_peer's requirements.

    Raises:
      FileNotFoundError: `python` is missing.
    """
    path = pathlib.Path(folder)
    task = params.task
    sizes = {
        "num_layers": task.encoder.num_layers,
        "num_heads": task.encoder.layer.attention.num_heads,
        "norm_epsilon": task.encoder.layer.norm.epsilon,
    }
    (path / "sizes.json").write_text(json.dumps(sizes), encoding="utf-8")

    table = sinusoids(num_positions + 1, task.dim)
    np.savez(path / "weights.npz", **_state_dict(theta), sinusoids=table)
    return Peer("bench.ctranslate2_peer.worker", folder, python=python)


def sinusoids(num_positions: int, dim: int) -> np.ndarray:
    """Returns our embeddings of positions 0, 1, ..., float32 [num_positions, dim].

    Our own program computes them, because float32 sines of large angles depend on the method.
    """
    run = compile_program(tracer.traced(_sinusoids_program, num_positions, dim))
    positions = NestedMap(positions=np.arange(num_positions, dtype=np.int32))
    return np.asarray(run(run.place("positions", positions)).sinusoids)


def _sinusoids_program(num_positions: int, dim: int) -> Program:
    def fn(args: NestedMap) -> NestedMap:
        return NestedMap(sinusoids=vocabulary.sinusoids(args.positions, dim))

    positions = NestedMap(positions=TensorSpec((num_positions,), "int32", "_"))
    annotated = AnnotatedFn("sinusoids", fn, ("positions",), (positions,))
    return lowering.export(annotated, Partitioning(Mesh.flat(1), ()))


def sizes_json(params: Params) -> str:
    """Returns the Sizes of an experiment with a group size, as JSON."""
    task = params.task
    stack = params.task.encoder
    attention = stack.layer.attention
    moe = stack.moe
    sizes = Sizes(
        num_layers=stack.num_layers,
        model_dim=task.dim,
        hidden_dim=moe.hidden_dim,
        num_heads=attention.num_heads,
        head_dim=attention.head_dim,
        num_experts=moe.num_experts,
        group_size=moe.group_size,
        capacity=train_places(moe, moe.group_size),
        source_vocab_size=task.source_vocab_size,
        target_vocab_size=task.target_vocab_size,
        dropout=stack.layer.residual_dropout.rate,
        label_smoothing=task.label_smoothing,
        aux_loss_weight=task.aux_loss_weight * moe.num_experts**2,
        random_second=moe.gating.second_expert is not SecondExpert.ALL,
    )
    return json.dumps(dataclasses.asdict(sizes))


def _state_dict(theta: NestedMap) -> dict[str, np.ndarray]:
    """Returns the weights with the peer's names and layouts; a Linear's is [out, in]."""
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
                # The peer computes queries, keys and values with one product.
                three = [_linear(weights[f"{owner}.{wx}"], 1) for wx in ("wq", "wk", "wv")]
                result[f"{owner}.project.weight"] = np.concatenate(three)
            case "wo" if owner.endswith("attention"):
                result[f"{owner}.out.weight"] = _linear(weight, 2)
            case "wi" | "wo" if weight.ndim == 2:
                result[f"{path}.weight"] = weight.T
            case _:
                result[path] = weight
    return result


def _linear(weight: np.ndarray, num_input_axes: int) -> np.ndarray:
    """Returns a weight as [out, in]; its first num_input_axes axes are contracted."""
    return weight.reshape(np.prod(weight.shape[:num_input_axes], dtype=int), -1).T
