"""Mixtral (Jiang et al. 2024): all layers have experts, whose gates are normalized."""

from collections.abc import Mapping
from typing import Any, ClassVar

from lingvo_gshard.hugging_face import decoder

_MOE = "block_sparse_moe"


class Mixtral(decoder.Decoder):
    """`mixtral`: num_local_experts experts of intermediate_size."""

    MODEL_TYPE = "mixtral"
    ARCHITECTURE = "MixtralForCausalLM"
    BASE = "open_moe.Mixtral8x7B"
    EXPERTS = "num_local_experts"
    EXPERT_DIM = "intermediate_size"
    DEFAULTS: ClassVar[dict[str, Any]] = decoder.Decoder.DEFAULTS | {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    }
    FIXED: ClassVar[dict[str, tuple[Any, ...]]] = decoder.Decoder.FIXED | {
        "sliding_window": (None,),
    }
    WRITTEN: ClassVar[dict[str, Any]] = {"sliding_window": None}

    LAYER: ClassVar[Mapping[str, str]] = decoder.LAYER | {"feed_forward.wg": f"{_MOE}.gate.weight"}
    EXPERT: ClassVar[Mapping[str, str]] = {
        "feed_forward.wi_gate": f"{_MOE}.experts.{{}}.w1.weight",
        "feed_forward.wi": f"{_MOE}.experts.{{}}.w3.weight",
        "feed_forward.wo": f"{_MOE}.experts.{{}}.w2.weight",
    }
