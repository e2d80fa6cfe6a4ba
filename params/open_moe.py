"""Open mixtures of experts of 2024 to 2026, to import, fine-tune, decode and plan.

`gshard import` reads their weights from Hugging Face's files; see docs/moe_models.md. This command
fine-tunes an imported model; each docstring states the number of partitions:

    gshard train --model=open_moe.Qwen3MoE30B --mode=train_and_eval \
        --data_dir=DATA --logdir=RUN --num_partitions=8 --set=train.warm_start_from=IMPORTED
"""

from lingvo_gshard import registry
from lingvo_gshard.beam_search.beam import Rules, Stopping
from lingvo_gshard.layers.activations import Activation
from lingvo_gshard.layers.dispatch import Dispatch
from lingvo_gshard.layers.gating_layers import Scores, TopKGating
from lingvo_gshard.layers.norms import HeadRMSNorm, NoHeadNorm, Over, RMSNorm
from lingvo_gshard.layers.numerics import Remat
from lingvo_gshard.layers.positions import RotaryPositions
from lingvo_gshard.layers.repeat import Layers
from lingvo_gshard.layers.stack import TransformerStack
from lingvo_gshard.model.decode_params import ContinuationDecodeParams
from lingvo_gshard.model.language_model import LanguageModelTask
from params.language_model import LanguageModelExperiment


class OpenMoE(LanguageModelExperiment):
    """Llama's layers with experts: RMSNorm, rotary positions, SwiGLU and fewer heads of keys."""

    NUM_KV_HEADS: int
    EXPERT_DIM: int  # H of an expert; HIDDEN_DIM is H of layers without experts.
    NUM_CHOSEN: int  # The experts of a token.
    NORMALIZED = True
    EPSILON = 1e-5
    MAX_TIMESCALE: float
    MOE_LAYERS: tuple[int, ...] | None = None  # None: all.

    DROPOUT = 0.0
    DISPATCH = Dispatch.GATHER
    LAYERS_AS = Layers.LOOP
    REMAT = Remat.BLOCK

    BATCH_SIZE = 16
    TARGET_LEN = 1024
    MAX_STEPS = 10_000
    LEARNING_RATE = 0.1  # Small, since the weights are already trained.
    RAMP_UP_STEPS = 100

    def Task(self) -> LanguageModelTask.Params:
        """Returns the settings of the model and its loss, `task`."""
        p = super().Task()
        p.embedding.Set(scaled=False, sinusoids=False)
        return p

    def Decode(self) -> ContinuationDecodeParams:
        """Returns the settings for continuing prompts, `decode`, as in transformers' generate."""
        p = super().Decode().Set(beam_size=1, length_norm_alpha=0.0)
        return p.Set(rules=Rules.HUGGING_FACE, stopping=Stopping.LIKELY)

    def _stack(self, num_layers: int) -> TransformerStack.Params:
        p = super()._stack(num_layers).Set(moe_every=1, moe_layers=self.MOE_LAYERS)
        p.layer.norm = RMSNorm.Params().Set(epsilon=self.EPSILON)
        p.layer.attention.Set(
            num_kv_heads=self.NUM_KV_HEADS,
            head_norm=self._head_norm(),
            positions=RotaryPositions.Params().Set(max_timescale=self.MAX_TIMESCALE),
        )
        p.dense.Set(activation=Activation.SILU, gated=True)
        assert p.moe is not None
        p.moe.Set(
            hidden_dim=self.EXPERT_DIM,
            activation=Activation.SILU,
            gated=True,
            gating=self._gating(),
        )
        return p

    def _head_norm(self) -> NoHeadNorm.Params:
        return NoHeadNorm.Params()

    def _gating(self) -> TopKGating.Params:
        return TopKGating.Params().Set(k=self.NUM_CHOSEN, normalized=self.NORMALIZED)


@registry.register
class Mixtral8x7B(OpenMoE):
    """Mixtral 8x7B, 8 experts of which 2: 46.70 B weights on 8 partitions."""

    VOCAB_SIZE = 32_000
    NUM_LAYERS = 32
    MODEL_DIM = 4096
    HIDDEN_DIM = EXPERT_DIM = 14_336
    NUM_HEADS = 32
    NUM_KV_HEADS = 8
    HEAD_DIM = 128
    NUM_EXPERTS = 8
    NUM_CHOSEN = 2
    MAX_TIMESCALE = 1e6


@registry.register
class Qwen3MoE30B(OpenMoE):
    """Qwen3-30B-A3B, 128 experts of which 8: 30.53 B weights on 8 partitions."""

    VOCAB_SIZE = 151_936
    NUM_LAYERS = 48
    MODEL_DIM = 2048
    HIDDEN_DIM = 6144
    EXPERT_DIM = 768
    NUM_HEADS = 32
    NUM_KV_HEADS = 4
    HEAD_DIM = 128
    NUM_EXPERTS = 128
    NUM_CHOSEN = 8
    EPSILON = 1e-6
    MAX_TIMESCALE = 1e6

    def _head_norm(self) -> NoHeadNorm.Params:
        return HeadRMSNorm.Params().Set(epsilon=self.EPSILON)


@registry.register
class OLMoE7B(OpenMoE):
    """OLMoE-1B-7B, 64 experts of which 8: 6.92 B weights on 8 partitions."""

    VOCAB_SIZE = 50_304
    NUM_LAYERS = 16
    MODEL_DIM = 2048
    HIDDEN_DIM = EXPERT_DIM = 1024
    NUM_HEADS = 16
    NUM_KV_HEADS = 16
    HEAD_DIM = 128
    NUM_EXPERTS = 64
    NUM_CHOSEN = 8
    NORMALIZED = False
    MAX_TIMESCALE = 1e4

    def _head_norm(self) -> NoHeadNorm.Params:
        return HeadRMSNorm.Params().Set(epsilon=self.EPSILON, over=Over.ALL_HEADS)


@registry.register
class HyMT2MoE30B(Qwen3MoE30B):
    """Hy-MT2-30B-A3B, 128 experts of which 8, and one for all: 30.06 B weights on 8 partitions.

    The first layer is dense. Gates are sigmoids, and biases balance the experts.
    """

    VOCAB_SIZE = 120_832
    HIDDEN_DIM = 6912
    EPSILON = 1e-5
    MAX_TIMESCALE = 11_158_840.0
    MOE_LAYERS = tuple(range(1, 48))
    AUX_LOSS_WEIGHT = 0.0

    def _stack(self, num_layers: int) -> TransformerStack.Params:
        p = super()._stack(num_layers)
        assert p.moe is not None
        p.moe.num_shared = 1
        return p

    def _gating(self) -> TopKGating.Params:
        p = super()._gating()
        return p.Set(scores=Scores.SIGMOID, scale=2.826, bias_rate=0.001)
