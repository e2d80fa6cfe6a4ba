"""The paper's multilingual family (sections 4.3 and A.2, Tables 1 and 3): 100 languages to English.

These commands train one of them, or compile it for a TPU topology without a TPU; each docstring
states the number of partitions:

    gshard train --model=m4.MoE2048E36L --mode=train_and_eval \
        --data_dir=DATA --logdir=RUN --num_partitions=2048
    gshard plan model --model=m4.MoE2048E36L --topology=v3:32x32 --out=PLAN
"""

from lingvo_gshard import registry
from lingvo_gshard.layers.numerics import Remat
from lingvo_gshard.layers.repeat import Layers
from lingvo_gshard.layers.stack import TransformerStack
from params.experiment import TranslationExperiment


class M4(TranslationExperiment):
    """The numbers shared by the family (A.2).

    Labels are smoothed by 0.1, as in all experiments here; A.2 does not mention smoothing.
    """

    MODEL_DIM = 1024
    HIDDEN_DIM = 8192
    NUM_HEADS = 16
    HEAD_DIM = 128

    # Section 3.1: on D cores the number of groups G is O(D), and S is O(1). With 512 and 2048
    # experts, a core has 2048 tokens: one group. With 128 experts it has 8192: four groups of the
    # same size, so that the models differ only in experts and layers. One-hot products then cost
    # S / H, a quarter, of the experts' products; in a single group of 8192 they would cost as much.
    GROUP_SIZE = 2048
    # 2S/E is 32 with 128 experts, 8 with 512 and 2 with 2048. However well experts are balanced,
    # two places lose 5 % of all tokens and 10 % of the first choices, and four lose 0.1 % and 0.4 %
    # (`plan_tables --table=capacity`). The price is that 2048 experts compute twice as many rows
    # for each token, at least half of them empty. MoE2048E36LTwoPlaces has the paper's two places.
    CAPACITY_MULTIPLE = 4

    LAYERS_AS = Layers.LOOP  # Compile time does not grow with depth.
    # The paper leaves the choice of what to recompute to its compiler (section 5.1).
    REMAT = Remat.ALL_BUT_PRODUCTS
    SOURCE_VOCAB_SIZE = 64_000
    TARGET_VOCAB_SIZE = 32_000
    # The paper states batches only in tokens. Rows of this length hold all but the rarest sentence
    # pairs; longer ones would make attention more expensive.
    SOURCE_LEN = 256
    TARGET_LEN = 256
    # With a limit, the smaller half of the languages would not follow the sampling temperature.
    MAX_REPEATS = None


@registry.register
class MoE2048E36L(M4):
    """MoE(2048E, 36L): 619.40 B weights, the paper's 600B, on 2048 partitions."""

    NUM_LAYERS = 36
    REMAT = Remat.BLOCK  # Keeping all products, at four places, would exceed a core by 0.1 GiB.
    NUM_EXPERTS: int | None = 2048
    BATCH_SIZE = 16_384  # Rows of 256: 2^22 tokens, the paper's 4M.
    DECODE_BATCH_SIZE = 2048
    MAX_STEPS = 250_000  # 10^12 tokens


@registry.register
class MoE2048E36LTwoPlaces(MoE2048E36L):
    """MoE(2048E, 36L) at its fastest plan: 619.40 B weights on 2048 partitions.

    Its experts have exactly the paper's places, C = 2S/E = 2, and lose as many tokens as that
    implies. The other settings only change where numbers are stored and how often they are
    computed; apart from rounding of the numbers saved for the gradient, results are the same.
    """

    CAPACITY_MULTIPLE = 1
    REMAT = Remat.ALL_BUT_PROJECTIONS

    # Dense weights and their updates are split 128 ways by rows, and gathered for use.
    MESH = "d:*,u:128"
    SHARDING = "BGE:d+u,weights.MH:u"

    def _stack(self, num_layers: int) -> TransformerStack.Params:
        # The memory that this saves is used to save more results for the gradient, most of them in
        # 16 bits: a TPU's products round their factors to 16 bits anyway.
        return super()._stack(num_layers).Set(kept_hidden_dtype="bfloat16")


@registry.register
class MoE2048E12L(MoE2048E36L):
    """MoE(2048E, 12L): 206.55 B weights, the paper's 200B, on 2048 partitions."""

    NUM_LAYERS = 12
    REMAT = Remat.ALL_BUT_PRODUCTS


@registry.register
class MoE2048E24L(MoE2048E36L):
    """MoE(2048E, 24L) of section 5.1: 412.98 B weights, on 2048 partitions."""

    NUM_LAYERS = 24


@registry.register
class MoE2048E60L(MoE2048E36L):
    """MoE(2048E, 60L), in bfloat16: 1.032 T weights, the paper's 1T, on 2048 partitions."""

    NUM_LAYERS = 60
    ACTIVATION_DTYPE = "bfloat16"


@registry.register
class MoE512E36L(MoE2048E36L):
    """MoE(512E, 36L): 155.51 B weights, the paper's 150B, on 512 partitions."""

    NUM_EXPERTS = 512
    REMAT = Remat.ALL_BUT_PRODUCTS
    BATCH_SIZE = 4096  # 2^20 tokens, the paper's 1M.
    DECODE_BATCH_SIZE = 512
    MAX_STEPS = 1_000_000


@registry.register
class MoE512E24L(MoE512E36L):
    """MoE(512E, 24L) of section 5.1: 103.72 B weights, on 512 partitions."""

    NUM_LAYERS = 24


@registry.register
class MoE512E12L(MoE512E36L):
    """MoE(512E, 12L): 51.93 B weights, the paper's 50B, on 512 partitions."""

    NUM_LAYERS = 12


@registry.register
class MoE128E36L(MoE512E36L):
    """MoE(128E, 36L): 39.54 B weights, the paper's 37B, on 128 partitions."""

    NUM_EXPERTS = 128
    DECODE_BATCH_SIZE = 128
    REMAT = Remat.BLOCK  # A core has four times as many tokens.


@registry.register
class MoE128E24L(MoE128E36L):
    """MoE(128E, 24L) of section 5.1: 26.41 B weights, on 128 partitions."""

    NUM_LAYERS = 24


@registry.register
class MoE128E12L(MoE128E36L):
    """MoE(128E, 12L): 13.27 B weights, the paper's 12.5B, on 128 partitions."""

    NUM_LAYERS = 12
    REMAT = Remat.ALL_BUT_PRODUCTS


@registry.register
class T96L(MoE2048E36L):
    """T(96L), dense: 2.35 B weights, the paper's 2.3B, on 2048 partitions.

    It is data parallel here; T96LPipeline trains it like the paper. The paper gives no sizes for
    it, only sizes of GPipe's T(128L) in footnote 11. In GPipe's family (Huang et al. 2019,
    arXiv:1811.06965, section 5) the deep T(L, H=8192, A=16) has M=1024, and its printed weights
    imply heads of 64: 48 + 48 such layers have 2.35 B weights. With A.2's heads of 128 it would
    have 2.95 B. Every core holds all weights, and their gradients leave no room for float32
    activations.
    """

    NUM_LAYERS = 96
    HEAD_DIM = 64
    ACTIVATION_DTYPE = "bfloat16"
    REMAT = Remat.BLOCK
    NUM_EXPERTS = None
    MAX_STEPS = 300_000  # Footnote 10.


@registry.register
class T96LPipeline(T96L):
    """T(96L) as a GPipe pipeline in float32: 2.35 B weights on 2048 partitions.

    The paper trained it this way. It does not print the number of stages; with 8, a stage has 6
    layers of each stack. Rows are split over all cores outside the pipeline, and over `d` in it.
    """

    ACTIVATION_DTYPE = "float32"
    STAGES = 8
    MICROBATCHES = 32
    MESH = "d:*,p:8"
    SHARDING = "R:p,B:d+p"
