"""OLMoE (Muennighoff et al. 2024): norms over all heads, and gates that are not normalized."""

from typing import Any, ClassVar

from lingvo_gshard.hugging_face import decoder


class Olmoe(decoder.HeadNormDecoder):
    """`olmoe`: num_experts experts of intermediate_size in all layers."""

    MODEL_TYPE = "olmoe"
    ARCHITECTURE = "OlmoeForCausalLM"
    BASE = "open_moe.OLMoE7B"
    EXPERT_DIM = "intermediate_size"
    DEFAULTS: ClassVar[dict[str, Any]] = decoder.HeadNormDecoder.DEFAULTS | {
        "eos_token_id": 50279,
        "norm_topk_prob": False,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_key_value_heads": None,
        "pad_token_id": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
    }
    SETTINGS: ClassVar[dict[str, str]] = decoder.HeadNormDecoder.SETTINGS | decoder.NORMALIZED
    FIXED: ClassVar[dict[str, tuple[Any, ...]]] = decoder.Decoder.FIXED | {
        "clip_qkv": (None,),
    }
    WRITTEN: ClassVar[dict[str, Any]] = {"clip_qkv": None}
