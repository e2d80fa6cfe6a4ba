"""Published figures of TPU generations, and the time of collectives on their tori (section 5.3).

A link is the wire between neighbouring chips; its rate is of one direction. Both cores of a chip
share its links.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from lingvo_gshard.hlo.collectives import Collective, Groups


@dataclasses.dataclass(frozen=True)
class Generation:
    """A TPU generation, by core: what the compiler sees as one device.

    Attributes:
      name: as in a topology's name.
      cores_per_chip: devices that share a chip's links.
      peak_flops: a second, bfloat16 products.
      memory_bytes_per_sec: of high-bandwidth memory.
      capacity_bytes: of memory that the compiler leaves to a program; its own figure.
      link_bytes_per_sec: of one link in one direction.
      sources: where the rates were published.
      xla_peak_flops, xla_memory_bytes_per_sec: the rates of XLA's own cost model, which its
        optimal_seconds divides by; read off programs of one instruction.
    """

    name: str
    cores_per_chip: int
    peak_flops: float
    memory_bytes_per_sec: float
    capacity_bytes: float
    link_bytes_per_sec: float
    sources: tuple[str, ...]
    xla_peak_flops: float
    xla_memory_bytes_per_sec: float


_GIB = 2.0**30
_CLOUD = "https://cloud.google.com/tpu/docs"

GENERATIONS = {
    generation.name: generation
    for generation in (
        Generation(
            "v3",
            cores_per_chip=2,
            peak_flops=123e12 / 2,
            memory_bytes_per_sec=900e9 / 2,
            capacity_bytes=15.48 * _GIB,
            link_bytes_per_sec=656e9 / 8,
            # 656 Gbit/s a link; the first has 340 TB/s of all-reduces for 1024 chips of 4 links.
            sources=(f"{_CLOUD}/v3", "https://doi.org/10.1145/3360307 (links)"),
            xla_peak_flops=61.4e12,
            xla_memory_bytes_per_sec=400 * _GIB,
        ),
        Generation(
            "v4",
            cores_per_chip=2,
            peak_flops=275e12 / 2,
            memory_bytes_per_sec=1200e9 / 2,
            capacity_bytes=15.25 * _GIB,
            link_bytes_per_sec=50e9,
            sources=(f"{_CLOUD}/v4", "https://arxiv.org/abs/2304.01433 (links)"),
            xla_peak_flops=137e12,
            xla_memory_bytes_per_sec=457.5 * _GIB,
        ),
        Generation(
            "v5e",
            cores_per_chip=1,
            peak_flops=197e12,
            memory_bytes_per_sec=819e9,
            capacity_bytes=15.75 * _GIB,
            link_bytes_per_sec=400e9 / 4 / 2,  # Of 4 links, both directions counted.
            sources=(f"{_CLOUD}/v5e",),
            xla_peak_flops=197e12,
            xla_memory_bytes_per_sec=687 * _GIB,
        ),
        Generation(
            "v5p",
            cores_per_chip=1,
            peak_flops=459e12,
            memory_bytes_per_sec=2765e9,
            capacity_bytes=95.74 * _GIB,
            link_bytes_per_sec=1200e9 / 6 / 2,  # Of 6 links, both directions counted.
            sources=(f"{_CLOUD}/v5p",),
            xla_peak_flops=394e12,
            xla_memory_bytes_per_sec=2189 * _GIB,
        ),
    )
}


def generation(topology: str) -> Generation:
    """The generation of a topology such as `v3:8x8`; ValueError where no figures are known."""
    name = topology.partition(":")[0]
    if name not in GENERATIONS:
        raise ValueError(
            f"topology {topology}: no published figures of {name!r} are kept here, only of "
            f"{', '.join(GENERATIONS)}."
        )
    return GENERATIONS[name]


@dataclasses.dataclass(frozen=True)
class Torus:
    """The chips of a topology and where each partition's core lies.

    Every dim of more than two chips is taken to wrap around, which slices smaller than a whole
    pod may not: as the paper's roofline (section 5.2), it is the best case.

    Attributes:
      generation: the chips'.
      sizes: chips along each dim.
      places: of each partition, its chip's coordinates along those dims.
    """

    generation: Generation
    sizes: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]

    def collective_secs(self, collective: Collective) -> float:
        """The time of one run of a collective whose links are all busy at their full rate.

        AllToAll: each partition sends its bytes in equal parts to all of its group, each part
        over as many links as lie between. The busiest dim's links decide: with both cores of a
        chip, 2 * bytes * n/4 / 2 links on a ring of n chips, which grows as sqrt(D) on a square.
        AllReduce: reduce-scatter and all-gather by rings over all links at once, 2 * (g - 1) / g
        * bytes; AllGather and ReduceScatter: half of that, of the larger side's bytes.
        CollectivePermute: bytes over the most links that a pair is apart.
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
        """Directed links that leave a chip along a dim."""
        return min(2, self.sizes[dim] - 1)

    def _all_to_all_load(self, groups: Groups) -> float:
        """Of the busiest dim, link crossings of a chip's parts a link, over a partition's bytes."""
        places = np.array([self.places[i] for i in groups[0]])
        load = 0.0
        for dim, size in enumerate(self.sizes):
            if self._links(dim):
                distance = _mean_distance(places[:, dim], size)
                load = max(load, self.generation.cores_per_chip * distance / self._links(dim))
        return load

    def _ring_load(self, groups: Groups) -> float:
        """Link crossings a link of rings through a group, over a partition's bytes.

        Groups that lie between each other's members share links; cores of a chip that are in one
        group are one member of its rings.
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
        return max(
            sum(
                _distance(a, b, size)
                for a, b, size in zip(
                    self.places[source], self.places[target], self.sizes, strict=True
                )
            )
            for source, target in permute.groups
        )


def _mean_distance(positions: np.ndarray, size: int) -> float:
    """Links between two random members of a group on a ring of `size`."""
    counts = np.bincount(positions, minlength=size)
    total = sum(
        int(counts[a]) * int(counts[b]) * _distance(a, b, size)
        for a in range(size)
        for b in range(size)
    )
    return total / math.prod([len(positions)] * 2)


def _distance(a: int, b: int, size: int) -> int:
    return min((a - b) % size, (b - a) % size)
