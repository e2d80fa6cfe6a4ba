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

import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lingvo_gshard import registry
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.settings import differences
from lingvo_gshard.files import json_fields
from lingvo_gshard.files.json_fields import Fields
from lingvo_gshard.hugging_face.config import (
    ACTIVATIONS,
    CONFIG,
    MAX_DIM,
    MAX_LAYERS,
    MAX_VOCAB,
    Config,
    settings,
)
from lingvo_gshard.input.manifest import Kind

_TABLE = "theta.embedding.table"
_SOFTMAX = "theta.softmax"
_FINAL_NORM = "theta.decoder.norm.scale"
_LAYER = re.compile(r"theta\.decoder\.(?:layers|block)\[\d+\]\.(.+)")
_EMBEDDING = "embed_tokens.weight"
_LOGITS = "lm_head.weight"
_NORMALIZED = "norm_topk_prob"  # Whether a token's gates are divided by their sum.

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
EXPERT = {
    "feed_forward.wi_gate": "mlp.experts.{}.gate_proj.weight",
    "feed_forward.wi": "mlp.experts.{}.up_proj.weight",
    "feed_forward.wo": "mlp.experts.{}.down_proj.weight",
}
# Settings of tasks that do not change what a trained model computes.
_WITHOUT_EFFECT = re.compile(
    r"task\.(input_dropout\..*|label_smoothing|aux_loss_weight|activation_dtype|product_dtype"
    r"|decoder\.(layers_as|remat|kept_hidden_dtype|stages|microbatches|.*dropout\..*"
    r"|moe\.(dispatch|group_size|train_capacity\..*|gating\.(z_loss_weight|bias_rate))))"
)


class Decoder(Config):
    """The config.json of a decoder."""

    MODEL_TYPE: ClassVar[str]
    ARCHITECTURE: ClassVar[str]
    BASE: ClassVar[str]  # The registered model, whose settings a config.json changes.
    FIXED: ClassVar[dict[str, tuple[Any, ...]]] = Config.FIXED | {"is_encoder_decoder": (False,)}
    EXPERTS: ClassVar[str] = "num_experts"  # The field of E.
    EXPERT_DIM: ClassVar[str] = "moe_intermediate_size"  # The field of an expert's H.
    LAYER: ClassVar[Mapping[str, str]] = LAYER
    EXPERT: ClassVar[Mapping[str, str]] = EXPERT

    KIND = Kind.TEXT
    TABLES = re.compile(r"model\.embed_tokens\.weight|lm_head\.weight")
    COMPUTED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")

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

    def set_family(self, stack: Params) -> None:
        """Sets this family's own settings of the decoder's stack."""
        if _NORMALIZED in self.DEFAULTS:
            stack.moe.gating.normalized = self[_NORMALIZED]

    def family_fields(self, stack: Params) -> dict[str, Any]:
        """Returns the fields that only this family has, given the settings of the stack."""
        fields = {self.EXPERTS: stack.moe.num_experts, self.EXPERT_DIM: stack.moe.hidden_dim}
        if _NORMALIZED in self.DEFAULTS:
            fields[_NORMALIZED] = stack.moe.gating.normalized
        return fields

    @property
    def rows(self) -> tuple[int, int, int]:
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
        for name in ("rope_parameters", "rope_scaling"):
            kind = self.values.values.get(name) or {}
            if not isinstance(kind, dict) or kind.get("rope_type", "default") != "default":
                raise self.refused(name, "the rope_type 'default'")
        if type(self.max_timescale) not in (int, float) or not 1 < self.max_timescale < math.inf:
            raise self.refused("rope_theta", "a number above 1")
        self.check_number("rms_norm_eps", lambda epsilon: 0 < epsilon < 1, "above 0, below 1")
        self.check_rate("attention_dropout")
        self.check_switches(name for name, value in self.DEFAULTS.items() if type(value) is bool)
        self._check_ids()

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

    @staticmethod
    def _ends(value: Any) -> list[Any]:
        """Returns the ids of EOS, of which there may be several; the first is ours."""
        return (value or [None]) if isinstance(value, list) else [value]

    def check_generated(self, given: Fields) -> None:
        _, _, eos = self.rows
        if eos not in self._ends(given.get("eos_token_id", eos)):
            raise json_fields.refused(given, "eos_token_id", f"{eos}, as in {self.path.name}")

    def launched_model(self) -> tuple[str, tuple[str, ...]]:
        base = registry.get_params(self.BASE)
        return self.BASE, settings(base, self.on(base))

    def on(self, params: Params) -> Params:
        """Returns an experiment's settings, changed by this config.json."""
        p = params.Copy()
        p.task.Set(
            vocab_size=self["vocab_size"],
            dim=self["hidden_size"],
            tied_softmax=self["tie_word_embeddings"],
        )
        stack = p.task.decoder
        stack.num_layers = self["num_hidden_layers"]
        stack.layer.norm.epsilon = float(self["rms_norm_eps"])
        stack.layer.attention.Set(
            num_heads=self["num_attention_heads"],
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
        )
        stack.layer.attention.positions.max_timescale = float(self.max_timescale)
        stack.layer.attention.dropout.rate = float(self["attention_dropout"])

        activation = ACTIVATIONS[self["hidden_act"]]
        stack.dense.Set(hidden_dim=self["intermediate_size"], activation=activation)
        stack.moe.Set(
            hidden_dim=self.expert_dim, num_experts=self.num_experts, activation=activation
        )
        stack.moe.gating.k = self["num_experts_per_tok"]
        is_every = len(self.moe_layers) == self["num_hidden_layers"]
        stack.Set(moe_every=1, moe_layers=None if is_every else self.moe_layers)
        self.set_family(stack)
        return p

    def fields_of(self, params: Params, rows: tuple[int, int, int]) -> dict[str, Any]:
        """Returns the fields of the config.json of an experiment."""
        task = params.task
        stack = task.decoder
        attention = stack.layer.attention
        pad, bos, eos = rows
        activation = next(
            name for name, ours in ACTIVATIONS.items() if ours is stack.dense.activation
        )
        fields = {
            "architectures": [self.ARCHITECTURE],
            "model_type": self.MODEL_TYPE,
            "vocab_size": task.vocab_size,
            "hidden_size": task.dim,
            "intermediate_size": stack.dense.hidden_dim,
            "num_hidden_layers": stack.num_layers,
            "num_attention_heads": attention.num_heads,
            "num_key_value_heads": attention.num_kv_heads or attention.num_heads,
            "head_dim": attention.head_dim,
            "hidden_act": activation,
            "rms_norm_eps": stack.layer.norm.epsilon,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": attention.positions.max_timescale,
            },
            "attention_dropout": attention.dropout.rate,
            "tie_word_embeddings": task.tied_softmax,
            "num_experts_per_tok": stack.moe.gating.k,
            "pad_token_id": pad,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "dtype": "float32",
        }
        return fields | self.family_fields(stack)

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


def written(
    params: Params, rows: tuple[int, int, int], families: Sequence[type[Decoder]]
) -> Decoder:
    """Returns the config.json of an experiment in the first family that can express its task.

    Raises ValueError, in one line, that names what the closest family cannot express.
    """
    if params.task.decoder.moe is None:
        raise ValueError("--to=huggingface: decoders without experts cannot be exported.")

    closest: list[str] | None = None
    name = ""
    for family in families:
        path = pathlib.Path(CONFIG)
        fields = family(path, Fields(path, {})).fields_of(params, rows)
        config = family(path, Fields(path, fields))
        missing = _inexpressible(config, params)
        if not missing:
            config.check()
            return config
        if closest is None or len(missing) < len(closest):
            closest = missing
            name = family.MODEL_TYPE
    raise ValueError(f"--to=huggingface: {name} has no {'; nor '.join(closest or [])}.")


def _inexpressible(config: Decoder, params: Params) -> list[str]:
    """Returns the settings of an experiment that its config.json would not give back."""
    wanted = params.task.ToText()
    try:
        got = config.on(registry.get_params(config.BASE)).task.ToText()
    except ValueError as error:
        return [str(error)]
    lines = differences(wanted, got)
    lines = [f"task.{line}" for line in lines]
    return [line for line in lines if not _WITHOUT_EFFECT.match(line.partition(": ")[0])]


class HeadNormDecoder(Decoder):
    """A family with norms of queries and keys, and with biases of attention by `attention_bias`."""

    LAYER: ClassVar[Mapping[str, str]] = LAYER | HEAD_NORMS

    def set_family(self, stack: Params) -> None:
        super().set_family(stack)
        stack.layer.attention.biases = self["attention_bias"]
        stack.layer.attention.head_norm.epsilon = float(self["rms_norm_eps"])

    def family_fields(self, stack: Params) -> dict[str, Any]:
        own = {"attention_bias": stack.layer.attention.biases}
        return super().family_fields(stack) | own
