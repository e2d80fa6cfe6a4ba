"""One model on several machines side by side: what fits, and how fast and dear training is."""

import pathlib
from collections.abc import Callable, Iterator

from lingvo_gshard.planning import planner, report
from lingvo_gshard.planning.planner import Request
from lingvo_gshard.spmd import topology

# The most devices of a pod.
_TPUS = {"v3": 2048, "v4": 8192, "v5e": 256, "v5p": 8192, "v6e": 256, "tpu7x": 16384}
_GPUS_PER_HOST = {"a100": 8, "h100": 8, "h200": 8, "b200": 8, "gb200": 64}
# The figures of a plan that compare machines, and their names here.
_ROWS = {
    "cores": "devices",
    "fits": "fits",
    "peak GiB": "peak GiB",
    "capacity GiB": "capacity GiB",
    "roofline step ms": "step ms at the roofline",
    "roofline compute ms": "compute ms",
    "roofline memory ms": "memory ms",
    "roofline network ms": "network ms",
    "M tokens/s": "M tokens/s",
}


def topologies(num_devices: int) -> list[str]:
    """The machines of a power of two of devices, 8 or more: TPUs as near to cubes as possible."""
    found = [topology.tpu(name, num_devices) for name, most in _TPUS.items() if num_devices <= most]
    for name, gpus in _GPUS_PER_HOST.items():
        inside = min(gpus, num_devices)
        found.append(f"{name}:{num_devices // inside}x{inside}")
    return found


def lines(
    ask: Callable[[str, str], Request], model: str, num_devices: int, folder: pathlib.Path
) -> Iterator[str]:
    """Plans the model for each machine in a folder of its own; yields progress, then the table."""
    columns: dict[str, dict[str, float]] = {}
    for name in topologies(num_devices):
        if not topology.is_installed(name):
            yield f"{name}: left out, its compiler is not installed"
            continue
        made = planner.planned(ask(model, name), folder / name.replace(":", "_"))
        yield f"{name}: {made.verdict}"
        found = report.figures(made)
        columns[name] = {row: found[figure] for figure, row in _ROWS.items() if figure in found}
        if made.step.cost:
            hours = 365.25 * 24 * made.core_years()
            columns[name]["device-hours for 10^12 tokens"] = hours
    yield report.side_by_side(columns)
