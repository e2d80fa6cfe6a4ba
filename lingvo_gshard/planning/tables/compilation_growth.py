"""What it costs to compile for more cores (section 3.3, Figure 2b), and to compile more layers.

One program serves all devices, so that the program of a training step should be no larger, and no
slower to compile, for 2048 cores than for 8. A stack of layers is a loop, so that the same should
hold for 60 layers and 12. The compiler's time depends little on tensors' sizes, so a toy will do.
"""

from collections.abc import Mapping

from lingvo_gshard import registry
from lingvo_gshard.model import placement
from lingvo_gshard.model.translation import TranslationTask
from lingvo_gshard.planning.compiled import run_programs
from lingvo_gshard.planning.plan import Plan
from lingvo_gshard.planning.request import Request
from lingvo_gshard.spmd import topology

_MODEL = "toy.MoE8E12L"
_CORES = (8, 32, 128, 512, 2048)
_LAYERS = (12, 36, 60)  # The paper's depths.
_LAYERS_BY_CORES = 4
_CORES_BY_LAYERS = 8


def over_cores() -> dict[str, Plan]:
    """Returns plans of four layers, with one expert of a layer on each core.

    They are made in this process. Raises ValueError if the TPU compiler is not installed.
    """
    return _plans({f"{cores} cores": request(cores, _LAYERS_BY_CORES) for cores in _CORES})


def over_layers() -> dict[str, Plan]:
    """Returns plans of more and more layers on 8 cores; ValueError as over_cores."""
    return _plans({f"{count} layers": request(_CORES_BY_LAYERS, count) for count in _LAYERS})


def request(cores: int, num_layers: int) -> Request:
    """Returns a request for a TPU v3 with as many experts as cores and two equal stacks."""
    # Each core has a group of 2048 tokens in each stack, as in the paper's largest models.
    settings = [
        "task.source_vocab_size=512",
        "task.target_vocab_size=512",
        f"input.batch_size={32 * cores}",
        "input.source_len=64",
        "input.target_len=64",
    ]
    for stack in TranslationTask.STACKS:
        settings += [
            f"task.{stack}.num_layers={num_layers // 2}",
            f"task.{stack}.remat=ALL_BUT_PRODUCTS",
            f"task.{stack}.moe.dispatch=EINSUM",
            f"task.{stack}.moe.num_experts={cores}",
            f"task.{stack}.moe.group_size=2048",
        ]

    params = registry.get_params(_MODEL, settings)
    partitioning = placement.partitioning(params, cores)
    machine = topology.tpu("v3", cores)
    return Request(_MODEL, tuple(settings), params, machine, partitioning).step_only()


def _plans(requests: Mapping[str, Request]) -> dict[str, Plan]:
    # The first plan pays for what a process makes only once, so it is made twice.
    run_programs.make_plan(next(iter(requests.values())))
    return {name: run_programs.make_plan(asked) for name, asked in requests.items()}
