"""Lingvo's dense language models and GLaM: 9 billion to 1.2 trillion weights on TPU v3 and v4.

This trains one of them, or compiles it for its machine without one; the docstring of each states
its number of partitions:

    python -m lingvo_gshard.trainer --model=lm.DenseLm128B16x16 --mode=train \
        --data_dir=DATA --logdir=RUN --num_partitions=512
    python -m lingvo_gshard.plan --model=lm.DenseLm128B16x16 --topology=v3:16x16 --programs=train \
        --out=PLAN

Lingvo's are those of lingvo/tasks/lm/params/synthetic_packed_input.py at commit e0be5dc4, with the
rates that its comments expect. `plan --table=lm` has both beside each other.
"""

from lingvo_gshard import registry
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.layers.activations import Activation
from lingvo_gshard.layers.norms import RMSNorm
from lingvo_gshard.layers.positions import NoPositions, RelativeBias
from lingvo_gshard.layers.repeat import Layers, Remat
from lingvo_gshard.optim.adamw import AdamW
from params.language_model import LanguageModelExperiment


def rows_of_chips(columns: int, rows: int) -> tuple[int, ...]:
    """Returns the cores of a TPU v3 slice row by row, for a mesh whose axes are rows and columns.

    JAX counts devices host by host, and a host has 2 x 2 chips of two cores each.
    """
    cores = []
    for row in range(rows):
        for column in range(columns):
            host = row // 2 * (columns // 2) + column // 2
            chip = 4 * host + 2 * (row % 2) + column % 2
            cores += [2 * chip, 2 * chip + 1]
    return tuple(cores)


def lines_of_chips(columns: int, rows: int, layers: int) -> tuple[int, ...]:
    """Returns the cores of a TPU v4 slice line by line across its layers.

    A layer is numbered as a slice of v3 is.
    """
    of_layer = rows_of_chips(columns, rows)
    cores = []
    for first in range(0, len(of_layer), 2):
        for layer in range(layers):
            cores += [layer * len(of_layer) + core for core in of_layer[first : first + 2]]
    return tuple(cores)


class DenseLm(LanguageModelExperiment):
    """What Lingvo's models share: 2-D products, RMSNorm, relative biases, GEGLU, tied softmax.

    Activations [B, L, M] lie in blocks, rows over the mesh's axis x and M over y; weights have M
    over x, and hidden dims, heads and vocabulary over y. Lingvo's table of the embedding, which is
    also the softmax's, has a whole V and M over y instead; this one is in smaller parts.

    As in Lingvo, an axis of the mesh is a row or a column of chips. Its meshes also bend into rings
    on slices without wrap-around links, of which plans assume that they have them.

    Lingvo multiplies rows of the embedding by nothing and divides logits by sqrt(M), with a table
    of standard deviation 1. Here the table's is 1/sqrt(M) and rows are multiplied by sqrt(M): the
    same function, and Adafactor's steps are relative to a weight's scale. The same holds for the
    scale of queries. Its z-loss, of weight 1e-4, is left out.
    """

    HEAD_DIM = 128
    NUM_EXPERTS: int | None = None
    VOCAB_SIZE = 32_000
    TIED_SOFTMAX = True
    DROPOUT = 0.0

    ACTIVATION_DTYPE = "bfloat16"
    LAYERS_AS = Layers.LOOP
    # Lingvo leaves the choice of what to recompute to its compiler.
    REMAT = Remat.BLOCK
    SHARDING = "B:x,M:y,weights.M:x,HNV:y"

    DECODE_BATCH_SIZE = 64
    MAX_STEPS = 2_000_000

    def Task(self) -> Params:
        """Returns the settings of the model and its loss, `task`."""
        p = super().Task()
        p.embedding.sinusoids = False
        p.decoder.layer.norm = RMSNorm.Params()
        p.decoder.layer.attention.positions = RelativeBias.Params()
        p.decoder.dense.Set(activation=Activation.GELU_TANH, gated=True)
        return p


@registry.register
class DenseLm128B8x8(DenseLm):
    """137.702 B weights on 128 partitions, v3:8x8. Lingvo expects 3.7k tokens/s."""

    NUM_LAYERS = 64
    MODEL_DIM = 8192
    HIDDEN_DIM = 65_536
    NUM_HEADS = 128
    BATCH_SIZE = 16
    TARGET_LEN = 1024
    MESH = "x:8,y:*"
    DEVICE_ASSIGNMENT: tuple[int, ...] | None = rows_of_chips(8, 8)


@registry.register
class DenseLm8B2x2(DenseLm128B8x8):
    """8.852 B weights in 4 layers on 8 partitions, v3:2x2. Lingvo states no rate."""

    NUM_LAYERS = 4
    MESH = "x:1,y:*"
    DEVICE_ASSIGNMENT = None


@registry.register
class DenseLm128B16x16(DenseLm128B8x8):
    """137.702 B weights on 512 partitions, v3:16x16. Lingvo expects 18k tokens/s."""

    BATCH_SIZE = 128
    MESH = "x:16,y:*"
    DEVICE_ASSIGNMENT = rows_of_chips(16, 16)


@registry.register
class DenseLm128B32x32(DenseLm128B8x8):
    """137.702 B weights on 2048 partitions, v3:32x32. Lingvo expects 62k tokens/s."""

    BATCH_SIZE = 512
    MESH = "x:32,y:*"
    DEVICE_ASSIGNMENT = rows_of_chips(32, 32)


@registry.register
class DenseLm1T16x16(DenseLm128B16x16):
    """1.100 T weights on 512 partitions, v3:16x16. Lingvo expects 1.4k tokens/s."""

    NUM_LAYERS = 128
    MODEL_DIM = 16_384
    HIDDEN_DIM = 131_072
    NUM_HEADS = 256
    BATCH_SIZE = 16
    TARGET_LEN = 512


class _Wide(DenseLm):
    """M=12288 without gates and relative biases, as GPT-3's layers.

    Lingvo learns its positions, a table [L, M] that is not among the weights here: these are
    sinusoids.
    """

    MODEL_DIM = 12_288
    HIDDEN_DIM = 49_152
    NUM_HEADS = 96
    TARGET_LEN = 2048

    def Task(self) -> Params:
        """Returns the settings of the model and its loss, `task`."""
        p = super().Task()
        p.embedding.sinusoids = True
        p.decoder.layer.attention.positions = NoPositions.Params()
        p.decoder.dense.Set(activation=Activation.RELU, gated=False)
        return p


@registry.register
class DenseLm175B32x32(_Wide):
    """174.342 B weights on 2048 partitions, v3:32x32. Lingvo expects 51.53k tokens/s.

    Lingvo caps the logits of attention at 50 by a tanh, which is left out. Its 64 parts of rows are
    neighbours, and its 32 parts of heads, which 96 heads allow, lie across them.
    """

    NUM_LAYERS = 96
    BATCH_SIZE = 1024
    MESH = "y:32,x:*"
    DEVICE_ASSIGNMENT = rows_of_chips(32, 32)


@registry.register
class DenseLm12kWide41BAdam16x16(_Wide):
    """43.880 B weights under Adam on 512 partitions, v3:16x16. Lingvo expects 53.8k tokens/s."""

    NUM_LAYERS = 24
    BATCH_SIZE = 256
    MESH = "x:16,y:*"
    DEVICE_ASSIGNMENT = rows_of_chips(16, 16)

    def Optimizer(self) -> Params:
        """Returns the settings of the optimizer and its learning rate, `optimizer`."""
        schedule = super().Optimizer().schedule
        return AdamW.Params().Set(schedule=schedule, epsilon=1e-6, weight_decay=0.0)


@registry.register
class DenseLm12kWide41BAdam8x8(DenseLm12kWide41BAdam16x16):
    """43.880 B weights under Adam on 128 partitions, v3:8x8. Lingvo expects 17.4k tokens/s.

    As in Lingvo, the gradients of four parts of the batch are added up.
    """

    MESH = "x:8,y:*"
    DEVICE_ASSIGNMENT = rows_of_chips(8, 8)

    @classmethod
    def _train(cls) -> Params:
        return super()._train().Set(gradient_accumulation_steps=4)


@registry.register
class DenseLm12kWide162BAdam16x16(DenseLm12kWide41BAdam16x16):
    """174.342 B weights under Adam on 512 partitions, v3:16x16. Lingvo expects 12.5k tokens/s."""

    NUM_LAYERS = 96
    BATCH_SIZE = 64


@registry.register
class GLaM64B64E(DenseLm):
    """GLaM(64B/64E) of Du et al. (2021): 1.162 T weights on 2048 partitions, v4:8x8x16.

    The paper has 1.2 T, of which 96.6 B are used for a token. That count is met by 256,000 pieces,
    gated dense layers and experts without a gate. 280 B tokens took 574 hours on 1024 chips, 135.5k
    a second. Its 2-D sharding is not printed as a mesh; here experts lie along x, in 64 parts.
    """

    NUM_LAYERS = 64
    MODEL_DIM = 8192
    HIDDEN_DIM = 32_768
    NUM_HEADS = 128
    NUM_EXPERTS: int | None = 64
    GROUP_SIZE = 1024  # A row: one-hot products cost S / H of the experts'.
    VOCAB_SIZE = 256_000
    BATCH_SIZE = 1024  # The paper's 1M tokens, 2^20.
    TARGET_LEN = 1024
    MESH = "x:64,y:*"
    DEVICE_ASSIGNMENT = lines_of_chips(8, 8, 16)
    SHARDING = "BGE:x,M:y,weights.M:x,HNV:y"
    MAX_STEPS = 572_205  # 600 B tokens.

    def Task(self) -> Params:
        """Returns the settings of the model and its loss, `task`."""
        p = super().Task()
        p.decoder.moe.activation = Activation.GELU_TANH
        return p
