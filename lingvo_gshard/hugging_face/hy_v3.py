"""Hunyuan 3 and Hy-MT2 (Tencent, 2026): sigmoid gates with biases, and experts of all tokens."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.hugging_face import decoder
from lingvo_gshard.layers.layer_order import layer_order

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_KINDS = {"dense": False, "sparse": True}


class HyV3(decoder.HeadNormDecoder):
    """`hy_v3`: num_experts experts of moe_intermediate_size, and num_shared_experts beside them.

    mlp_layer_types lists the layers that have them; without it, they are all layers but the first
    first_k_dense_replace.
    """

    MODEL_TYPE = "hy_v3"
    ARCHITECTURE = "HYV3ForCausalLM"
    BASE = "open_moe.HyMT2MoE30B"
    DEFAULTS: ClassVar[dict[str, Any]] = decoder.HeadNormDecoder.DEFAULTS | {
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "mlp_bias": False,
        "mlp_layer_types": None,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 8,
        "num_shared_experts": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 11_158_840.0,
        "router_scaling_factor": 2.826,
    }
    SETTINGS: ClassVar[dict[str, str]] = decoder.HeadNormDecoder.SETTINGS | {
        "num_shared_experts": "decoder.moe.num_shared",
        "router_scaling_factor": "decoder.moe.gating.scale",
    }
    FIXED: ClassVar[dict[str, tuple[Any, ...]]] = decoder.Decoder.FIXED | {
        "mlp_bias": (False,),
        "moe_router_enable_expert_bias": (True,),
        "moe_router_use_sigmoid": (True,),
        "qk_norm": (True,),
        "route_norm": (True,),
    }

    LAYER: ClassVar[Mapping[str, str]] = {
        **decoder.HeadNormDecoder.LAYER,
        "feed_forward.wg": "mlp.router.gate.weight",
        "feed_forward.gate.bias": "mlp.expert_bias",
        "feed_forward.shared.wi_gate": "mlp.shared_mlp.gate_proj.weight",
        "feed_forward.shared.wi": "mlp.shared_mlp.up_proj.weight",
        "feed_forward.shared.wo": "mlp.shared_mlp.down_proj.weight",
    }

    def is_left_out(self, name: str) -> bool:
        """Returns True also for layers past the last one, which predict further tokens."""
        layer = _LAYER.match(name)
        is_past = layer is not None and int(layer[1]) >= self["num_hidden_layers"]
        return is_past or super().is_left_out(name)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        kinds = self["mlp_layer_types"]
        if kinds is None:
            return tuple(range(self["first_k_dense_replace"], self["num_hidden_layers"]))
        return tuple(i for i, kind in enumerate(kinds) if _KINDS[kind])

    def check(self) -> None:
        super().check()
        kinds = self["mlp_layer_types"]
        num_layers = self["num_hidden_layers"]
        if kinds is not None and not (
            isinstance(kinds, list)
            and len(kinds) == num_layers
            and all(isinstance(kind, str) and kind in _KINDS for kind in kinds)
        ):
            raise self.refused("mlp_layer_types", f"{num_layers} of {' and '.join(_KINDS)}")

        self.check_integer("first_k_dense_replace", 0, num_layers)
        self.check_integer("num_shared_experts", 1)
        self.check_number("router_scaling_factor", lambda scale: scale > 0, "a number above 0")

    def fields_of(self, params: Params, rows: tuple[int, int, int]) -> dict[str, Any]:
        have_experts = layer_order(params.task.decoder, "task.decoder").have_experts
        kinds = {is_sparse: kind for kind, is_sparse in _KINDS.items()}
        return super().fields_of(params, rows) | {
            "mlp_layer_types": [kinds[sparse] for sparse in have_experts],
        }
