"""Training learns: a small MoE model finds the dictionary and the word order of a made-up language.

A target is its source's words in reverse order, each replaced through a fixed permutation of the
vocabulary. Without the source, no model's loss falls below the entropy of the target's words.
"""

import math

import numpy as np
import pytest

from lingvo_gshard.model.spec import Mode
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.train.programs import Programs
from params.experiment import TranslationExperiment
from tests.model import small_task
from tests.spmd import functions

_WORDS = np.arange(4, 12)  # Smaller ids are special.
_DICTIONARY = dict(zip(_WORDS.tolist(), np.roll(_WORDS, 3).tolist(), strict=True))
_ROWS = 32
_LENGTH = 3
_STEPS_PER_CALL = 20


class _Experiment(TranslationExperiment):
    NUM_LAYERS = 4
    MODEL_DIM = 16
    HIDDEN_DIM = 32
    NUM_HEADS = 2
    HEAD_DIM = 8
    NUM_EXPERTS = 4
    GROUP_SIZE = 28
    SOURCE_VOCAB_SIZE = TARGET_VOCAB_SIZE = 12
    BATCH_SIZE = _ROWS
    SOURCE_LEN = small_task.T
    TARGET_LEN = small_task.L
    MAX_STEPS = 80
    DECAY_START = 10
    DROPOUT = 0.0
    LABEL_SMOOTHING = 0.0
    LEARNING_RATE = 0.1


def _translation(source):
    return [_DICTIONARY[word] for word in reversed(source)]


def _batch(seed):
    sources = np.random.default_rng(seed).choice(_WORDS, (_ROWS, _LENGTH)).tolist()
    targets = [_translation(source) for source in sources]
    pairs = zip(sources, targets, strict=True)
    return small_task.batch_of([([source], [target]) for source, target in pairs])


@pytest.mark.slow
def test_the_loss_falls_far_below_the_entropy_of_the_words():
    p = _Experiment.params()
    p.task.encoder.num_layers = 1  # Dense, which halves the compilation. The decoder's has experts.
    parts = functions.partitioning(1)
    programs = Programs(TaskModel(p, parts), in_process=True)
    state = programs.initialize(seed=1)

    batch_spec = _batch(0).Transform(lambda x: functions.TensorSpec(x.shape, x.dtype.name, "BL"))
    train = programs.get(Mode.TRAIN, batch_spec, _STEPS_PER_CALL)
    nll = []
    for start in range(0, p.train.max_steps, _STEPS_PER_CALL):
        batches = [_batch(start + k) for k in range(_STEPS_PER_CALL)]
        leaves = zip(*(batch.Flatten() for batch in batches), strict=True)
        result = train(state, batches[0].Pack(map(np.stack, leaves)))
        state = result.state
        nll += np.asarray(result.metrics.nll).tolist()

    # Each target is _LENGTH uniform words and a certain end.
    entropy = math.log(len(_WORDS)) * _LENGTH / (_LENGTH + 1)
    assert nll[0] > entropy
    assert np.mean(nll[-5:]) < 0.1 * entropy
