"""Qwen3-MoE (2025): norms of heads, and gates that may be normalized."""

from typing import Any, ClassVar

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.hugging_face import decoder
from lingvo_gshard.layers.layer_order import layer_order


class Qwen3Moe(decoder.HeadNormDecoder):
    """`qwen3_moe`: num_experts, or num_local_experts, of moe_intermediate_size.

    Layer i has experts if decoder_sparse_step divides i + 1 and mlp_only_layers does not list i.
    """

    MODEL_TYPE = "qwen3_moe"
    ARCHITECTURE = "Qwen3MoeForCausalLM"
    BASE = "open_moe.Qwen3MoE30B"
    DEFAULTS: ClassVar[dict[str, Any]] = decoder.HeadNormDecoder.DEFAULTS | {
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
    }
    SETTINGS: ClassVar[dict[str, str]] = decoder.HeadNormDecoder.SETTINGS | decoder.NORMALIZED
    FIXED: ClassVar[dict[str, tuple[Any, ...]]] = decoder.Decoder.FIXED | {
        "use_sliding_window": (False,),
    }

    @property
    def experts_field(self) -> str:
        return "num_local_experts" if "num_local_experts" in self.values else self.EXPERTS

    @property
    def moe_layers(self) -> tuple[int, ...]:
        step = self["decoder_sparse_step"]
        dense = self["mlp_only_layers"] or []
        layers = range(self["num_hidden_layers"])
        return tuple(i for i in layers if (i + 1) % step == 0 and i not in dense)

    def check(self) -> None:
        super().check()
        self.check_integer("decoder_sparse_step", 1)
        dense = self["mlp_only_layers"] or []
        if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
            raise self.refused("mlp_only_layers", "a list of layers")

    def fields_of(self, params: Params, rows: tuple[int, int, int]) -> dict[str, Any]:
        has_experts = layer_order(params.task.decoder, "task.decoder").have_experts
        return super().fields_of(params, rows) | {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i, sparse in enumerate(has_experts) if not sparse],
            "use_sliding_window": False,
        }
