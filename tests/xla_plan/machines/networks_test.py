"""The times of collectives on a torus and on GPUs in hosts, against hand-worked ones."""

import dataclasses
import types

import pytest

from xla_plan.machines import networks, topology
from xla_plan.machines.hardware import GENERATIONS
from xla_plan.machines.networks import Hosts, Slices, Torus
from xla_spmd.hlo.collectives import Collective
from xla_spmd.mesh import Mesh

_V3 = GENERATIONS["v3"]
_V3_WITH_ADAPTER = dataclasses.replace(_V3, network_bytes_per_sec=1e9)
_H100 = GENERATIONS["h100"]
_PLACES = tuple((x, y) for x in range(2) for y in range(2) for _ in range(2))
_LINK = 82e9
_SIZE = 2**20


def _torus(*sizes, cores=2):
    chips = [()]
    for size in sizes:
        chips = [(*chip, i) for chip in chips for i in range(size)]
    return Torus(_V3, tuple(chip for chip in chips for _ in range(cores)))


def _secs(torus, kind, groups=None):
    groups = groups or (tuple(range(len(torus.places))),)
    return torus.collective_secs(Collective(kind, _SIZE, groups, times=1))


def test_all_to_all_on_a_ring():
    # 8 chips: a part crosses 2 links on average; the 2 cores of a chip send over 2 links.
    assert _secs(_torus(8), "all-to-all") == pytest.approx(2 * _SIZE * 2 / (2 * _LINK))


def test_all_to_all_grows_as_the_root_of_the_chips():
    small, large = _secs(_torus(4, 4), "all-to-all"), _secs(_torus(16, 16), "all-to-all")
    assert large / small == pytest.approx(4.0)
    # The links of the longer dim decide.
    assert _secs(_torus(4, 16), "all-to-all") == pytest.approx(large)


def test_all_reduce_is_about_constant():
    # A reduce-scatter and an all-gather over all four links of a chip; its cores are one member.
    expected = 2 * _SIZE * (511 / 512) / (4 * _LINK)
    assert _secs(_torus(16, 16), "all-reduce") == pytest.approx(expected)
    assert _secs(_torus(4, 4), "all-reduce") == pytest.approx(expected, rel=0.04)
    assert _secs(_torus(16, 16), "all-gather") == pytest.approx(expected / 2)


def test_a_reduce_scatter_counts_the_bytes_of_one_part():
    assert _secs(_torus(4, 4), "reduce-scatter") == pytest.approx(_SIZE * 31 / (4 * _LINK))


def test_groups_within_a_row_use_only_the_links_of_the_row():
    torus = _torus(4, 8)
    rows = tuple(tuple(range(16 * i, 16 * i + 16)) for i in range(4))
    expected = 2 * _SIZE * (15 / 16) / (2 * _LINK)
    assert _secs(torus, "all-reduce", rows) == pytest.approx(expected)
    assert _secs(torus, "all-to-all", rows) == pytest.approx(2 * _SIZE * 2 / (2 * _LINK))


def test_interleaved_groups_share_links():
    # Every second chip of a ring, one core each: two groups cross each link, for both cores.
    torus = _torus(8)
    groups = tuple(tuple(range(start, 16, 4)) for start in range(4))
    expected = 2 * _SIZE * (3 / 4) * 2 * 2 / (2 * _LINK)
    assert _secs(torus, "all-reduce", groups) == pytest.approx(expected)


def test_cores_of_one_chip_do_not_use_links():
    torus = _torus(4)
    pairs = tuple((2 * i, 2 * i + 1) for i in range(4))
    assert _secs(torus, "all-reduce", pairs) == _secs(torus, "all-to-all", pairs) == 0.0


def test_a_permute_takes_as_long_as_its_farthest_pair():
    torus = _torus(4, 4)
    pairs = ((0, 2), (2, 22))  # To the next chip; from (0, 1) to (2, 3), two links in each dim.
    assert _secs(torus, "collective-permute", pairs) == pytest.approx(_SIZE * 2 * 4 / _LINK)


def test_permutes_in_opposite_directions_do_not_share_links():
    ring = _torus(4, cores=1)
    up = ((0, 1), (1, 2), (2, 3), (3, 0))
    permutes = [
        Collective("collective-permute", _SIZE, up, times=1),
        Collective("collective-permute", _SIZE, _reversed(up), times=1, is_beside_reverse=True),
    ]
    assert sum(map(ring.collective_secs, permutes)) == pytest.approx(2 * _SIZE / _LINK)
    # A GPU sends both through one NVLink.
    host = Hosts(_H100, (0,) * 4)
    assert sum(map(host.collective_secs, permutes)) == pytest.approx(2 * _SIZE / 450e9)


def _reversed(pairs):
    return tuple((target, source) for source, target in pairs)


# Two slices of four chips of v5e; a chip's share of its host's adapters is 25 Gbit/s.
_V5E = GENERATIONS["v5e"]
_SLICE = Torus(_V5E, tuple((x, y) for x in range(2) for y in range(2)))
_TWO_SLICES = Slices(Torus(_V5E, 2 * _SLICE.places), (0,) * 4 + (1,) * 4)
_ACROSS = tuple((i, i + 4) for i in range(4))
_ADAPTER = 25e9 / 8


def _slices_secs(kind, groups):
    return _TWO_SLICES.collective_secs(Collective(kind, _SIZE, groups, times=1))


def test_between_slices_the_adapters_decide():
    # Each sends half of its part and gets the sum of the other half.
    assert _slices_secs("all-reduce", _ACROSS) == pytest.approx(_SIZE / _ADAPTER)
    assert _slices_secs("all-gather", _ACROSS) == pytest.approx(_SIZE / 2 / _ADAPTER)
    assert _slices_secs("reduce-scatter", _ACROSS) == pytest.approx(_SIZE / _ADAPTER)
    assert _slices_secs("all-to-all", _ACROSS) == pytest.approx(_SIZE / 2 / _ADAPTER)
    both_ways = (*_ACROSS, *_reversed(_ACROSS))
    assert _slices_secs("collective-permute", both_ways) == pytest.approx(_SIZE / _ADAPTER)


def test_within_a_slice_the_torus_decides():
    within = ((0, 1, 2, 3), (4, 5, 6, 7))
    for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all"):
        expected = _SLICE.collective_secs(Collective(kind, _SIZE, within[:1], times=1))
        assert _slices_secs(kind, within) == pytest.approx(expected)
    pairs = ((0, 1), (1, 0), (4, 5), (5, 4))
    expected = _SLICE.collective_secs(Collective("collective-permute", _SIZE, pairs[:2], times=1))
    assert _slices_secs("collective-permute", pairs) == pytest.approx(expected)


def test_a_group_over_all_slices_sends_a_share_of_each_slice():
    # A group has eight members; the four of each slice share the bytes that cross.
    all_partitions = (tuple(range(8)),)
    expected = 2 * _SIZE / 2 / 4 / _ADAPTER
    assert _slices_secs("all-reduce", all_partitions) == pytest.approx(expected)
    assert _slices_secs("all-to-all", all_partitions) == pytest.approx(_SIZE / 2 / _ADAPTER)


def test_adapters_are_shared_by_the_cores_of_a_chip():
    cores = Slices(Torus(_V3_WITH_ADAPTER, ((0, 0),) * 4), (0, 0, 1, 1))
    pairs = Collective("all-reduce", _SIZE, ((0, 2), (1, 3)), times=1)
    assert cores.collective_secs(pairs) == pytest.approx(2 * _SIZE / 1e9)


def _hosts(hosts, gpus):
    return Hosts(_H100, tuple(host for host in range(hosts) for _ in range(gpus)))


def _gpu_secs(network, kind, groups=None):
    groups = groups or (tuple(range(len(network.hosts))),)
    return network.collective_secs(Collective(kind, _SIZE, groups, times=1))


def test_within_a_host_nvlink_decides():
    host, nvlink = _hosts(1, 8), 450e9
    assert _gpu_secs(host, "all-to-all") == pytest.approx(_SIZE * 7 / 8 / nvlink)
    assert _gpu_secs(host, "all-gather") == pytest.approx(_SIZE * 7 / 8 / nvlink)
    assert _gpu_secs(host, "all-reduce") == pytest.approx(2 * _SIZE * 7 / 8 / nvlink)
    assert _gpu_secs(host, "reduce-scatter") == pytest.approx(_SIZE * 7 / nvlink)
    assert _gpu_secs(host, "collective-permute", ((0, 1), (1, 0))) == _SIZE / nvlink


def test_between_hosts_the_adapters_decide():
    cluster, adapter = _hosts(4, 8), 50e9
    # Each GPU sends 24 of its 32 parts to other hosts, and all 8 GPUs of a host fetch an eighth
    # each.
    assert _gpu_secs(cluster, "all-to-all") == pytest.approx(_SIZE * 24 / 32 / adapter)
    # 7/8 of the bytes by NVLink take longer than 3/4 of an eighth by the adapter, barely.
    assert _gpu_secs(cluster, "all-gather") == pytest.approx(_SIZE * 7 / 8 / 450e9)
    assert _gpu_secs(_hosts(64, 8), "all-gather") == pytest.approx(_SIZE * 63 / 64 / 8 / adapter)
    assert _gpu_secs(cluster, "collective-permute", ((0, 1), (7, 8))) == _SIZE / adapter


def test_groups_across_hosts_and_within_them():
    cluster = _hosts(2, 4)
    across = tuple((i, i + 4) for i in range(4))
    assert _gpu_secs(cluster, "all-reduce", across) == pytest.approx(_SIZE / 50e9)
    within = ((0, 1, 2, 3), (4, 5, 6, 7))
    assert _gpu_secs(cluster, "all-reduce", within) == pytest.approx(2 * _SIZE * 3 / 4 / 450e9)


def test_the_network_follows_the_topology(monkeypatch):
    monkeypatch.setattr(topology, "places", lambda name: ((0, 0), (0, 1), (1, 0), (1, 1)))
    network = networks.network("h100:2x2", Mesh.flat(4))
    assert network == Hosts(_H100, (0, 0, 1, 1))
    assert _H100.capacity_gib == pytest.approx(0.92 * 79.1, 1e-3)


def test_the_network_of_slices(monkeypatch):
    """Devices are in the order of the slices, and coordinates repeat in each."""
    monkeypatch.setattr(topology, "places", lambda name: 2 * _SLICE.places)
    network = networks.network("v5e:2x2x2slices", Mesh.flat(8))
    assert network == _TWO_SLICES and network.generation == _V5E
    # A mesh may put the slices on its inner axis.
    mixed = networks.network("v5e:2x2x2slices", Mesh(("d",), (8,), (0, 4, 1, 5, 2, 6, 3, 7)))
    assert mixed.slices == (0, 1) * 4
    assert networks.network("v5e:2x4", Mesh.flat(8)) == Torus(_V5E, 2 * _SLICE.places)


def test_slices_of_a_generation_without_a_published_rate_are_refused(monkeypatch):
    monkeypatch.setattr(topology, "places", lambda name: 2 * _PLACES)
    with pytest.raises(ValueError, match="v3:2x2x2slices: no rate is published for the network"):
        networks.network("v3:2x2x2slices", Mesh.flat(16))


def test_partitions_are_placed_by_the_mesh(monkeypatch):
    monkeypatch.setattr(topology, "places", lambda name: _PLACES)
    torus = networks.network("v3:2x2", Mesh(("d",), (8,), (7, 6, 5, 4, 3, 2, 0, 1)))
    assert torus.sizes == (2, 2)
    assert torus.places[:2] == (_PLACES[7], _PLACES[6]) and torus.places[6] == _PLACES[0]


def _device(kind, **attributes):
    return types.SimpleNamespace(device_kind=kind, process_index=0, **attributes)


def test_the_network_of_devices_at_hand():
    # A slice of TPUs in the middle of its pod, with two cores a chip.
    chips = [(x, y, 0) for x in (4, 5) for y in (2, 3)]
    cores = [_device("TPU v3", coords=chip) for chip in chips for _ in range(2)]
    torus = networks.of_devices(cores)
    assert torus == Torus(_V3, tuple((*place, 0) for place in _PLACES))
    assert _secs(torus, "all-to-all") == pytest.approx(_secs(Torus(_V3, _PLACES), "all-to-all"))

    # GPUs of two hosts, in one process.
    gpus = [_device("NVIDIA H100 80GB HBM3", slice_index=host) for host in (0, 0, 1, 1)]
    assert networks.of_devices(gpus) == Hosts(_H100, (0, 0, 1, 1))
    h200 = networks.of_devices([_device("NVIDIA H200", slice_index=0)])
    assert h200.generation == GENERATIONS["h200"]

    # A CPU lacks published figures, and an H100 with a different bus is a different machine.
    for kind in ("cpu", "NVIDIA H100 PCIe", "TPU v2"):
        assert networks.of_devices([_device(kind, slice_index=0, coords=(0, 0, 0))]) is None
