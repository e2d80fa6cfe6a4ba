"""The released models NLLB-MoE, NLLB-200 and M2M-100, to load, fine-tune and decode.

`gshard import` reads their weights from Hugging Face's files; see docs/nllb.md. The first model
below is NLLB-MoE; the others differ from it in their sizes. The toys have the same layers and
vocabularies of 4000 and 4000 pieces, which are one table. This command fine-tunes an imported
model; each docstring states the number of partitions:

    gshard train --model=nllb.MoE54B --mode=train_and_eval \
        --data_dir=DATA --logdir=RUN --num_partitions=8 --set=train.warm_start_from=IMPORTED
"""

from lingvo_gshard import registry
from lingvo_gshard.beam_search.beam import Rules, Stopping
from lingvo_gshard.input.example_codec import EOS_ID
from lingvo_gshard.layers.gating import SecondExpert
from lingvo_gshard.layers.gating_layers import Top2Gating
from lingvo_gshard.layers.numerics import Remat
from lingvo_gshard.layers.repeat import Layers
from lingvo_gshard.layers.stack import TransformerStack
from lingvo_gshard.model.decode_params import TranslationDecodeParams
from lingvo_gshard.model.translation import TranslationTask
from params.experiment import TranslationExperiment
from params.toy import Small


class Nllb(TranslationExperiment):
    """The common parts of the models of this family, in fairseq and in transformers.

    Both sides share one table, which is the softmax's, too; all projections have biases; the first
    position is 2; a translation begins after </s>, with its language's token.
    """

    SOURCE_VOCAB_SIZE: int | None = 256_206
    TARGET_VOCAB_SIZE: int | None = 256_206
    NUM_EXPERTS: int | None = None
    MOE_EVERY = 4
    LAYERS_AS = Layers.LOOP
    REMAT = Remat.BLOCK

    BATCH_SIZE = 64
    SOURCE_LEN = 256
    TARGET_LEN = 256
    MAX_STEPS = 10_000
    LEARNING_RATE = 0.1  # Small, since the weights are already trained.
    RAMP_UP_STEPS = 100

    def Task(self) -> TranslationTask.Params:
        """Returns the settings of the model and its loss, `task`."""
        p = super().Task().Set(shared_embeddings=True, start_piece=EOS_ID)
        p.embedding.first_position = 2
        return p

    def Decode(self) -> TranslationDecodeParams:
        """Returns the settings of flat beam search, `decode`, as in transformers' generate."""
        p = super().Decode().Set(max_target_len=min(200, self.TARGET_LEN))
        return p.Set(rules=Rules.HUGGING_FACE, stopping=Stopping.LIKELY, length_norm_alpha=1.0)

    def _stack(self, num_layers: int) -> TransformerStack.Params:
        p = super()._stack(num_layers)
        p.layer.norm.epsilon = 1e-5
        p.layer.attention.biases = True
        p.dense.biases = True
        if p.moe is not None:
            p.moe_every = self.MOE_EVERY
            p.moe.biases = True
            p.moe.output_dropout.rate = 0.2
            p.moe.gating = Top2Gating.Params().Set(second_expert=SecondExpert.ALL)
        return p


@registry.register
class MoE54B(Nllb):
    """NLLB-MoE, 128 experts in every fourth layer: 54.50 B weights on 8 partitions."""

    NUM_LAYERS = 48
    MODEL_DIM = 2048
    HIDDEN_DIM = 8192
    NUM_HEADS = 16
    HEAD_DIM = 128
    NUM_EXPERTS: int | None = 128


@registry.register
class Dense3B(MoE54B):
    """NLLB-200 3.3B: 3.345 B weights on 8 partitions."""

    NUM_EXPERTS = None


@registry.register
class Dense1B(Nllb):
    """NLLB-200 1.3B, and the distilled model of that size: 1.371 B weights on 4 partitions."""

    NUM_LAYERS = 48
    MODEL_DIM = 1024
    HIDDEN_DIM = 8192
    NUM_HEADS = 16
    HEAD_DIM = 64


@registry.register
class Dense600M(Dense1B):
    """NLLB-200 distilled 600M: 615.1 M weights on 2 partitions."""

    NUM_LAYERS = 24
    HIDDEN_DIM = 4096


@registry.register
class M2m418M(Dense600M):
    """M2M-100 418M: 483.9 M weights on 2 partitions."""

    SOURCE_VOCAB_SIZE = TARGET_VOCAB_SIZE = 128_112

    def Decode(self) -> TranslationDecodeParams:
        """Returns the settings of flat beam search, `decode`, with which it was released."""
        return super().Decode().Set(beam_size=5, stopping=Stopping.FIRST)


@registry.register
class M2m1B(M2m418M):
    """M2M-100 1.2B: 1.239 B weights on 4 partitions."""

    NUM_LAYERS = 48
    HIDDEN_DIM = 8192


@registry.register
class M2m12B(M2m1B):
    """M2M-100 12B: 11.80 B weights on 8 partitions."""

    MODEL_DIM = 4096
    HIDDEN_DIM = 16_384
    HEAD_DIM = 256


class Toy(Small, Nllb):
    """The family's layers, small enough to train on a CPU."""

    NUM_LAYERS = 8
    SOURCE_VOCAB_SIZE = TARGET_VOCAB_SIZE = None
    SOURCE_LEN = 64
    TARGET_LEN = 48
    LEARNING_RATE = 1.0


@registry.register
class ToyMoE(Toy):
    """NLLB-MoE's twin, 8 experts in every fourth layer: 4.21 M weights on 4 partitions."""


@registry.register
class ToyDense(Toy):
    """M2M-100's twin: 2.36 M weights on 4 partitions."""

    NUM_EXPERTS = None
