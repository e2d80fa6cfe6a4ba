"""The cost of compiling for more cores (section 3.3, Figure 2b), and of compiling more layers.

One program serves all devices. So a training step's program should be neither larger nor slower to
compile for 2048 cores than for 8. A stack of layers is a loop, so the same should hold for 60
layers and 12. The compiler's time depends little on tensors' sizes, so a toy model suffices.
"""

from collections.abc import Mapping

from lingvo_gshard import registry
from lingvo_gshard.model import placement
from lingvo_gshard.model.translation import TranslationTask
from lingvo_gshard.plans import run_programs
from lingvo_gshard.plans.plan import Plan
from lingvo_gshard.plans.request import Request
from xla_plan.machines import topology

_MODEL = "toy.MoE8E12L"
_CORES = (8, 32, 128, 512, 2048)
_LAYERS = (12, 36, 60)  # The paper's depths.
_LAYERS_BY_CORES = 4
_CORES_BY_LAYERS = 8


def over_cores() -> dict[str, Plan]:
    """Returns plans of four layers, with one expert per layer on each core.

    This process makes them. Raises ValueError if the TPU compiler is not installed.
    """
    return _plans({f"{cores} cores": request(cores, _LAYERS_BY_CORES) for cores in _CORES})


def over_layers() -> dict[str, Plan]:
    """Returns plans of more and more layers on 8 cores.

    Raises ValueError if the TPU compiler is not installed.
    """
    return _plans({f"{count} layers": request(_CORES_BY_LAYERS, count) for count in _LAYERS})


def request(cores: int, num_layers: int) -> Request:
    """Returns a request for a TPU v3 with as many experts as cores and two equal stacks."""
    # In each stack, each core has a group of 2048 tokens, as in the paper's largest models.
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
    # The first plan also pays for the process's one-time work, so it is made twice.
    run_programs.make_plan(next(iter(requests.values())))
    return {name: run_programs.make_plan(asked) for name, asked in requests.items()}
