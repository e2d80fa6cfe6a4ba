"""The peer of bench.step and bench.moe_layer: trains the same model in PyTorch.

    .venv-torch/bin/python -m bench.torch_peer.worker FOLDER cpu|cuda [compiled]

FOLDER contains sizes.json (Sizes), weights.npz (this model's state_dict) and batch.npz. Each line
of standard input is a command, which is answered with one line of JSON:

- `step` and `step_bfloat16` time a train step: {"secs": s};
- `layer` and `layer_bfloat16` time an MoE layer forward and backward: {"secs": s};
- `loss` computes {"loss": nats, "gradient_norm": norm}.

On a GPU, products of float32 numbers are computed in TF32, like XLA's, and a time includes the end
of the GPU's work.
"""

import json
import pathlib
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from bench.torch_peer.model import Translator
from bench.torch_peer.moe import MoE
from bench.torch_peer.sizes import Sizes

_THREADS = 2


class Worker:
    """A model, its optimizer and one batch."""

    def __init__(self, folder: pathlib.Path, device: str, *, compiles: bool) -> None:
        """Reads the sizes, the weights and the batch from the folder.

        If `compiles`, torch.compile compiles the model.
        """
        torch.set_num_threads(_THREADS)
        if device == "cuda":
            torch.set_float32_matmul_precision("high")
        torch.manual_seed(0)
        sizes = Sizes(**json.loads((folder / "sizes.json").read_text(encoding="utf-8")))
        self._device = device
        self._model = Translator(sizes).to(device)
        self._model.load_state_dict(_tensors(folder / "weights.npz"))
        self._batch = {k: x.long().to(device) for k, x in _tensors(folder / "batch.npz").items()}
        self._optimizer = torch.optim.Adafactor(self._model.parameters(), lr=1e-3)
        self._x, self._d_y = torch.randn(
            2, *self._batch["source_ids"].shape, sizes.model_dim, device=device
        )
        if compiles:
            self._model.compile()
        self._layer = next(m for m in self._model.modules() if isinstance(m, MoE))

    def step(self) -> None:
        """Runs one train step."""
        self._optimizer.zero_grad()
        self._model(self._batch).backward()
        self._optimizer.step()

    def layer(self) -> None:
        """Computes an MoE layer and the gradients of its weights and its input."""
        x = self._x.requires_grad_()
        weights = [x, *self._layer.parameters()]
        y, aux_loss = self._layer(x)
        d_y = self._d_y.to(y.dtype)
        d_aux_loss = torch.ones_like(aux_loss)
        torch.autograd.grad([y, aux_loss], weights, [d_y, d_aux_loss])

    def loss(self) -> dict[str, float]:
        """Returns the loss and the norm of its gradient."""
        loss = self._model(self._batch)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in self._model.parameters()])
        self._optimizer.zero_grad()
        return {"loss": loss.item(), "gradient_norm": norm.item()}

    def timed(self, run: Callable[[], None]) -> dict[str, float]:
        """Returns the seconds of a call, including the end of the device's work."""
        began = time.perf_counter()
        run()
        if self._device == "cuda":
            torch.cuda.synchronize()
        return {"secs": time.perf_counter() - began}


def main(folder: str, device: str, *how: str) -> None:
    worker = Worker(pathlib.Path(folder), device, compiles="compiled" in how)
    bfloat16 = torch.autocast(device, torch.bfloat16)
    commands: dict[str, Callable[[], dict[str, float]]] = {
        "step": lambda: worker.timed(worker.step),
        "layer": lambda: worker.timed(worker.layer),
        "step_bfloat16": lambda: worker.timed(bfloat16(worker.step)),
        "layer_bfloat16": lambda: worker.timed(bfloat16(worker.layer)),
        "loss": worker.loss,
    }
    for line in sys.stdin:
        print(json.dumps(commands[line.strip()]()), flush=True)


def _tensors(path: pathlib.Path) -> dict[str, Tensor]:
    with np.load(path) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


if __name__ == "__main__":
    main(*sys.argv[1:])
