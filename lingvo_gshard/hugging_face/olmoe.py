"""OLMoE (Muennighoff et al. 2024): norms over all heads, and gates that are not normalized."""

from collections.abc import Mapping
from typing import Any, ClassVar

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.hugging_face import decoder


class Olmoe(decoder.HeadNormDecoder):
    """`olmoe`: num_experts experts of intermediate_size in all layers."""

    MODEL_TYPE = "olmoe"
    ARCHITECTURE = "OlmoeForCausalLM"
    BASE = "open_moe.OLMoE7B"
    EXPERT_DIM = "intermediate_size"
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": 50279,
        "hidden_act": "silu",
        "norm_topk_prob": False,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_key_value_heads": None,
        "pad_token_id": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
    }
    FIXED: ClassVar[dict[str, tuple[Any, ...]]] = decoder.Decoder.FIXED | {
        "clip_qkv": (None,),
    }

    def family_fields(self, stack: Params) -> dict[str, Any]:
        return super().family_fields(stack) | {"clip_qkv": None}
