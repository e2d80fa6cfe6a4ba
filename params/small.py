"""Models for real text on a CPU. Weights are counted with vocabularies of 8000 and 5000.

This command trains one of them; each docstring states the number of partitions:

    gshard train --model=small.MoE8E6L --mode=train_and_eval \
        --data_dir=DATA --logdir=RUN --num_partitions=2
"""

from lingvo_gshard import registry
from lingvo_gshard.layers.repeat import Layers
from params import toy


@registry.register
class MoE8E6L(toy.MoE8E4LGather):
    """MoE(8E, 6L), M=128: 5.52 M weights on 2 partitions, half an hour on captions."""

    NUM_LAYERS = 6
    GROUP_SIZE = 256
    DROPOUT = 0.2
    EXPERT_DROPOUT = 0.3
    BATCH_SIZE = 64
    TARGET_LEN = 64
    MAX_STEPS = 5800
    DECAY_START = 4000
    RAMP_UP_STEPS = 200
    COOL_DOWN_STEPS = 2900


@registry.register
class MoE8E6LLong(MoE8E6L):
    """MoE(8E, 6L) for long sentences, as in the Bible: 5.52 M weights on 2 partitions."""

    DROPOUT = 0.1
    EXPERT_DROPOUT = 0.0
    BATCH_SIZE = 32
    # Many languages share 8000 pieces: a source token makes 0.54 English tokens (report.md).
    SOURCE_LEN = 176
    TARGET_LEN = 96
    MAX_STEPS = 2000
    DECAY_START = 2500
    COOL_DOWN_STEPS = 1000


@registry.register
class Dense6LLong(MoE8E6LLong):
    """T(6L), 3.94 M weights on 2 partitions: a token costs as much as in MoE8E6LLong."""

    NUM_EXPERTS = None
    HIDDEN_DIM = 680


@registry.register
class MoE32E12L(MoE8E6LLong):
    """MoE(32E, 12L), M=128, with longer rows, too: 29.47 M weights on 2 partitions."""

    NUM_LAYERS = 12
    NUM_EXPERTS = 32
    LAYERS_AS = Layers.LOOP
