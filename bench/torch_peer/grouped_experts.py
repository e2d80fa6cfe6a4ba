"""The peer of `bench.moe_layer --shapes`: a layer of gated experts, one expert after the other.

    .venv-torch/bin/python -m bench.torch_peer.grouped_experts SIZES_JSON cpu|cuda float32|bfloat16

SIZES_JSON has the fields of a BalancedLayer. Each line of standard input is a command, which is
answered with one line of JSON:

- `norms` computes the norms of the output and of the gradients by name;
- `forward CLOCK` times the layer without gradients, and `both CLOCK` with them: {"secs": s}. The
  clock is wall or cpu.

On a GPU, a time includes the end of the GPU's work. The number of threads is the number of cores
that this process may use.

T tokens, E experts, K of them for a token, M model, H hidden.
"""

import json
import os
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench import balanced_layer, call_cost
from bench.balanced_layer import BalancedLayer


class Expert(nn.Module):
    """SwiGLU with three Linear layers, as in Mixtral."""

    def __init__(self, layer: BalancedLayer, expert: int) -> None:
        super().__init__()
        for name in balanced_layer.EXPERT_WEIGHTS:
            weight = balanced_layer.expert_weight(layer, name, expert)
            rows, columns = weight.shape
            linear = nn.utils.skip_init(nn.Linear, rows, columns, bias=False)
            with torch.no_grad():
                linear.weight.copy_(torch.from_numpy(weight).T)
            setattr(self, name, linear)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the expert's output, [rows, M] like x."""
        return self.wo(F.silu(self.wi_gate(x)) * self.wi(x))


class GroupedExperts(nn.Module):
    """A layer of experts: each computes its own tokens, and adds its weighted outputs to theirs."""

    def __init__(self, layer: BalancedLayer) -> None:
        super().__init__()
        self.K = layer.K
        self.wg = nn.Parameter(torch.from_numpy(balanced_layer.router(layer)))
        self.experts = nn.ModuleList(Expert(layer, expert) for expert in range(layer.E))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the output, [T, M] like x."""
        logits = x.float() @ self.wg.float()
        gates, chosen = torch.softmax(logits, -1).topk(self.K)
        gates = (gates / gates.sum(-1, keepdim=True)).to(x.dtype)

        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == index)
            y.index_add_(0, token, expert(x[token]) * gates[token, choice, None])
        return y


class Worker:
    """A layer, tokens, and the gradient of its output."""

    def __init__(self, layer: BalancedLayer, device: str, dtype: torch.dtype) -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self._device = device
        self._layer = GroupedExperts(layer).to(device, dtype)
        x, d_y = balanced_layer.inputs(layer)
        self._x = torch.from_numpy(x).to(device, dtype).requires_grad_()
        self._d_y = torch.from_numpy(d_y).to(device, dtype)

    def forward(self) -> None:
        """Computes the layer, and keeps nothing for gradients."""
        with torch.no_grad():
            self._layer(self._x)
        self._wait()

    def both(self) -> None:
        """Computes the layer and the gradients of its weights and its input."""
        self._gradients(self._layer(self._x))
        self._wait()

    def norms(self) -> dict[str, float]:
        """Returns the norms of the output y, and of the gradients by x and by the weights."""
        y = self._layer(self._x)
        d_x, d_wg, *d_experts = self._gradients(y)
        norms = {"y": _norm([y]), "x": _norm([d_x]), "wg": _norm([d_wg])}

        # Every expert has its weights in the same order.
        names = list(balanced_layer.EXPERT_WEIGHTS)
        for index, name in enumerate(names):
            norms[name] = _norm(d_experts[index :: len(names)])
        return norms

    def _gradients(self, y: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y, [self._x, *self._layer.parameters()], self._d_y)

    def _wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()


def main(sizes_json: str, device: str, dtype: str) -> None:
    worker = Worker(BalancedLayer(**json.loads(sizes_json)), device, getattr(torch, dtype))
    calls = {"forward": worker.forward, "both": worker.both}
    for line in sys.stdin:
        if line.strip() == "norms":
            answer = worker.norms()
        else:
            name, clock = line.split()
            answer = {"secs": call_cost.secs(calls[name], clock)}
        print(json.dumps(answer), flush=True)


def _norm(tensors: list[Tensor]) -> float:
    return float(sum(tensor.float().square().sum().item() for tensor in tensors) ** 0.5)


if __name__ == "__main__":
    main(*sys.argv[1:])
