"""A tiny experiment on eight CPU devices that stand for a v3, its requests and candidates."""

import dataclasses

from lingvo_gshard import registry
from lingvo_gshard.layers.dispatch import Dispatch
from lingvo_gshard.model import placement
from lingvo_gshard.plans.candidates import Candidate
from lingvo_gshard.plans.request import Request

MODEL = "toy.MoE8E4L"
TOPOLOGY = "v3:2x2"
# The chip of each of its cores.
PLACES = tuple((x, y) for x in range(2) for y in range(2) for _ in range(2))

_SIZES = {
    "task.dim": 8,
    "task.source_vocab_size": 24,
    "task.target_vocab_size": 16,
    "input.batch_size": 16,
    "input.source_len": 8,
    "input.target_len": 8,
    "eval_input.batch_size": 16,
    "eval_input.source_len": 8,
    "eval_input.target_len": 8,
    "decode.batch_size": 16,
    "decode.max_source_len": 8,
    "decode.max_target_len": 5,
    "decode.beam_size": 2,
}
# Meshes and tables, from the fastest to the slowest.
_LAYOUTS = (
    ("mesh=experts:8", "sharding=BG:experts,E:experts"),
    ("mesh=data:8", "sharding=BG:data"),
    ("mesh=data:8", "sharding=BG:data,m:data"),
    ("mesh=data:4,model:2", "sharding=BG:data,HNV:model"),
    ("mesh=data:2,experts:4", "sharding=BG:data+experts,E:experts"),
    ("mesh=experts:4,model:2", "sharding=BG:experts,E:experts,HNV:model"),
)


def params(num_layers=2):
    """Returns the experiment's Params, with `num_layers` layers in each stack."""
    experiment = registry.get_params(MODEL).Set(**_SIZES)
    for name in ("encoder", "decoder"):
        stack = experiment.task.Get(name).Set(dim=8, num_layers=num_layers)
        stack.dense.hidden_dim = 12
        stack.layer.attention.Set(num_heads=2, head_dim=4)
        stack.moe.Set(hidden_dim=12, num_experts=8, group_size=8, dispatch=Dispatch.EINSUM)
    return experiment


def request(**changes):
    """Returns a request for its training step, with other fields."""
    experiment = params()
    partitioning = placement.partitioning(experiment, 8)
    step = Request(MODEL, (), experiment, TOPOLOGY, partitioning).step_only()
    return dataclasses.replace(step, **changes)


def candidates():
    """Returns twelve candidates: two schedules of each of six meshes and tables."""
    made = []
    for i, layout in enumerate(_LAYOUTS):
        for remat in ("NONE", "BLOCK"):
            made.append(Candidate((*layout, f"task.encoder.remat={remat}"), 0.1 * i))
    return made
