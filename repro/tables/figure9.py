"""Figure 9: AllReduce and AllToAll from 16 to 2048 cores of TPU v3, by a model of the network.

The paper measured them (section 5.3); we compute the times with xla_plan/machines/networks.py,
which needs no compiler. `bench.collectives` measures collectives on the attached devices.
"""

import dataclasses
import itertools
from collections.abc import Iterator

from xla_plan.machines import hardware, topology
from xla_plan.machines.networks import Torus
from xla_spmd.hlo.collectives import Collective

GENERATION = "v3"
_CORES = tuple(2**exponent for exponent in range(4, 12))
_MIB = (8, 32)


@dataclasses.dataclass(frozen=True)
class CollectiveTime:
    """A point of Figure 9: a collective over all cores, by the torus's model."""

    cores: int
    kind: str
    mib: int
    secs: float


def points() -> Iterator[CollectiveTime]:
    """Yields Figure 9's points, by cores, then by kind."""
    for cores in _CORES:
        # Pods with this number of cores are squares, or twice as long as wide.
        torus = _square_torus(cores)
        for kind, mib in itertools.product(("all-to-all", "all-reduce"), _MIB):
            collective = Collective(kind, mib * 2**20, (tuple(range(cores)),), times=1)
            yield CollectiveTime(cores, kind, mib, torus.collective_secs(collective))


def _square_torus(cores: int) -> Torus:
    """Returns the network of this number of TPU v3 cores, without its library."""
    generation = hardware.GENERATIONS[GENERATION]
    sides = topology.tpu(GENERATION, cores).partition(":")[2].split("x")
    chips = itertools.product(*(range(int(side)) for side in sides))

    # The cores of a chip have neighbouring numbers.
    places: list[tuple[int, ...]] = []
    for chip in chips:
        places += [chip] * generation.cores_per_chip
    return Torus(generation, tuple(places))
