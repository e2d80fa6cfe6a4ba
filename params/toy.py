"""Models that train on a CPU in minutes. Weights are counted with vocabularies of 4000 and 2000.

This command trains one of them; each docstring states the number of partitions:

    gshard train --model=toy.MoE8E4L --mode=train_and_eval \
        --data_dir=DATA --logdir=RUN --num_partitions=4
"""

from lingvo_gshard import registry
from lingvo_gshard.layers.dispatch import Dispatch
from lingvo_gshard.layers.repeat import Layers
from params.experiment import TransformerExperiment, TranslationExperiment
from params.language_model import LanguageModelExperiment


class Small(TransformerExperiment):
    """The common numbers of the small models of both tasks."""

    NUM_LAYERS = 4
    MODEL_DIM = 128
    HIDDEN_DIM = 512
    NUM_HEADS = 4
    HEAD_DIM = 32
    NUM_EXPERTS: int | None = 8
    GROUP_SIZE = 128
    DISPATCH = Dispatch.GATHER  # Faster on a CPU than EINSUM; see bench/moe_layer.py.
    PRODUCT_DTYPE = "auto"
    DROPOUT = 0.05
    BATCH_SIZE = 32
    MAX_STEPS = 2000
    ITERATIONS_PER_LOOP = 20
    SAVE_CHECKPOINTS_STEPS = 500
    DECAY_START = 2500
    RAMP_UP_STEPS = 100
    COOL_DOWN_STEPS = 1000


@registry.register
class MoE8E4L(Small, TranslationExperiment):
    """MoE(8E, 4L): 3.78 M weights on 4 partitions, the model of `make demo`.

    It dispatches tokens by the einsum of Algorithm 2, like the paper's models in m4.
    """

    DISPATCH = Dispatch.EINSUM
    SOURCE_LEN = 64
    TARGET_LEN = 48


@registry.register
class MoE8E4LGather(MoE8E4L):
    """MoE8E4L dispatching by indices, faster on a CPU: 3.78 M weights on 4 partitions."""

    DISPATCH = Dispatch.GATHER


@registry.register
class MoE8E8L(MoE8E4LGather):
    """MoE(8E, 8L), M=256: 24.09 M weights on 2 partitions; `make bench` times its step."""

    NUM_LAYERS = 8
    MODEL_DIM = 256
    HIDDEN_DIM = 1024
    HEAD_DIM = 64
    GROUP_SIZE = 64  # Dispatch and combine cost 4 * S * M flops per token.
    DROPOUT = 0.1
    BATCH_SIZE = 64
    TARGET_LEN = 64


@registry.register
class MoE8E12L(MoE8E4LGather):
    """MoE(8E, 12L), the depth of the paper's shallow models: 9.30 M weights on 4 partitions."""

    NUM_LAYERS = 12
    LAYERS_AS = Layers.LOOP


@registry.register
class MoE8E36L(MoE8E12L):
    """MoE(8E, 36L), the depth of its deep models: 25.84 M weights on 4 partitions."""

    NUM_LAYERS = 36


@registry.register
class Dense4L(MoE8E4L):
    """T(4L): 1.94 M weights on 4 partitions, MoE8E4L with dense layers in place of its experts."""

    NUM_EXPERTS = None


@registry.register
class LmMoE8E4L(Small, LanguageModelExperiment):
    """A language model, MoE(8E, 4L): 3.65 M weights on 4 partitions."""

    TARGET_LEN = 128


@registry.register
class LmDense4L(LmMoE8E4L):
    """The dense twin of LmMoE8E4L: 2.07 M weights on 4 partitions.

    A token costs as much as in LmMoE8E4L, where every other layer uses two experts of 512 units for
    it: 768 on average.
    """

    NUM_EXPERTS = None
    HIDDEN_DIM = 768
