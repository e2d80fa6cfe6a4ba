"""Published figures of TPU generations, and a model of collectives on their tori (section 5.3).

A link joins two neighbouring chips; its rate is that of one direction. The cores of a chip share
its links.
"""

import dataclasses

import numpy as np

from lingvo_gshard.hlo.collectives import Collective, Groups


@dataclasses.dataclass(frozen=True)
class Generation:
    """The figures of one core, which is what the compiler sees as a device.

    Attributes:
      peak_flops: bfloat16 operations per second.
      capacity_gib: the memory that the compiler leaves to a program, by its own account.
      xla_peak_flops, xla_memory_bytes_per_sec: the rates in XLA's own cost model, measured with
        the optimal_seconds of programs of one instruction.
    """

    cores_per_chip: int
    peak_flops: float
    memory_bytes_per_sec: float
    capacity_gib: float
    link_bytes_per_sec: float
    xla_peak_flops: float
    xla_memory_bytes_per_sec: float


_GIB = 2.0**30
# By the prefix of a topology's name, in the order of the fields. The rates of a chip are published
# at https://cloud.google.com/tpu/docs/GENERATION; those of v3's and v4's links at
# https://doi.org/10.1145/3360307 and https://arxiv.org/abs/2304.01433. The pages of v5e and v5p
# give the rate of a chip's 4 or 6 links in both directions.
GENERATIONS = {
    # 656 Gbit/s a link; its page has 340 TB/s for all-reduces of 1024 chips.
    "v3": Generation(2, 123e12 / 2, 900e9 / 2, 15.48, 656e9 / 8, 61.4e12, 400 * _GIB),
    "v4": Generation(2, 275e12 / 2, 1200e9 / 2, 15.25, 50e9, 137e12, 457.5 * _GIB),
    "v5e": Generation(1, 197e12, 819e9, 15.75, 400e9 / 4 / 2, 197e12, 687 * _GIB),
    "v5p": Generation(1, 459e12, 2765e9, 95.74, 1200e9 / 6 / 2, 394e12, 2189 * _GIB),
}


def generation(topology: str) -> Generation:
    """The generation of a topology such as `v3:8x8`. Raises ValueError for an unknown one."""
    name = topology.partition(":")[0]
    if name not in GENERATIONS:
        raise ValueError(
            f"topology {topology}: no published figures are known for {name!r}, only for "
            f"{', '.join(GENERATIONS)}."
        )
    return GENERATIONS[name]


@dataclasses.dataclass(frozen=True)
class Torus:
    """A torus of `sizes` chips; `places` are the coordinates of each partition's chip.

    Every dim of more than two chips is assumed to wrap around, although slices smaller than a pod
    may not. Like the paper's roofline (section 5.2), this is the best case.
    """

    generation: Generation
    sizes: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]

    def collective_secs(self, collective: Collective) -> float:
        """The time of one run of a collective that keeps all links busy.

        AllToAll: each partition sends equal parts of its bytes to its whole group, each part over
        as many links as lie between. The busiest dim decides: on a ring of n chips with two cores
        each that is 2 * bytes * n/4 / 2 per link, which grows as sqrt(D) on a square.
        AllReduce: reduce-scatter and all-gather by rings over all links at once, 2 * (g - 1) / g
        * bytes. AllGather and ReduceScatter: half of that, for the larger side's bytes.
        CollectivePermute: the bytes times the longest distance between a source and its target.
        Raises ValueError for other kinds.
        """
        rate, size = self.generation.link_bytes_per_sec, collective.result_bytes
        count = collective.group_size
        match collective.kind:
            case "collective-permute":
                return size * self.generation.cores_per_chip * self._farthest(collective) / rate
            case "all-to-all" | "ragged-all-to-all":
                return size * self._all_to_all_load(collective.groups) / rate
            case "all-reduce":
                return 2 * size * (count - 1) / count * self._ring_load(collective.groups) / rate
            case "reduce-scatter":  # Its result is one part of what is reduced.
                return size * (count - 1) * self._ring_load(collective.groups) / rate
            case "all-gather" | "collective-broadcast":
                return size * (count - 1) / count * self._ring_load(collective.groups) / rate
        raise ValueError(f"no model of the time of a {collective.kind}.")

    def _links(self, dim: int) -> int:
        """The number of directed links that leave a chip along a dim."""
        return 2 if self.sizes[dim] > 2 else 1

    def _all_to_all_load(self, groups: Groups) -> float:
        """The bytes that cross each link of the busiest dim, per byte of a partition."""
        places = np.array([self.places[i] for i in groups[0]])
        return max(
            self.generation.cores_per_chip * _mean_distance(places[:, dim], size) / self._links(dim)
            for dim, size in enumerate(self.sizes)
        )

    def _ring_load(self, groups: Groups) -> float:
        """The bytes that cross each link of rings through a group, per byte of a partition.

        Groups whose members alternate share links. Cores of one chip in the same group count as
        one member of its rings.
        """
        places = [self.places[i] for i in groups[0]]
        chips = np.array(sorted(set(places)))
        sharing = self.generation.cores_per_chip * len(chips) / len(places)
        links, gap = 0, 1.0
        for dim in range(len(self.sizes)):
            members = np.unique(chips[:, dim])
            if len(members) > 1:
                links += self._links(dim)
                gap = max(gap, float(np.diff(members).mean()))
        return sharing * gap / links if links else 0.0

    def _farthest(self, permute: Collective) -> int:
        """The most links between a source and its target."""
        pairs = np.array(permute.groups)
        places = np.array(self.places)
        distances = _distance(places[pairs[:, 0]], places[pairs[:, 1]], np.array(self.sizes))
        return int(distances.sum(axis=1).max())


def _mean_distance(positions: np.ndarray, size: int) -> float:
    """The mean number of links between two members of a group on a ring of `size`."""
    counts = np.bincount(positions, minlength=size)
    ring = np.arange(size)
    total = int(counts @ _distance(ring[:, None], ring, size) @ counts)
    return total / len(positions) ** 2


def _distance(a: np.ndarray, b: np.ndarray, size: np.ndarray | int) -> np.ndarray:
    return np.minimum((a - b) % size, (b - a) % size)
