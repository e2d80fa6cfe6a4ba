"""Programs compiled for a TPU that nobody has at hand.

Where libtpu is not installed, those tests that need it hold its absence to its message instead.
"""

import importlib.util

import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.partitioning import TensorSpec
from lingvo_gshard.spmd import program, topology
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from tests.spmd import functions

_ABSENT = "topology v3:2x2: the TPU compiler is not installed; `make setup-tpu` installs libtpu"
_HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None
_EIGHT = functions.partitioning(8)


def test_the_compilers_absence_is_told(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=_ABSENT):
        topology.devices("v3:2x2")
    exported = program.export(functions.sgd_step(), _EIGHT)
    with pytest.raises(ValueError, match=_ABSENT):
        topology.compile_program(exported, "v3:2x2")


@pytest.mark.parametrize(
    "name", ["", "v3", "v3:8", "v3:0x2", "v3:2x2x2", "v4:4x4", "v1:2x2", "3:2"]
)
def test_an_unknown_name_lists_what_is_known(name):
    message = (
        f"topology '{name}' is unknown; known are v2:XxY, v3:XxY, v4:XxYxZ, .* v6e:XxY; v3:2x2"
    )
    with pytest.raises(ValueError, match=message):
        topology.devices(name)


def _moe_step(count: int) -> AnnotatedFn:
    """A group and an expert on each of `count` devices; Algorithm 2 and its gradient."""
    annotate = functions.partitioning(count).annotate

    def loss(weights: NestedMap, mask_GSEC: tf.Tensor, x_GSM: tf.Tensor) -> tf.Tensor:
        sent = annotate(tf.einsum("gsec,gsm->egcm", mask_GSEC, x_GSM), "EGCM")
        hidden = tf.nn.relu(tf.einsum("egcm,emh->egch", sent, weights.wi_EMH))
        # Without it the gradient is free to gather the experts' weights: from 128 devices on, with
        # sizes as small as these, XLA finds that cheaper than an all-to-all.
        hidden = annotate(hidden, "EGCH")
        back = annotate(tf.einsum("egch,ehm->gecm", hidden, weights.wo_EHM), "GECM")
        return tf.reduce_sum(tf.square(tf.einsum("gsec,gecm->gsm", mask_GSEC, back)))

    def fn(weights: NestedMap, batch: NestedMap) -> NestedMap:
        leaves = [*weights.Flatten(), batch.x_GSM]
        with tf.GradientTape() as tape:
            tape.watch(leaves)
            value = loss(weights, batch.mask_GSEC, batch.x_GSM)
        wi_EMH, wo_EHM, x_GSM = tape.gradient(value, leaves)
        return NestedMap(wi_EMH=wi_EMH, wo_EHM=wo_EHM, x_GSM=x_GSM)

    weights = NestedMap(
        wi_EMH=functions.f32((count, 16, 24), "EMH"), wo_EHM=functions.f32((count, 24, 16), "EHM")
    )
    mask = functions.f32((count, 8, count, 2), "GSEC")
    batch = NestedMap(mask_GSEC=mask, x_GSM=functions.f32((count, 8, 16), "GSM"))
    dims = {"wi_EMH": "EMH", "wo_EHM": "EHM", "x_GSM": "GSM"}
    return AnnotatedFn("moe", fn, ("weights", "batch"), (weights, batch), dims)


@pytest.mark.slow
def test_the_program_does_not_grow_with_the_topology():
    reports = []
    for num_partitions, name in ((8, "v3:2x2"), (128, "v3:8x8"), (2048, "v3:32x32")):
        parts = functions.partitioning(num_partitions)
        exported = program.export(_moe_step(num_partitions), parts)
        if not _HAS_LIBTPU:
            with pytest.raises(ValueError, match=f"topology {name}: the TPU compiler is not inst"):
                topology.compile_program(exported, name)
            continue
        reports.append(topology.compile_program(exported, name).report())
        ops = reports[-1].collective_ops
        assert [(op.kind, op.group_size) for op in ops] == [("all-to-all", num_partitions)] * 4
    sizes = [report.num_instructions for report in reports]
    assert len(sizes) == (3 if _HAS_LIBTPU else 0)
    assert max(sizes, default=1) < 1.5 * min(sizes, default=1)


@pytest.mark.slow
def test_a_topologys_program_is_read_and_not_run():
    exported = program.export(functions.moe_dispatch(_EIGHT), _EIGHT)
    if not _HAS_LIBTPU:
        with pytest.raises(ValueError, match=_ABSENT):
            topology.compile_program(exported, "v3:2x2")
        return
    compiled = topology.compile_program(exported, "v3:2x2")
    assert compiled.report().count("all-to-all") == 2
    assert "num_partitions=8" in compiled.as_text()
    trees = [functions.randoms(arg, 0) for arg in exported.args]
    with pytest.raises(ValueError, match="moe: compiled for a topology, it can be read but not"):
        compiled(*trees)
    with pytest.raises(ValueError, match="moe: compiled for a topology, it can be read but not"):
        compiled.place_arg("weights", trees[0])


@pytest.mark.slow
def test_what_a_topology_cannot_hold_is_refused():
    def huge(state: NestedMap) -> NestedMap:
        noise = tf.random.stateless_uniform([200, 10**5, 1000], [1, 2], alg="threefry")
        return NestedMap(y=noise + state.x)

    args = (NestedMap(x=TensorSpec((1000,), "float32", "_")),)
    exported = program.export(AnnotatedFn("huge", huge, ("state",), args), _EIGHT)
    sixteen = program.export(functions.sgd_step(), functions.partitioning(16))
    if not _HAS_LIBTPU:
        with pytest.raises(ValueError, match=_ABSENT):
            topology.compile_program(exported, "v3:2x2")
        return
    with pytest.raises(ValueError, match="program huge: RESOURCE_EXHAUSTED: .* exceeds available"):
        topology.compile_program(exported, "v3:2x2")
    with pytest.raises(ValueError, match="has 8 devices, but program sgd has 16 partitions"):
        topology.compile_program(sixteen, "v3:2x2")
    with pytest.raises(ValueError, match='"v3:3x3" is not divisible .*; known are v2:XxY'):
        topology.devices("v3:3x3")
