"""The published figures against each other and against the compilers' figures."""

import pytest

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.plans import topology_executable
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.spmd import lowering
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from tests.xla_spmd import compilers
from xla_plan.machines import hardware, topology
from xla_plan.machines.hardware import GENERATIONS
from xla_spmd.mesh import Mesh

_V3 = GENERATIONS["v3"]
_LINK = 82e9


def test_the_generations_have_their_figures():
    tpus = {"v3", "v4", "v5e", "v5p", "v6e", "tpu7x"}
    gpus = {"a100", "h100", "h200", "b200", "gb200", "b300", "gb300"}
    assert set(GENERATIONS) == tpus | gpus
    assert hardware.generation("v3:32x32") is _V3
    assert _V3.peak_flops * 2 == 123e12 and _V3.link_bytes_per_sec == _LINK
    with pytest.raises(ValueError, match="v2:2x2: no published figures .* 'v2', only for v3, "):
        hardware.generation("v2:2x2")


def test_a_gpu_multiplies_int32_without_its_tensor_cores():
    assert GENERATIONS["h100"].rate("int32") == GENERATIONS["h100"].rate("f32 highest")


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
        return topology_executable.compile_program(
            lowering.export(AnnotatedFn("one", fn, ("args",), args), parts), name
        ).report()

    product = compiled(lambda args: NestedMap(y=args.a @ args.b))
    assert product.flops / product.optimal_secs == pytest.approx(generation.xla_peak_flops, 1e-3)
    total = compiled(lambda args: NestedMap(y=args.a + args.b))
    assert total.accessed_bytes / total.optimal_secs == pytest.approx(
        generation.xla_memory_bytes_per_sec, 1e-3
    )
