"""Published figures of TPUs and GPUs, and models of collectives on their networks (section 5.3).

A TPU's link joins two neighbouring chips, and the cores of a chip share its links. A GPU's NVLink
joins it to all GPUs of its host, and a network adapter of its own joins it to other hosts. Rates
of links are those of one direction.
"""

import dataclasses
import functools

import numpy as np

from lingvo_gshard.hlo.collectives import Collective, Groups
from lingvo_gshard.planning.memory import GIB
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.spmd import environment, topology
from lingvo_gshard.spmd.gpus import GPUS


@dataclasses.dataclass(frozen=True)
class Generation:
    """The figures of one core or GPU, which is what the compiler sees as a device."""

    cores_per_chip: int
    peak_flops: float  # bfloat16 operations; a GPU's float32 products reach half of it.
    memory_bytes_per_sec: float
    # What a program may use, by the TPU compiler or environment.GPU_MEMORY_SHARE.
    capacity_gib: float
    link_bytes_per_sec: float  # Of a TPU's link, or of a GPU's whole NVLink.
    # The rates in XLA's own cost model, measured with the optimal_seconds of programs of one
    # instruction; 0 for GPUs, which have none.
    xla_peak_flops: float = 0.0
    xla_memory_bytes_per_sec: float = 0.0
    network_bytes_per_sec: float = 0.0  # Of a GPU's network adapter.


# bfloat16 flops without sparsity, NVLink and network adapter, as NVIDIA publishes them: the data
# sheets of A100, H100, H200 and of DGX B200 and GB200 NVL72. Adapters are those of the DGX systems:
# 200 Gbit/s for each A100, 400 Gbit/s for each of the others. Memory is that of spmd/gpus.py.
_GPU_RATES = {
    "a100": (312e12, 300e9, 25e9),
    "h100": (989e12, 450e9, 50e9),
    "h200": (989e12, 450e9, 50e9),
    "b200": (2250e12, 900e9, 50e9),
    "gb200": (2500e12, 900e9, 50e9),
}


def _gpu(name: str, peak_flops: float, nvlink: float, adapter: float) -> Generation:
    gpu = GPUS[name]
    capacity_gib = environment.GPU_MEMORY_SHARE * gpu.memory_bytes / GIB
    bandwidth = gpu.memory_bytes_per_sec
    return Generation(1, peak_flops, bandwidth, capacity_gib, nvlink, network_bytes_per_sec=adapter)


# By the prefix of a topology's name, in the order of the fields. The rates of a chip are published
# at https://cloud.google.com/tpu/docs/GENERATION; those of v3's and v4's links at
# https://doi.org/10.1145/3360307 and https://arxiv.org/abs/2304.01433. The pages of v5e,
# v5p, v6e and tpu7x give the rate of a chip's 4 or 6 links in both directions.
GENERATIONS = {
    # 656 Gbit/s a link; its page has 340 TB/s for all-reduces of 1024 chips.
    "v3": Generation(2, 123e12 / 2, 900e9 / 2, 15.48, 656e9 / 8, 61.4e12, 400 * GIB),
    "v4": Generation(2, 275e12 / 2, 1200e9 / 2, 15.25, 50e9, 137e12, 457.5 * GIB),
    "v5e": Generation(1, 197e12, 819e9, 15.75, 400e9 / 4 / 2, 197e12, 687 * GIB),
    "v5p": Generation(1, 459e12, 2765e9, 95.74, 1200e9 / 6 / 2, 394e12, 2189 * GIB),
    "v6e": Generation(1, 918e12, 1638e9, 31.25, 800e9 / 4 / 2, 918e12, 1525.5 * GIB),
    "tpu7x": Generation(2, 2307e12 / 2, 7380e9 / 2, 94.75, 1200e9 / 6 / 2, 996e12, 3432.9 * GIB),
    **{name: _gpu(name, *rates) for name, rates in _GPU_RATES.items()},
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


def network(name: str, mesh: Mesh) -> "Network":
    """The network of a mesh's partitions on a topology; ValueError as topology.places."""
    places = topology.places(name)
    placed = tuple(places[i] for i in mesh.devices)
    if topology.is_gpu(name):
        return Hosts(generation(name), tuple(host for host, _ in placed))
    return Torus(generation(name), placed)


@dataclasses.dataclass(frozen=True)
class Hosts:
    """GPUs in hosts; `hosts` are the numbers of the partitions' hosts.

    Within a host every GPU exchanges with all others at NVLink's rate; between hosts each uses its
    own adapter. Both are used at once and no switch is a bottleneck, which is the best case.
    """

    generation: Generation
    hosts: tuple[int, ...]

    def collective_secs(self, collective: Collective) -> float:
        """The time of one run of a collective: that of the busier of NVLink and adapter.

        With m of a group's g members in a host, and n hosts: AllToAll sends (m - 1) / g of each
        partition's bytes by NVLink and (g - m) / g by the adapter. AllGather receives (m - 1) / m
        of the bytes by NVLink, and (n - 1) / n / m by the adapter, as each GPU of a host fetches a
        part; ReduceScatter is the same, and AllReduce both. CollectivePermute uses the adapter if
        any pair lies in two hosts.
        """
        size, count = collective.result_bytes, collective.group_size
        if collective.kind == "collective-permute":
            crosses = any(self.hosts[a] != self.hosts[b] for a, b in collective.groups)
            return self._secs(0, size) if crosses else self._secs(size, 0)
        num_hosts = len({self.hosts[i] for i in collective.groups[0]})  # Of a group.
        inside = count / num_hosts  # A group's members in each of its hosts, on average.
        if collective.kind.endswith("all-to-all"):
            return self._secs(size * (inside - 1) / count, size * (count - inside) / count)
        ring = size * (inside - 1) / inside, size * (num_hosts - 1) / num_hosts / inside
        return _ring_passes(collective) * self._secs(*ring)

    def _secs(self, nvlink_bytes: float, adapter_bytes: float) -> float:
        nvlink, adapter = self.generation.link_bytes_per_sec, self.generation.network_bytes_per_sec
        return max(nvlink_bytes / nvlink, adapter_bytes / adapter)


@dataclasses.dataclass(frozen=True)
class Torus:
    """A torus of chips; `places` are the coordinates of each partition's.

    Every dim of more than two chips is assumed to wrap around, although slices smaller than a pod
    may not. Like the paper's roofline (section 5.2), this is the best case.
    """

    generation: Generation
    places: tuple[tuple[int, ...], ...]

    def collective_secs(self, collective: Collective) -> float:
        """The time of one run of a collective that keeps all links busy.

        AllToAll: each partition sends equal parts of its bytes to its whole group, each part over
        as many links as lie between. The busiest dim decides: on a ring of n chips with two cores
        each that is 2 * bytes * n/4 / 2 per link, which grows as sqrt(D) on a square.
        AllReduce: reduce-scatter and all-gather by rings over all links at once, 2 * (g - 1) / g
        * bytes. AllGather and ReduceScatter: half of that, for the larger side's bytes.
        CollectivePermute: the bytes times the longest distance between a source and its target.
        """
        rate, size = self.generation.link_bytes_per_sec, collective.result_bytes
        if collective.kind == "collective-permute":
            return size * self.generation.cores_per_chip * self._farthest(collective) / rate
        if collective.kind.endswith("all-to-all"):
            return size * self._all_to_all_load(collective.groups) / rate
        count, passed = collective.group_size, _ring_passes(collective) * size
        return passed * (count - 1) / count * self._ring_load(collective.groups) / rate

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of chips along each dim."""
        return tuple(max(along) + 1 for along in zip(*self.places, strict=True))

    def _links(self, dim: int) -> int:
        """The number of directed links that leave a chip along a dim."""
        return 2 if self.sizes[dim] > 2 else 1

    def _all_to_all_load(self, groups: Groups) -> float:
        """The bytes that cross each link of the busiest dim, per byte of a partition."""
        places, loads = np.array([self.places[i] for i in groups[0]]), []
        for dim, size in enumerate(self.sizes):
            ring, members = np.arange(size), np.bincount(places[:, dim], minlength=size)
            links = int(members @ _distance(ring[:, None], ring, size) @ members)  # Of all pairs.
            mean = links / len(places) ** 2
            loads.append(self.generation.cores_per_chip * mean / self._links(dim))
        return max(loads)

    def _ring_load(self, groups: Groups) -> float:
        """The bytes that cross each link of rings through a group, per byte of a partition.

        Groups whose members alternate share links. A chip's cores in a group are one member.
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
        sources, targets = np.array(self.places)[np.array(permute.groups).T]
        return int(_distance(sources, targets, np.array(self.sizes)).sum(axis=1).max())


Network = Torus | Hosts


def _ring_passes(collective: Collective) -> int:
    """How often a collective by rings passes on the bytes of its result."""
    # A reduce-scatter's result is one part; an all-reduce is a reduce-scatter and an all-gather.
    return {"all-reduce": 2, "reduce-scatter": collective.group_size}.get(collective.kind, 1)


def _distance(a: np.ndarray, b: np.ndarray, size: np.ndarray | int) -> np.ndarray:
    return np.minimum((a - b) % size, (b - a) % size)
