"""Times collectives by size and number of devices: Figure 9, section 5.3, on these devices.

    python -m bench.collectives [--mib=8,32] [--num_partitions=8]

The benchmark uses 2, 4, 8, ... of the devices, and all of them. As in the paper, the size is the
size of a device's part before the collective: an AllToAll sends equal pieces of it to all devices;
with D devices, an AllGather's result is D times larger, and a ReduceScatter's D times smaller. Each
program is one collective and nothing else; the compiled program is checked for this.

If the kind of the devices is known, the table also has the time from the network's model
(xla_plan/machines/networks.py), a best case. Each collective is also compared with a copy of the
same size on the same devices at the same time. On virtual devices of a CPU, collectives are copies
in its memory.
"""

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lingvo_gshard import cli
from lingvo_gshard.spmd import devices as devices_at_hand
from lingvo_gshard.spmd import processes
from xla_plan.machines import networks
from xla_spmd.files import table
from xla_spmd.hlo import collectives, hlo_module
from xla_spmd.hlo.collectives import Collective

_MIB = flags.DEFINE_list("mib", ["8", "32"], "MiB that each device has before a collective.")
_RUNS = flags.DEFINE_integer("runs", 9, "Timed runs; their median counts.", lower_bound=1)
cli.define_devices()
flags.adopt_module_key_flags(cli)

_CPU_DEVICES = 8  # The default.
# On TPUs and GPUs, a run consists of several calls, so that the start of a call is hidden.
_CALLS = 10
_AXIS = "d"
_COPY = "copy"
_WARM_UP = 3  # Runs that are not timed: the first ones get their memory from the system.


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A program of one collective, and its argument, with the given number of bytes per device."""

    kind: str
    compiled: Any  # A jax.stages.Compiled.
    x: jax.Array  # [D * n], float32, where each of D devices has n.
    collective: Collective | None  # The compiled one; None for a copy.


def main() -> None:
    sizes_mib = _positive_numbers(_MIB.value)
    partitions = flags.FLAGS.num_partitions
    if partitions is None and _is_on_cpu():
        partitions = _CPU_DEVICES

    with cli.joined(partitions):
        count, description = cli.start_devices("", partitions)
        if count < 2:
            raise ValueError(f"collectives need 2 devices or more, got {description}.")
        if processes.is_first():
            print(description)
        rows = list(_measured(jax.devices()[:count], sizes_mib, _RUNS.value))
        if processes.is_first():
            print(table.text(rows))


def _positive_numbers(texts: Sequence[str]) -> list[int]:
    if not texts or not all(text.isdecimal() and int(text) for text in texts):
        raise ValueError(f"--mib={','.join(texts)}: expected whole numbers from 1, such as 8,32.")
    return [int(text) for text in texts]


def _is_on_cpu() -> bool:
    platform = flags.FLAGS.platform
    if platform == "auto":
        platform = devices_at_hand.find() or os.environ["JAX_PLATFORMS"]
    return platform == "cpu"


def _measured(devices: Sequence[Any], sizes_mib: Sequence[int], runs: int) -> Iterator[list[str]]:
    """Yields the rows of the table: the header, then by kind, size and number of devices."""
    columns = ["MiB", "devices", "ms", "of the first", "copies"]
    has_model = networks.of_devices(devices) is not None
    yield ["", *columns, *(["model ms", "of the model"] if has_model else [])]

    # Each collective is compared with a copy of the same size on the same devices.
    copy_secs: dict[tuple[int, int], float] = {}
    for kind in (_COPY, *BODIES):
        for mib in sizes_mib:
            first_secs = None
            for count in counts(len(devices)):
                prepared = prepare(kind, devices[:count], mib * 2**20)
                secs = median_secs(prepared, runs)
                first_secs = first_secs or secs
                copy_secs.setdefault((mib, count), secs)

                cells = [kind, str(mib), str(count), f"{1e3 * secs:.3f}"]
                cells += [f"{secs / first_secs:.2f}", f"{secs / copy_secs[mib, count]:.1f}"]
                if has_model:
                    cells += _model_cells(prepared, devices[:count], secs)
                yield cells


def _model_cells(prepared: Prepared, devices: Sequence[Any], secs: float) -> list[str]:
    """Returns the time in the network's model, and its share of the measured time."""
    network = networks.of_devices(devices)
    if network is None or prepared.collective is None:
        return ["-", "-"]
    model_secs = network.collective_secs(prepared.collective)
    return [f"{1e3 * model_secs:.3f}", f"{model_secs / secs:.0%}"]


def counts(num_devices: int) -> list[int]:
    """Returns 2, 4, 8, ... below the number of devices, and the number itself."""
    powers = [2**exponent for exponent in range(1, num_devices.bit_length())]
    return sorted({*powers, num_devices})


# --- The programs ---


def _all_reduce(x: jax.Array) -> jax.Array:
    return lax.psum(x, _AXIS)


def _all_to_all(x: jax.Array) -> jax.Array:
    return lax.all_to_all(x, _AXIS, split_axis=0, concat_axis=0, tiled=True)


def _all_gather(x: jax.Array) -> jax.Array:
    return lax.all_gather(x, _AXIS, tiled=True)


def _collective_permute(x: jax.Array) -> jax.Array:
    size = lax.axis_size(_AXIS)
    return lax.ppermute(x, _AXIS, [(i, (i + 1) % size) for i in range(size)])


def _reduce_scatter(x: jax.Array) -> jax.Array:
    return lax.psum_scatter(x, _AXIS, tiled=True)


# The function of a device's part [n] of the argument, by XLA's name of the collective.
BODIES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "all-reduce": _all_reduce,
    "all-to-all": _all_to_all,
    "all-gather": _all_gather,
    "collective-permute": _collective_permute,
    "reduce-scatter": _reduce_scatter,
}


def prepare(kind: str, devices: Sequence[Any], num_bytes: int) -> Prepared:
    """Compiles a collective, or a copy, of `num_bytes` on each device, and makes its argument.

    Raises AssertionError if the compiled program is not this one collective.
    """
    # A sum with a constant reads and writes everything, and compilers do not remove it.
    body = BODIES.get(kind, lambda x: x + 1.0)
    mesh = Mesh(np.array(devices), (_AXIS,))
    split = PartitionSpec(_AXIS)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)

    # Each device makes its own part, so that hosts do not need memory for the whole array.
    shape = (len(devices) * num_bytes // 4,)
    made = jax.jit(lambda: lax.iota(np.float32, shape[0]), out_shardings=NamedSharding(mesh, split))
    x = made()
    compiled = jax.jit(mapped).lower(x).compile()

    found = collectives.find(hlo_module.read(compiled))
    if kind == _COPY:
        assert not found, found
        return Prepared(kind, compiled, x, None)
    assert [collective.kind for collective in found] == [kind], (kind, found)
    assert found[0].times == 1, found
    return Prepared(kind, compiled, x, found[0])


def median_secs(prepared: Prepared, runs: int) -> float:
    """Returns the median time of a call over some runs."""
    # Two programs at once can deadlock on CPU devices, so each call there must end first.
    is_cpu = next(iter(prepared.x.devices())).platform == "cpu"
    calls = 1 if is_cpu else _CALLS

    times_secs = []
    for _ in range(_WARM_UP + runs):
        processes.wait_for_all()
        began = time.perf_counter()
        for _ in range(calls):
            result = prepared.compiled(prepared.x)
        jax.block_until_ready(result)
        times_secs.append((time.perf_counter() - began) / calls)
    return statistics.median(times_secs[_WARM_UP:])


if __name__ == "__main__":
    cli.run("collectives", main)
