"""How experiments lie on devices."""

from lingvo_gshard import registry
from lingvo_gshard.model import placement
from lingvo_gshard.sharding.mesh import Mesh


def _params(*settings, model="toy.MoE8E4L"):
    vocabularies = ("task.source_vocab_size=4000", "task.target_vocab_size=2000")
    return registry.get_params(model, (*vocabularies, *settings))


def test_a_dense_model_has_no_experts_to_divide():
    p = _params("input.batch_size=32", model="toy.Dense4L")
    placement.check_divisible(p, placement.partitioning(p, 16))


def test_of_fewer_experts_than_partitions_there_are_copies():
    p = _params("task.encoder.moe.num_experts=4", "task.decoder.moe.group_size=64")
    parts = placement.partitioning(p, 8)
    placement.check_divisible(p, parts)
    assert (parts.factor("EMH"), parts.factor("BLM")) == ((4, 1, 1), (8, 1, 1))
    assert parts.factor("EGCM") == (4, 2, 1, 1)
    assert placement.partitioning(p, 4).mesh == Mesh.flat(4)


def test_num_weights_needs_no_memory():
    p = _params("task.encoder.moe.num_experts=100000")
    assert placement.num_weights(p) > 100000 * 2 * p.task.dim * p.task.encoder.moe.hidden_dim
