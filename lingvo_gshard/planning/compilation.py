"""What it costs to compile for more cores (section 3.3), and to compile more layers.

One program serves all devices, so that the program of a training step should be no larger, and no
slower to compile, for 2048 cores than for 8. A stack of layers is a loop, so that the same should
hold for 60 layers and 12. The compiler's time depends little on tensors' sizes, so a toy will do.
"""

from lingvo_gshard import registry
from lingvo_gshard.model import placement
from lingvo_gshard.planning import planner, report
from lingvo_gshard.planning.planner import Request
from lingvo_gshard.spmd import topology

_MODEL = "toy.MoE8E12L"
_CORES = (8, 32, 128, 512, 2048)
_LAYERS = (12, 36, 60)  # The paper's depths.


def request(cores: int, num_layers: int) -> Request:
    """A request for a TPU v3 with as many experts as cores and half of the layers in each stack."""
    settings = ["task.source_vocab_size=512", "task.target_vocab_size=512"]
    # Each core has a group of 1024 tokens in each stack, as many as the paper's layer.
    settings += [f"input.batch_size={16 * cores}", "input.source_len=64", "input.target_len=64"]
    for stack in ("encoder", "decoder"):
        settings += [
            f"task.{stack}.num_layers={num_layers // 2}",
            f"task.{stack}.remat=ALL_BUT_PRODUCTS",
            f"task.{stack}.moe.dispatch=EINSUM",
            f"task.{stack}.moe.num_experts={cores}",
            f"task.{stack}.moe.group_size=1024",
        ]
    params = registry.get_params(_MODEL, settings)
    parts = placement.partitioning(params, cores)
    return Request(_MODEL, tuple(settings), params, topology.tpu("v3", cores), parts).step_only()


def table(name: str) -> str:
    """Steps side by side, and the growth from the first to the last, all made in this process.

    `compile` is the table of steps of four layers, with one expert of a layer on each core, and
    `layers` that of steps on 8 cores. Raises ValueError if the TPU compiler is not installed.
    """
    if name == "compile":
        requests = {f"{cores} cores": request(cores, num_layers=4) for cores in _CORES}
    else:
        requests = {f"{count} layers": request(8, count) for count in _LAYERS}
    planner.make(next(iter(requests.values())))  # Pays for what is made only once.
    plans = {column: planner.make(each) for column, each in requests.items()}
    return report.side_by_side({column: report.figures(each) for column, each in plans.items()})
