"""Models of collectives on the networks of TPUs and GPUs: Figure 9, section 5.3.

A TPU's link joins two neighbouring chips, and the cores of a chip share its links. The data
center's network joins slices of TPUs, through the adapters of their hosts. A GPU's NVLink joins it
to all GPUs of its host, and its own network adapter joins it to other hosts. All models are best
cases without latency.
"""

import dataclasses
import functools
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from xla_plan.machines import hardware, topology
from xla_plan.machines.hardware import Generation
from xla_spmd.hlo.collectives import Collective, Groups
from xla_spmd.mesh import Mesh


@dataclasses.dataclass(frozen=True)
class Hosts:
    """GPUs in hosts; `hosts` are the numbers of the partitions' hosts.

    Within a host every GPU exchanges with all others at NVLink's rate; between hosts each uses its
    own adapter. Both are used at once and no switch is a bottleneck, which is the best case.
    """

    generation: Generation
    hosts: tuple[int, ...]

    def collective_secs(self, collective: Collective) -> float:
        """Returns the time of one run of a collective on the busier of NVLink and adapter.

        A group has g members in n hosts, m = g / n in each:

        AllToAll            (m - 1) / g of each partition's bytes by NVLink, (g - m) / g by adapter
        AllGather           (m - 1) / m by NVLink; (n - 1) / n / m by adapter, as each GPU of a host
                            fetches a part
        ReduceScatter       as AllGather, for the larger side's bytes
        AllReduce           ReduceScatter and AllGather
        CollectivePermute   all bytes by the adapter if a pair spans two hosts, else by NVLink
        """
        # The slowest pair decides.
        size = collective.result_bytes
        if collective.kind == "collective-permute":
            crosses = any(self.hosts[a] != self.hosts[b] for a, b in collective.groups)
            return self._secs(0, size) if crosses else self._secs(size, 0)

        # All groups of a collective are alike; the first stands for them.
        g = collective.group_size
        n = len({self.hosts[partition] for partition in collective.groups[0]})
        m = g / n  # The average number of members in a host.

        if collective.kind.endswith("all-to-all"):
            return self._secs(size * (m - 1) / g, size * (g - m) / g)

        # Every GPU of a host fetches its share from the other hosts, and gets the rest by NVLink.
        ring_secs = self._secs(size * (m - 1) / m, size * (n - 1) / n / m)
        return _ring_passes(collective) * ring_secs

    def _secs(self, nvlink_bytes: float, adapter_bytes: float) -> float:
        nvlink_secs = nvlink_bytes / self.generation.link_bytes_per_sec
        adapter_secs = adapter_bytes / self.generation.network_bytes_per_sec
        return max(nvlink_secs, adapter_secs)


@dataclasses.dataclass(frozen=True)
class Torus:
    """A torus of chips; `places` are the coordinates of each partition's chip.

    Every dim of more than two chips is assumed to wrap around, although slices smaller than a pod
    may not. Like the paper's roofline (section 5.2), this is the best case.
    """

    generation: Generation
    places: tuple[tuple[int, ...], ...]

    def collective_secs(self, collective: Collective) -> float:
        """Returns the time of one run of a collective that keeps all links busy.

        AllToAll: each partition sends equal parts of its bytes to its whole group, each part over
        all links between them. The busiest dim decides: on a ring of n chips with two cores each
        that is 2 * bytes * n/4 / 2 per link, which grows as sqrt(D) on a square.
        AllReduce: reduce-scatter and all-gather by rings over all links at once, 2 * (g - 1) / g
        * bytes. AllGather and ReduceScatter: half of that, for the larger side's bytes.
        CollectivePermute: the bytes times the longest distance between a source and its target.
        Where two equal ones run together in opposite directions, the second takes no time, as each
        link has both directions.
        """
        rate = self.generation.link_bytes_per_sec
        size = collective.result_bytes

        if collective.kind == "collective-permute":
            if collective.is_beside_reverse:
                return 0.0
            # The cores of a chip send over the same links.
            return size * self.generation.cores_per_chip * self._farthest(collective) / rate
        if collective.kind.endswith("all-to-all"):
            return size * self._all_to_all_load(collective.groups) / rate

        # A ring passes on all parts except a member's own.
        g = collective.group_size
        passed_bytes = _ring_passes(collective) * size
        return passed_bytes * (g - 1) / g * self._ring_load(collective.groups) / rate

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of chips along each dim."""
        return tuple(max(coordinates) + 1 for coordinates in zip(*self.places, strict=True))

    def _links(self, dim: int) -> int:
        """Returns the number of directed links that leave a chip along a dim."""
        return 2 if self.sizes[dim] > 2 else 1

    def _all_to_all_load(self, groups: Groups) -> float:
        """Returns the bytes that cross each link of the busiest dim, per byte of a partition."""
        places = np.array([self.places[partition] for partition in groups[0]])
        loads = []
        for dim, size in enumerate(self.sizes):
            # The number of links between the members of a pair, on average over all pairs.
            ring = np.arange(size)
            members = np.bincount(places[:, dim], minlength=size)
            distances = _distance(ring[:, None], ring, size)
            mean_distance = int(members @ distances @ members) / len(places) ** 2

            loads.append(self.generation.cores_per_chip * mean_distance / self._links(dim))
        return max(loads)

    def _ring_load(self, groups: Groups) -> float:
        """Returns the bytes that cross each link of rings in a group, per byte of a partition.

        Groups whose members alternate share links. A chip's cores in a group are one member.
        """
        # If a chip's cores are in several groups, these share its links.
        places = [self.places[partition] for partition in groups[0]]
        chips = np.array(sorted(set(places)))
        groups_per_chip = self.generation.cores_per_chip * len(chips) / len(places)

        # Rings run along every dim in which the group has several members. If these are not
        # neighbours, the links between them also carry the rings of other groups.
        links = 0
        gap = 1.0
        for dim in range(len(self.sizes)):
            members = np.unique(chips[:, dim])
            if len(members) > 1:
                links += self._links(dim)
                gap = max(gap, float(np.diff(members).mean()))

        if links == 0:
            return 0.0  # All members are cores of one chip.
        return groups_per_chip * gap / links

    def _farthest(self, permute: Collective) -> int:
        """Returns the most links between a source and its target."""
        sources, targets = np.array(self.places)[np.array(permute.groups).T]
        distances = _distance(sources, targets, np.array(self.sizes))
        return int(distances.sum(axis=1).max())


@dataclasses.dataclass(frozen=True)
class Slices:
    """Slices of TPUs; `torus` is each slice's, and `slices` are the partitions' slice numbers.

    A partition exchanges bytes with other slices through its host's adapters, of which each chip
    has an equal share. No switch between the hosts is a bottleneck, the best case.
    """

    torus: Torus
    slices: tuple[int, ...]

    @property
    def generation(self) -> Generation:
        """The figures of a core."""
        return self.torus.generation

    def collective_secs(self, collective: Collective) -> float:
        """Returns the time of one run of a collective on the busier of links and adapters.

        A group has g members in n slices, m = g / n in each. Each member exchanges its part with
        the same-numbered members of the other slices:

        AllToAll            (g - m) / g of each partition's bytes by the adapter
        AllGather           (n - 1) / n / m
        ReduceScatter       as AllGather, for the larger side's bytes
        AllReduce           ReduceScatter and AllGather
        CollectivePermute   all bytes, if a pair spans two slices

        The rest is a collective of a slice's m members on its torus.
        """
        size = collective.result_bytes
        if collective.kind == "collective-permute":
            crosses = any(self.slices[a] != self.slices[b] for a, b in collective.groups)
            return self._adapter_secs(size) if crosses else self.torus.collective_secs(collective)

        # All groups of a collective are alike; the first stands for them.
        group = collective.groups[0]
        n = len({self.slices[partition] for partition in group})
        if n == 1:
            return self.torus.collective_secs(collective)

        g = collective.group_size
        m = g / n
        if collective.kind.endswith("all-to-all"):
            crossing_bytes = size * (g - m) / g
        else:
            crossing_bytes = _ring_passes(collective) * size * (n - 1) / n / m
        return max(self._adapter_secs(crossing_bytes), self._inner_secs(collective))

    def _adapter_secs(self, size: float) -> float:
        # The cores of a chip share its part of the adapters.
        return size * self.generation.cores_per_chip / self.generation.network_bytes_per_sec

    def _inner_secs(self, collective: Collective) -> float:
        """Returns the time of a collective's part within the slice of its first member."""
        group = collective.groups[0]
        inner = tuple(p for p in group if self.slices[p] == self.slices[group[0]])

        # Fewer members have larger parts of a reduce-scatter, and equally large ones of an
        # all-to-all.
        size = collective.result_bytes
        if collective.kind == "reduce-scatter":
            size = size * len(group) // len(inner)
        elif collective.kind.endswith("all-to-all"):
            size = size * len(inner) // len(group)
        within = dataclasses.replace(collective, groups=(inner,), result_bytes=size)
        return self.torus.collective_secs(within)


Network = Torus | Slices | Hosts


def network(name: str, mesh: Mesh) -> Network:
    """Returns the network of a mesh's partitions on a topology.

    Raises ValueError if the topology is unknown, if its compiler is not installed, or if no figures
    are published of the network that joins its slices.
    """
    # The mesh may put its partitions on the devices in another order (appendix A.3).
    places = topology.places(name)
    partition_places = tuple(places[device] for device in mesh.devices)
    generation = hardware.generation(name)

    if topology.is_gpu(name):
        return Hosts(generation, tuple(host for host, _ in partition_places))

    num_slices = topology.num_slices(name)
    if num_slices == 1:
        return Torus(generation, partition_places)

    if generation.network_bytes_per_sec == 0:
        raise ValueError(
            f"topology {name}: no rate is published for the network between slices of "
            f"{name.partition(':')[0]}, so a plan could not give times."
        )
    # The devices of one slice come before the devices of the next.
    per_slice = len(places) // num_slices
    slices = tuple(device // per_slice for device in mesh.devices)
    return Slices(Torus(generation, partition_places), slices)


def secs_per_byte(network: Network, mesh: Mesh, kind: str, axes: Collection[str]) -> float:
    """Returns the time of a collective along some axes of a mesh, for each byte of its result.

    A CollectivePermute is between two neighbours.
    """
    # The group of the first partition: all partitions that differ from it along `axes` alone.
    partitions = np.arange(mesh.num_partitions).reshape(mesh.axis_sizes)
    index = tuple(slice(None) if axis in axes else 0 for axis in mesh.axis_names)
    group = partitions[index].ravel()
    if kind == "collective-permute":
        group = group[:2]
    return network.collective_secs(Collective(kind, 1, (tuple(group.tolist()),), 1))


def of_devices(devices: Sequence[Any]) -> Network | None:
    """Returns the network of the devices at hand; None if their kind has no published figures.

    Args:
      devices: jax.Devices of one kind, in the order of the partitions.
    """
    name = hardware.generation_of_kind(devices[0].device_kind)
    if name is None:
        return None

    generation = hardware.GENERATIONS[name]
    if topology.is_gpu(f"{name}:"):
        # JAX calls the GPUs that NVLink joins a slice.
        slices = tuple(getattr(device, "slice_index", device.process_index) for device in devices)
        return Hosts(generation, slices)

    # A slice may be placed anywhere in its pod.
    coordinates = np.array([device.coords for device in devices])
    places = coordinates - coordinates.min(axis=0)
    return Torus(generation, tuple(tuple(place) for place in places.tolist()))


def _ring_passes(collective: Collective) -> int:
    """Returns how many times the bytes of its result a ring collective passes on."""
    match collective.kind:
        case "all-reduce":
            return 2  # It is a reduce-scatter and an all-gather.
        case "reduce-scatter":
            return collective.group_size  # Its result is one of group_size parts.
        case _:
            return 1


def _distance(a: np.ndarray, b: np.ndarray, size: np.ndarray | int) -> np.ndarray:
    """Returns the links between two places on a ring, by the shorter way."""
    return np.minimum((a - b) % size, (b - a) % size)
