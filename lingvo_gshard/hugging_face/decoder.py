"""Decoders in Llama's form, with experts: the common part of their families.

    vocab_size, hidden_size, num_hidden_layers, intermediate_size             sizes
    num_attention_heads, num_key_value_heads, head_dim, rope_theta            attention
    num_experts_per_tok, and others by family                                 the experts

A family is a subclass, in a file of its own, of names and of the settings that only it has. The
tensors of layer 1 in the most common form, with our weights:

    model.layers.1.self_attn.q_proj.weight [N * D, M]           self_attention.wq [M, N, D]
    model.layers.1.mlp.gate.weight [E, M]                       feed_forward.wg [M, E]
    model.layers.1.mlp.experts.0.up_proj.weight [H, M]          feed_forward.wi [E, M, H]

M model, N heads, D head size, H hidden, E experts.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.files import json_fields
from lingvo_gshard.files.json_fields import Fields
from lingvo_gshard.hugging_face.config import (
    ACTIVATIONS,
    MAX_DIM,
    MAX_LAYERS,
    MAX_VOCAB,
    Config,
    activation_name,
)
from lingvo_gshard.input.manifest import Kind

_TABLE = "theta.embedding.table"
_SOFTMAX = "theta.softmax"
_FINAL_NORM = "theta.decoder.norm.scale"
_LAYER = re.compile(r"theta\.decoder\.(?:layers|block)\[\d+\]\.(.+)")
_EMBEDDING = "embed_tokens.weight"
_LOGITS = "lm_head.weight"

# The tensors of our weights in a layer. Biases have the same names with `bias`.
LAYER = {
    "self_norm.scale": "input_layernorm.weight",
    "self_attention.wq": "self_attn.q_proj.weight",
    "self_attention.wk": "self_attn.k_proj.weight",
    "self_attention.wv": "self_attn.v_proj.weight",
    "self_attention.wo": "self_attn.o_proj.weight",
    "feed_forward_norm.scale": "post_attention_layernorm.weight",
    "feed_forward.wi_gate": "mlp.gate_proj.weight",
    "feed_forward.wi": "mlp.up_proj.weight",
    "feed_forward.wo": "mlp.down_proj.weight",
    "feed_forward.wg": "mlp.gate.weight",
}
HEAD_NORMS = {
    "self_attention.query_norm.scale": "self_attn.q_norm.weight",
    "self_attention.key_norm.scale": "self_attn.k_norm.weight",
}
# The setting whether a token's gates are divided by their sum, of the families that have it.
NORMALIZED = {"norm_topk_prob": "decoder.moe.gating.normalized"}
EXPERT = {
    "feed_forward.wi_gate": "mlp.experts.{}.gate_proj.weight",
    "feed_forward.wi": "mlp.experts.{}.up_proj.weight",
    "feed_forward.wo": "mlp.experts.{}.down_proj.weight",
}


@dataclasses.dataclass(frozen=True)
class Decoder(Config):
    """The config.json of a decoder."""

    # The id of EOS; None takes the first one of eos_token_id.
    end_id: int | None = None

    MODEL_TYPE: ClassVar[str]
    ARCHITECTURE: ClassVar[str]
    BASE: ClassVar[str]  # The registered model, whose settings a config.json changes.
    DEFAULTS: ClassVar[dict[str, Any]] = {
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "hidden_act": "silu",
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    FIXED: ClassVar[dict[str, tuple[Any, ...]]] = Config.FIXED | {"is_encoder_decoder": (False,)}
    # Fields, and the settings of the task that are equal to them.
    SETTINGS: ClassVar[dict[str, str]] = {
        "vocab_size": "vocab_size",
        "hidden_size": "dim",
        "tie_word_embeddings": "tied_softmax",
        "num_hidden_layers": "decoder.num_layers",
        "rms_norm_eps": "decoder.layer.norm.epsilon",
        "num_attention_heads": "decoder.layer.attention.num_heads",
        "attention_dropout": "decoder.layer.attention.dropout.rate",
        "intermediate_size": "decoder.dense.hidden_dim",
        "num_experts_per_tok": "decoder.moe.gating.k",
    }
    WRITTEN: ClassVar[dict[str, Any]] = {}  # Further fields that an exported file has.
    EXPERTS: ClassVar[str] = "num_experts"  # The field of E.
    EXPERT_DIM: ClassVar[str] = "moe_intermediate_size"  # The field of an expert's H.
    LAYER: ClassVar[Mapping[str, str]] = LAYER
    EXPERT: ClassVar[Mapping[str, str]] = EXPERT

    KIND = Kind.TEXT
    TABLES = re.compile(r"model\.embed_tokens\.weight|lm_head\.weight")
    COMPUTED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")

    @property
    def base(self) -> str:
        return self.BASE

    @property
    def experts_field(self) -> str:
        """The field of E in this file."""
        return self.EXPERTS

    @property
    def num_experts(self) -> int:
        """E."""
        return self[self.experts_field]

    @property
    def expert_dim(self) -> int:
        """H of an expert."""
        return self[self.EXPERT_DIM]

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers with experts."""
        return tuple(range(self["num_hidden_layers"]))

    @property
    def num_kv_heads(self) -> Any:
        """The heads of keys and values."""
        given = self["num_key_value_heads"]
        return self["num_attention_heads"] if given is None else given

    @property
    def head_dim(self) -> Any:
        """D."""
        given = self["head_dim"] if "head_dim" in self.values or "head_dim" in self.DEFAULTS else 0
        return given or self["hidden_size"] // self["num_attention_heads"]

    @property
    def max_timescale(self) -> Any:
        """The longest wavelength of rotary positions over 2 pi."""
        rotary = self["rope_parameters"] if "rope_parameters" in self.values else {}
        given = rotary.get("rope_theta") if isinstance(rotary, dict) else None
        return self["rope_theta"] if given is None else given

    @property
    def rows(self) -> tuple[int, int, int]:
        eos = self.end_id
        if eos is None:
            eos, *_ = self._ends(self["eos_token_id"])

        taken = {eos}

        def free(name: str) -> int:
            """Returns the id of a special token or, without one of its own, the lowest free id."""
            given = self[name]
            if given is None or given in taken:
                given = min({0, 1, 2} - taken - {self["bos_token_id"], self["pad_token_id"]})
            taken.add(given)
            return int(given)

        bos = free("bos_token_id")
        return free("pad_token_id"), bos, eos

    def check(self) -> None:
        self._check_sizes()
        self.check_fixed(self.FIXED)
        self.check_activation("hidden_act")
        self.check_number("rms_norm_eps", lambda epsilon: 0 < epsilon < 1, "above 0 and below 1")
        self.check_rate("attention_dropout")
        self.check_switches(name for name, value in self.DEFAULTS.items() if type(value) is bool)
        self._check_ids()

        for name in ("rope_parameters", "rope_scaling"):
            kind = self.values.values.get(name) or {}
            if not isinstance(kind, dict) or kind.get("rope_type", "default") != "default":
                raise self.refused(name, "the rope_type 'default'")
        if not json_fields.is_number(self.max_timescale) or self.max_timescale <= 1:
            raise self.refused("rope_theta", "a number above 1")

    def _check_sizes(self) -> None:
        """Raises ValueError for a size that is not a number, or larger than any model's."""
        self.check_integer("vocab_size", 1, MAX_VOCAB)
        self.check_integer("num_hidden_layers", 1, MAX_LAYERS)
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", self.EXPERT_DIM):
            self.check_integer(name, 1, MAX_DIM)
        if type(self.head_dim) is not int or not 1 <= self.head_dim <= MAX_DIM or self.head_dim % 2:
            raise self.refused("head_dim", "an even number")
        if self["num_key_value_heads"] is not None:
            self.check_divisor("num_key_value_heads", "num_attention_heads")

        self.check_experts(self.experts_field, self["num_hidden_layers"])
        self.check_integer("num_experts_per_tok", 1, self.num_experts)

    def _check_ids(self) -> None:
        """Raises ValueError for a special token that is not of the vocabulary."""
        size = self["vocab_size"]
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            values = self._ends(self[name]) if name == "eos_token_id" else [self[name]]
            for value in values:
                is_none = value is None and name != "eos_token_id"
                if not is_none and not (type(value) is int and 0 <= value < size):
                    raise self.refused(name, f"an id below vocab_size {size}")

    def ending_with(self, eos_id: int | None, given: Fields) -> Self:
        ends = self._ends(self["eos_token_id"]) + self._ends(given.get("eos_token_id"))
        if eos_id is None or eos_id not in ends or eos_id >= self["vocab_size"]:
            return self
        return dataclasses.replace(self, end_id=eos_id)

    @staticmethod
    def _ends(value: Any) -> list[Any]:
        """Returns the ids of EOS, of which there may be several."""
        return (value or [None]) if isinstance(value, list) else [value]

    def check_generated(self, given: Fields) -> None:
        _, _, eos = self.rows
        if eos not in self._ends(given.get("eos_token_id", eos)):
            raise json_fields.refused(given, "eos_token_id", f"{eos}, as in {self.path.name}")

    def on(self, params: Params) -> Params:
        p = params.Copy()
        for field, path in self.SETTINGS.items():
            is_float = isinstance(p.task.Get(path), float)  # In JSON, 1 may stand for 1.0.
            p.task.Set(**{path: float(self[field]) if is_float else self[field]})

        stack = p.task.decoder
        stack.layer.attention.Set(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        stack.layer.attention.positions.max_timescale = float(self.max_timescale)
        activation = ACTIVATIONS[self["hidden_act"]]
        stack.dense.activation = activation
        stack.moe.Set(
            hidden_dim=self.expert_dim, num_experts=self.num_experts, activation=activation
        )
        is_every = len(self.moe_layers) == self["num_hidden_layers"]
        stack.Set(moe_every=1, moe_layers=None if is_every else self.moe_layers)
        return p

    def fields_of(self, params: Params, rows: tuple[int, int, int]) -> dict[str, Any]:
        stack = params.task.decoder
        attention = stack.layer.attention
        pad, bos, eos = rows
        settings = {field: params.task.Get(path) for field, path in self.SETTINGS.items()}

        return settings | {
            "architectures": [self.ARCHITECTURE],
            "model_type": self.MODEL_TYPE,
            "num_key_value_heads": attention.num_kv_heads or attention.num_heads,
            "head_dim": attention.head_dim,
            "hidden_act": activation_name(stack.dense.activation),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": attention.positions.max_timescale,
            },
            "pad_token_id": pad,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "dtype": "float32",
            self.EXPERTS: stack.moe.num_experts,
            self.EXPERT_DIM: stack.moe.hidden_dim,
            **self.WRITTEN,
        }

    def table_candidates(self, path: str) -> tuple[str, ...]:
        if path == _TABLE:
            is_tied = self["tie_word_embeddings"]
            return (_EMBEDDING, _LOGITS) if is_tied else (_EMBEDDING,)
        return (_LOGITS,) if path == _SOFTMAX else ()

    def written_tables(self, path: str) -> list[str]:
        return [_LOGITS] if path == _SOFTMAX else [f"model.{_EMBEDDING}"]

    def name(self, path: str, layer: int | None, expert: int | None) -> str:
        if path == _FINAL_NORM:
            return "norm.weight"
        of_layer = _LAYER.fullmatch(path)
        weight = "" if of_layer is None else of_layer[1]
        product = weight.removesuffix("_bias")
        names = self.LAYER if expert is None else self.EXPERT
        if product not in names:
            raise ValueError(f"{path}: {self.MODEL_TYPE} has no tensor for this weight.")

        name = names[product].format(expert)
        if product != weight:
            name = name.removesuffix("weight") + "bias"
        return f"layers.{layer}.{name}"


class HeadNormDecoder(Decoder):
    """A family with norms of queries and keys, and with biases of attention by `attention_bias`."""

    DEFAULTS: ClassVar[dict[str, Any]] = Decoder.DEFAULTS | {"attention_bias": False}
    SETTINGS: ClassVar[dict[str, str]] = Decoder.SETTINGS | {
        "attention_bias": "decoder.layer.attention.biases",
    }
    LAYER: ClassVar[Mapping[str, str]] = LAYER | HEAD_NORMS

    def on(self, params: Params) -> Params:
        p = super().on(params)
        p.task.decoder.layer.attention.head_norm.epsilon = float(self["rms_norm_eps"])
        return p
