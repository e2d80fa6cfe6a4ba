"""What it costs to compile a train step as its layers grow, where they are a loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.planning import planner
from lingvo_gshard.planning.plan import Plan
from lingvo_gshard.planning.planner import Request

LAYERS = (12, 36, 60)  # The paper's depths.

# How long the compiler takes depends little on the sizes of what it compiles.
MODEL = "toy.MoE8E12L"
_STACKS = ("encoder", "decoder")
SETTINGS = (
    *("task.source_vocab_size=512", "task.target_vocab_size=512"),
    *(f"task.{stack}.remat=ALL_BUT_PRODUCTS" for stack in _STACKS),
    *(f"task.{stack}.moe.dispatch=EINSUM" for stack in _STACKS),
    *(f"task.{stack}.moe.group_size=64" for stack in _STACKS),  # As many for each core.
)
_TOPOLOGY = "v3:2x2"


def request(params: Params, num_layers: int) -> Request:
    """MODEL with so many layers, half of them in the encoder; `params` are with SETTINGS."""
    depths = {f"task.{stack}.num_layers": num_layers // 2 for stack in _STACKS}
    deep = params.Copy().Set(**depths)
    return Request(MODEL, SETTINGS, deep, _TOPOLOGY)


def measure(params: Params) -> Iterator[Plan]:
    """Plans the step for each of LAYERS, one after the other in this process.

    Raises:
      ValueError: the TPU compiler is not installed.
    """
    planner.make(request(params, min(LAYERS)))  # What is made once is made now.
    for num_layers in LAYERS:
        yield planner.make(request(params, num_layers))


def table(plans: Sequence[Plan]) -> str:
    """The plans of LAYERS as text, then the last over the first."""
    line = "{:>8} {:>13} {:>9} {:>14}".format
    lines = [line("layers", "instructions", "lower s", "compile CPU s")]
    for num_layers, plan in zip(LAYERS, plans, strict=True):
        assert plan.cost is not None  # It is small enough for any core.
        cells = (f"{plan.lower_secs:.1f}", f"{plan.compile_cpu_secs:.1f}")
        lines.append(line(num_layers, plan.cost.instructions, *cells))
    growth = plans[-1].compile_cpu_secs / plans[0].compile_cpu_secs
    return "\n".join([*lines, f"{LAYERS[-1]} layers over {LAYERS[0]}: x{growth:.2f} to compile"])
