"""Lingvo's dense language models and GLaM: 9 billion to 1.2 trillion weights on TPU v3 and v4.

These commands train one of them, or compile it for its machine without having one; each docstring
states the number of partitions:

    gshard train --model=lm.DenseLm128B16x16 --mode=train \
        --data_dir=DATA --logdir=RUN --num_partitions=512
    gshard plan model --model=lm.DenseLm128B16x16 --topology=v3:16x16 --programs=train \
        --out=PLAN

Lingvo's models are in lingvo/tasks/lm/params/synthetic_packed_input.py at commit e0be5dc4, with
expected rates in the comments. `plan_tables --table=lm` compares them with ours.
"""

from lingvo_gshard import registry
from lingvo_gshard.layers.activations import Activation
from lingvo_gshard.layers.norms import RMSNorm
from lingvo_gshard.layers.numerics import Remat
from lingvo_gshard.layers.positions import NoPositions, RelativeBias
from lingvo_gshard.layers.repeat import Layers
from lingvo_gshard.model.language_model import LanguageModelTask
from lingvo_gshard.optim.adamw import AdamW
from lingvo_gshard.train.config import TrainParams
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

    A layer is numbered like a slice of v3.
    """
    of_layer = rows_of_chips(columns, rows)
    cores = []
    for first in range(0, len(of_layer), 2):
        for layer in range(layers):
            cores += [layer * len(of_layer) + core for core in of_layer[first : first + 2]]
    return tuple(cores)


class DenseLm(LanguageModelExperiment):
    """Common to Lingvo's models: 2-D products, RMSNorm, relative biases, GEGLU, tied softmax.

    Activations [B, L, M] are split into blocks, rows over the mesh's axis x and M over y. Weights
    have M over x, and hidden dims, heads and vocabulary over y. In Lingvo, the embedding's table,
    which is also the softmax's, has V whole and M over y; here it is in smaller parts.

    As in Lingvo, an axis of the mesh is a row or a column of chips. Its meshes also use axes as
    rings on slices without wrap-around links; plans assume that the links exist.

    Lingvo does not scale the embedding's rows and divides logits by sqrt(M), with a table of
    standard deviation 1. Here the table's is 1/sqrt(M) and rows are multiplied by sqrt(M): this is
    the same function, and Adafactor's steps are relative to a weight's scale. The same holds for
    the scale of queries. Lingvo's z-loss, of weight 1e-4, is left out.
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

    def Task(self) -> LanguageModelTask.Params:
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
    """8.852 B weights in 4 layers on 8 partitions, v3:2x2. Lingvo does not state a rate."""

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
    """M=12288 without gates and relative biases, like GPT-3's layers.

    Lingvo learns the positions, a table [L, M] that is not among the weights here: these models use
    sinusoids.
    """

    MODEL_DIM = 12_288
    HIDDEN_DIM = 49_152
    NUM_HEADS = 96
    TARGET_LEN = 2048

    def Task(self) -> LanguageModelTask.Params:
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
    neighbors, and its 32 parts of heads, which 96 heads allow, run across them.
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

    def Optimizer(self) -> AdamW.Params:
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
    def _train(cls) -> TrainParams:
        return super()._train().Set(gradient_accumulation_steps=4)


@registry.register
class DenseLm12kWide162BAdam16x16(DenseLm12kWide41BAdam16x16):
    """174.342 B weights under Adam on 512 partitions, v3:16x16. Lingvo expects 12.5k tokens/s."""

    NUM_LAYERS = 96
    BATCH_SIZE = 64


@registry.register
class GLaM64B64E(DenseLm):
    """GLaM(64B/64E) of Du et al. (2021): 1.162 T weights on 2048 partitions, v4:8x8x16.

    The paper has 1.2 T weights, of which 96.6 B are used for a token. 256,000 pieces, gated dense
    layers and experts without a gate give that count. 280 B tokens took 574 hours on 1024 chips, or
    135.5k per second. The paper does not print its 2-D sharding as a mesh; here experts are split
    along x, into 64 parts.
    """

    NUM_LAYERS = 64
    MODEL_DIM = 8192
    HIDDEN_DIM = 32_768
    NUM_HEADS = 128
    NUM_EXPERTS: int | None = 64
    GROUP_SIZE = 1024  # A row: one-hot products cost S / H of the experts' products.
    VOCAB_SIZE = 256_000
    BATCH_SIZE = 1024  # The paper's 1M tokens, 2^20.
    TARGET_LEN = 1024
    MESH = "x:64,y:*"
    DEVICE_ASSIGNMENT = lines_of_chips(8, 8, 16)
    SHARDING = "BGE:x,M:y,weights.M:x,HNV:y"
    MAX_STEPS = 572_205  # 600 B tokens.

    def Task(self) -> LanguageModelTask.Params:
        """Returns the settings of the model and its loss, `task`."""
        p = super().Task()
        assert p.decoder.moe is not None  # NUM_EXPERTS is a number.
        p.decoder.moe.activation = Activation.GELU_TANH
        return p
