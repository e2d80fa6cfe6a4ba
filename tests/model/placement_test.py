"""The placement of experiments on devices."""

import pytest

from lingvo_gshard import registry
from lingvo_gshard.model import placement
from xla_spmd.mesh import Mesh


def _params(*settings, model="toy.MoE8E4L"):
    vocabularies = ("task.source_vocab_size=4000", "task.target_vocab_size=2000")
    return registry.get_params(model, (*vocabularies, *settings))


def test_a_dense_model_has_no_experts_to_divide():
    p = _params("input.batch_size=32", model="toy.Dense4L")
    placement.check_divisible(p, placement.partitioning(p, 16))


def test_experts_are_copied_if_there_are_fewer_than_partitions():
    p = _params("task.encoder.moe.num_experts=4", "task.decoder.moe.group_size=64")
    parts = placement.partitioning(p, 8)
    placement.check_divisible(p, parts)
    assert (parts.factor("EMH"), parts.factor("BLM")) == ((4, 1, 1), (8, 1, 1))
    assert parts.factor("EGCM") == (4, 2, 1, 1)
    assert placement.partitioning(p, 4).mesh == Mesh.flat(4)
    parts = placement.partitioning(p.Set(mesh="r:*", sharding="BGE:r"), 8)
    assert parts.mesh.axis_names == ("copies", "r") and parts.factor("EGCM") == (4, 2, 1, 1)


def test_a_stack_may_have_separate_rows():
    p = _params("mesh=d:4,m:2", "sharding=BGE:d,HN:m,encoder.BG:d+m,encoder.HN:-")
    parts = placement.partitioning(p, 8)
    placement.check_divisible(p, parts)
    with pytest.raises(ValueError, match="8 .* and m, .* divide in the encoder, decode.batch_size"):
        placement.check_divisible(p.Copy().Set(**{"decode.batch_size": 4}), parts)
    with pytest.raises(ValueError, match="no stack 'coder'; rows may be for encoder, decoder or w"):
        placement.partitioning(p.Set(sharding="coder.B:d"), 8)


@pytest.mark.parametrize("row", ["Q:d", "BGE:d,weights.X:d", "encoder.q:d"])
def test_a_letter_without_a_tensor_is_refused(row):
    letter = row[-3]
    message = rf"sharding={row}: no tensor of the model has a dim {letter}; its dims are B, C, D, E"
    with pytest.raises(ValueError, match=message):
        placement.partitioning(_params(f"sharding={row}"), 4)


def test_num_weights_needs_no_memory():
    p = _params("task.encoder.moe.num_experts=100000")
    assert placement.num_weights(p) > 100000 * 2 * p.task.dim * p.task.encoder.moe.hidden_dim


def test_groups_stay_within_a_microbatch():
    p = _params("task.encoder.stages=2", "task.encoder.microbatches=4")
    assert placement.num_groups(p) == {"encoder": 32 * 64 // 4 // 128, "decoder": 32 * 48 // 128}
    assert placement.bubble(p) == 1 / 5 and placement.bubble(_params()) == 0


def test_groups_make_up_the_batches_of_evaluation_too():
    p = _params("eval_input.batch_size=8", "eval_input.source_len=20")
    message = r"^eval_input: task.encoder.moe.group_size 128 does not divide the batch's 160 tokens"
    with pytest.raises(ValueError, match=message):
        placement.check_divisible(p, placement.partitioning(p, 8))


def test_either_stack_may_be_the_only_one_with_experts():
    p = _params("task.decoder.moe.num_experts=6")
    for encoder in (p.task.encoder.moe, None):
        p.task.encoder.moe = encoder
        placement.check_sizes(p, placement.partitioning(p, 4))
        with pytest.raises(ValueError, match="4 .* do not divide task.decoder.moe.num_experts = 6"):
            placement.check_divisible(p, placement.partitioning(p, 4))


@pytest.mark.parametrize(
    ("num_partitions", "setting", "message"),
    [
        (
            8,
            "input.batch_size=30",
            "The 8 partitions along mesh axis d, .* divide input.batch_size = 30",
        ),
        (4, "decode.batch_size=6", "do not divide decode.batch_size = 6"),
        (4, "task.encoder.moe.group_size=1024", "do not divide the encoder's groups .* = 2"),
        (4, "task.decoder.moe.group_size=768", "do not divide the decoder's groups .* = 2"),
    ],
)
def test_a_search_takes_even_sizes_and_a_run_takes_any(num_partitions, setting, message):
    p = _params("task.encoder.moe.group_size=64", "task.decoder.moe.group_size=48", setting)
    parts = placement.partitioning(p, num_partitions)
    placement.check_sizes(p, parts)
    with pytest.raises(ValueError, match=message):
        placement.check_divisible(p, parts)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("input.batch_size=0", "input: task.encoder.moe.group_size: a batch of 0 rows"),
        ("input.source_len=0", "a batch of 32 rows of 0 tokens has no groups"),
        ("task.encoder.moe.train_capacity.factor=0.0", "Capacity: factor must be above 0, got 0.0"),
    ],
)
def test_sizes_without_a_group_are_refused(setting, message):
    p = _params("task.encoder.moe.group_size=None", setting)
    with pytest.raises(ValueError, match=message):
        placement.check_divisible(p, placement.partitioning(p, 8))


def test_the_dispatch_is_named_once_or_by_stack():
    assert placement.dispatch(_params()) == "EINSUM"
    assert placement.dispatch(_params(model="toy.MoE8E4LGather")) == "GATHER"
    mixed = _params("task.decoder.moe.dispatch=RAGGED")
    assert placement.dispatch(mixed) == "EINSUM (encoder), RAGGED (decoder)"
    assert placement.dispatch(_params(model="toy.Dense4L")) is None
