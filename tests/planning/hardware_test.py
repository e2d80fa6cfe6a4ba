"""Published figures, and the times of collectives on a torus against hand-worked ones."""

import pytest

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.hlo.collectives import Collective
from lingvo_gshard.planning import hardware
from lingvo_gshard.planning.hardware import GENERATIONS, Hosts, Torus
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.spmd import lowering, topology
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from tests.spmd import compilers

_V3, _H100 = GENERATIONS["v3"], GENERATIONS["h100"]
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


def test_the_generations_are_those_of_the_topologies():
    tpus, gpus = (
        {"v3", "v4", "v5e", "v5p", "v6e", "tpu7x"},
        {"a100", "h100", "h200", "b200", "gb200"},
    )
    assert set(GENERATIONS) == tpus | gpus
    assert hardware.generation("v3:32x32") is _V3
    assert _V3.peak_flops * 2 == 123e12 and _V3.link_bytes_per_sec == _LINK
    with pytest.raises(ValueError, match="v2:2x2: no published figures .* 'v2', only for v3, "):
        hardware.generation("v2:2x2")


@pytest.mark.parametrize(
    ("name", "all_reduce_bytes_per_sec", "chips", "links"),
    [
        *[("v3", 340e12, 1024, 4), ("v4", 1.1e15, 4096, 6)],
        *[("v5e", 51.2e12, 256, 4), ("v6e", 102.4e12, 256, 4)],
    ],
)
def test_links_agree_with_the_published_all_reduce_bandwidth_of_a_pod(
    name, all_reduce_bytes_per_sec, chips, links
):
    """The same pages give pods' bandwidth, counting each link once; v4's is a tenth lower."""
    link = all_reduce_bytes_per_sec / chips / links
    assert GENERATIONS[name].link_bytes_per_sec == pytest.approx(link, rel=0.12)


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


def test_cores_of_one_chip_use_no_link():
    torus = _torus(4)
    pairs = tuple((2 * i, 2 * i + 1) for i in range(4))
    assert _secs(torus, "all-reduce", pairs) == _secs(torus, "all-to-all", pairs) == 0.0


def test_a_permute_takes_as_long_as_its_farthest_pair():
    torus = _torus(4, 4)
    pairs = ((0, 2), (2, 22))  # To the next chip; from (0, 1) to (2, 3), two links in each dim.
    assert _secs(torus, "collective-permute", pairs) == pytest.approx(_SIZE * 2 * 4 / _LINK)


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
    # Of each GPU's 32 parts 24 go to other hosts, and all 8 GPUs of a host fetch an eighth each.
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


def test_the_network_is_that_of_the_topology(monkeypatch):
    monkeypatch.setattr(topology, "places", lambda name: ((0, 0), (0, 1), (1, 0), (1, 1)))
    network = hardware.network("h100:2x2", Mesh.flat(4))
    assert network == Hosts(_H100, (0, 0, 1, 1))
    assert _H100.capacity_gib == pytest.approx(0.92 * 79.1, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cores"),
    [
        *[("v3:2x2", 8), ("v4:2x2x1", 8), ("v5e:2x2", 4)],
        *[("v5p:2x2x1", 4), ("v6e:2x2", 4), ("tpu7x:2x2x1", 8)],
    ],
)
def test_the_compilers_own_rates_and_capacity(name, cores):
    """The rates in XLA's optimal_seconds, and the memory that it leaves to a program."""
    compilers.need(name)
    generation = hardware.generation(name)
    assert len(topology.places(name)) == cores
    parts = Partitioning(Mesh.flat(cores), ())
    # Smaller operands partly fit in on-chip memory and are copied there first.
    square = TensorSpec((8192, 8192), "float32", "__")
    args = (NestedMap(a=square, b=square),)

    def compiled(fn):
        return topology.compile_program(
            lowering.export(AnnotatedFn("one", fn, ("args",), args), parts), name
        ).report()

    product = compiled(lambda args: NestedMap(y=args.a @ args.b))
    assert product.flops / product.optimal_secs == pytest.approx(generation.xla_peak_flops, 1e-3)
    total = compiled(lambda args: NestedMap(y=args.a + args.b))
    assert total.accessed_bytes / total.optimal_secs == pytest.approx(
        generation.xla_memory_bytes_per_sec, 1e-3
    )
