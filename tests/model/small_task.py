"""A translation task small enough to compile in seconds, its experiment, and packed batches.

B batch, T source length, L target length.
"""

from __future__ import annotations

import numpy as np

from lingvo_gshard.core.hyperparams import InstantiableParams
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.model.translation import TranslationTask
from params.experiment import TranslationExperiment
from tests.layers import building
from tests.spmd import functions

B, T, L = 8, 6, 7
SOURCE_VOCAB = 19
TARGET_VOCAB = 23
M, H, N, D, E = 8, 10, 2, 3, 8
_EOS = 2


class Experiment(TranslationExperiment):
    """An experiment of the task's size."""

    NUM_LAYERS = 4
    MODEL_DIM = M
    HIDDEN_DIM = H
    NUM_HEADS = N
    HEAD_DIM = D
    NUM_EXPERTS = E
    GROUP_SIZE = 12
    SOURCE_VOCAB_SIZE = SOURCE_VOCAB
    TARGET_VOCAB_SIZE = TARGET_VOCAB
    BATCH_SIZE = B
    SOURCE_LEN = T
    TARGET_LEN = L
    MAX_STEPS = 4
    DECAY_START = 10


def task_params(dropout: float = 0.2) -> InstantiableParams:
    """MoE(8E, 4L) with a few thousand weights."""
    p = TranslationTask.Params().Set(
        source_vocab_size=SOURCE_VOCAB,
        target_vocab_size=TARGET_VOCAB,
        dim=M,
        label_smoothing=0.1,
        aux_loss_weight=0.01,
    )
    p.input_dropout.rate = dropout

    for stack, group_size in ((p.encoder, T), (p.decoder, L)):
        stack.Set(dim=M, num_layers=2)
        stack.dense.hidden_dim = H
        stack.layer.attention.Set(num_heads=N, head_dim=D)
        stack.layer.attention.dropout.rate = dropout
        stack.layer.residual_dropout.rate = dropout
        stack.moe.Set(hidden_dim=H, num_experts=E, group_size=group_size)
    return p


def _row(sources: list[list[int]], targets: list[list[int]]) -> dict[str, np.ndarray]:
    """Packs pairs, given without EOS, into one row."""
    row: dict[str, list[int]] = {}

    def put(name: str, values) -> None:
        row.setdefault(name, []).extend(values)

    # Segments count from 1; the labels are the target shifted left by its BOS.
    for segment, (source, target) in enumerate(zip(sources, targets, strict=True), 1):
        for side, ids in (("source", [*source, _EOS]), ("target", [1, *target])):
            put(f"{side}_ids", ids)
            put(f"{side}_segment_ids", [segment] * len(ids))
            put(f"{side}_positions", range(len(ids)))
        put("target_labels", [*target, _EOS])
        put("target_weights", [1] * (len(target) + 1))

    widths = {name: T if name.startswith("source") else L for name in row}
    return {
        name: np.pad(np.array(values, np.int32), (0, widths[name] - len(values)))
        for name, values in row.items()
    }


def batch_of(rows: list[tuple[list[list[int]], list[list[int]]]]) -> NestedMap:
    """A batch of rows, each a list of sources and a list of targets."""
    packed = [_row(sources, targets) for sources, targets in rows]
    arrays = {name: np.stack([row[name] for row in packed]) for name in packed[0]}

    weights = arrays.pop("target_weights").astype("float32")
    labels = NestedMap(target_labels=arrays.pop("target_labels"), target_weights=weights)
    return NestedMap(features=NestedMap(arrays), labels=labels)


def random_batch(seed: int) -> NestedMap:
    """Rows of one or two pairs, with padding in most."""
    rng = np.random.default_rng(seed)

    def words(count: int, size: int) -> list[int]:
        return rng.integers(4, size, count).tolist()

    rows = []
    for row in range(B):
        # The lengths of source and target of each pair.
        if row % 2 == 0:
            pairs = [(int(rng.integers(1, T)), int(rng.integers(1, L)))]
        else:
            pairs = [(2, 3), (1, 1)]
        sources = [words(source_len, SOURCE_VOCAB) for source_len, _ in pairs]
        targets = [words(target_len, TARGET_VOCAB) for _, target_len in pairs]
        rows.append((sources, targets))

    return batch_of(rows)


def source_batch(seed: int, pad_last: bool = False) -> NestedMap:
    """The features of one sentence of 1 to T tokens in each row; the last row may be padding."""
    rng = np.random.default_rng(seed)
    valid = np.arange(T) < rng.integers(1, T + 1, (B, 1))
    valid[-1] &= not pad_last
    ids = rng.integers(4, SOURCE_VOCAB, (B, T))
    return NestedMap(
        source_ids=(ids * valid).astype(np.int32),
        source_segment_ids=valid.astype(np.int32),
        source_positions=np.tile(np.arange(T, dtype=np.int32), (B, 1)),
    )


def batch_specs() -> NestedMap:
    """The TensorSpecs of random_batch."""
    return random_batch(0).Transform(lambda x: functions.TensorSpec(x.shape, x.dtype.name, "BL"))


def start_state(model) -> NestedMap:
    """Returns the state of a TaskModel before its first step, with random weights."""
    return NestedMap(
        step=np.int32(0),
        theta=building.random_theta(model.task),
        slots=model.state_spec.slots.Transform(lambda spec: np.zeros(spec.shape, np.float32)),
    )
