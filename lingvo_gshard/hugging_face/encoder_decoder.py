"""NLLB-MoE and M2M-100 in transformers: config.json, and the equal settings of our task.

    d_model, vocab_size, encoder_layers, encoder_attention_heads, encoder_ffn_dim      sizes
    scale_embedding, tie_word_embeddings, pad_token_id, decoder_start_token_id         the ends
    num_experts, encoder_sparse_step                                                   the experts

The first position is pad_token_id + 1. Our ids of padding and BOS are 0 and 1, and released models'
are 1 and 0, so rows of the tables change places.
"""

from typing import Any, ClassVar

from lingvo_gshard import registry
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.files import json_fields
from lingvo_gshard.files.json_fields import Fields
from lingvo_gshard.hugging_face import names
from lingvo_gshard.hugging_face.config import (
    ACTIVATIONS,
    MAX_DIM,
    MAX_LAYERS,
    MAX_VOCAB,
    Config,
    activation_name,
    settings,
)
from lingvo_gshard.hugging_face.names import Family
from lingvo_gshard.input.example_codec import BOS_ID, EOS_ID, PAD_ID
from lingvo_gshard.input.manifest import Kind
from lingvo_gshard.layers.repeat import Layers

SIDES = ("encoder", "decoder")

_DEFAULTS: dict[str, Any] = {
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "attention_dropout": 0.1,
    "bos_token_id": 0,
    "decoder_sparse_step": 4,
    "decoder_start_token_id": 2,
    "dropout": 0.1,
    "encoder_sparse_step": 4,
    "eos_token_id": 2,
    "moe_eval_capacity_token_fraction": 1.0,
    "moe_token_dropout": 0.2,
    "pad_token_id": 1,
    "router_bias": False,
    "router_dtype": "float32",
    "scale_embedding": True,
    "second_expert_policy": "all",
    "tie_word_embeddings": True,
}
# As in Config.FIXED, for a model with experts.
_FIXED_OF_EXPERTS: dict[str, tuple[Any, ...]] = {
    "router_bias": (False,),
    "router_dtype": ("float32",),
    "second_expert_policy": ("all",),
    "moe_eval_capacity_token_fraction": (1.0,),
}
_ARCHITECTURES = {
    Family.NLLB_MOE: "NllbMoeForConditionalGeneration",
    Family.M2M_100: "M2M100ForConditionalGeneration",
}
# Other names that transformers accepts for sizes.
_ALIASES = {"hidden_size": "d_model", "num_attention_heads": "encoder_attention_heads"}
# The registered models from which models of other sizes are made: with and without experts.
_BASES = ("nllb.MoE54B", "nllb.Dense600M")

# The possible names of a table, best first: of one for both sides and the logits, or of each side.
_SHARED = "shared.weight"
_SOURCE = "encoder.embed_tokens.weight"
_TARGET = "decoder.embed_tokens.weight"
_TIED = (_SHARED, _TARGET, _SOURCE, "lm_head.weight")
_TABLES = {names.TABLE: (_TARGET, _SHARED), names.SOURCE_TABLE: (_SOURCE, _SHARED)}


class EncoderDecoder(Config):
    """The config.json of an NLLB-MoE or M2M-100."""

    DEFAULTS = _DEFAULTS
    FIXED: ClassVar[dict[str, tuple[Any, ...]]] = Config.FIXED | {
        "eos_token_id": (EOS_ID,),
        "is_encoder_decoder": (True,),
        "tie_encoder_decoder": (False, None),
    }
    # Biases that our layers lack are written as 0, and exporting.py notes other epsilons of norms.
    WITHOUT_EFFECT = (
        Config.WITHOUT_EFFECT
        + r"|task\.(encoder|decoder)\.(.*\.biases|layer\.norm\.epsilon|moe\.gating\.second_expert)"
    )
    TABLES = names.TABLES
    COMPUTED = names.COMPUTED
    HAS_BIASES = True
    KIND = Kind.PARALLEL

    @property
    def family(self) -> Family:
        """The value of model_type."""
        return Family(self["model_type"])

    @property
    def rows(self) -> tuple[int, int, int]:
        """Returns their rows of our ids 0, 1 and 2 in a table; other ids have the same rows.

        If they do not pad, so that pad_token_id is -1, padding gets the row that is left over.
        """
        pad = self["pad_token_id"]
        bos = self["bos_token_id"]
        eos = self["eos_token_id"]
        if pad == -1:
            pad = min({PAD_ID, BOS_ID, EOS_ID} - {bos, eos})
        return (pad, bos, eos)

    @property
    def expert_scale(self) -> float:
        return 1.0 - float(self["moe_token_dropout"]) if self.family is Family.NLLB_MOE else 1.0

    def check(self) -> None:
        self._check_sizes()
        self._check_ids()
        self.check_switches(("scale_embedding", "tie_word_embeddings"))
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            self.check_rate(name)
        self.check_activation("activation_function")
        self.check_fixed(self.FIXED)
        if self.family is Family.NLLB_MOE:
            self._check_experts()

        fields = self.values.values  # An alias is only compared, so it does not count as used.
        for alias, name in _ALIASES.items():
            if fields.get(alias, self[name]) != self[name]:
                raise self.refused(alias, f"{self[name]}, as {name}")

    def _check_sizes(self) -> None:
        """Raises ValueError for a size that is not a number, or larger than any model's."""
        self.check_integer("d_model", 1, MAX_DIM)
        self.check_integer("vocab_size", 1, MAX_VOCAB)
        for side in SIDES:
            self.check_integer(f"{side}_layers", 1, MAX_LAYERS)
            self.check_integer(f"{side}_ffn_dim", 1, MAX_DIM)
            self.check_divisor(f"{side}_attention_heads", "d_model")

    def _check_ids(self) -> None:
        """Raises ValueError for special tokens that are not of the vocabulary, or not the first."""
        for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
            if type(self[name]) is not int or not -1 <= self[name] < self["vocab_size"]:
                raise self.refused(name, "an id of the vocabulary")
        if set(self.rows) != {PAD_ID, BOS_ID, EOS_ID}:
            raise ValueError(
                f"{self.path}: pad, bos and eos are {list(self.rows)}; expected 0, 1 and 2, in any "
                "order."
            )

    def _check_experts(self) -> None:
        """Raises ValueError for experts that our layers do not have."""
        # Every layer may have experts.
        self.check_experts("num_experts", sum(self[f"{side}_layers"] for side in SIDES))
        for side in SIDES:
            self.check_integer(f"{side}_sparse_step", 0)
        self.check_rate("moe_token_dropout")
        self.check_fixed(_FIXED_OF_EXPERTS)

    def check_generated(self, given: Fields) -> None:
        pad, bos, _ = self.rows
        ids = {"eos_token_id": EOS_ID, "pad_token_id": pad, "bos_token_id": bos}
        for name, expected in ids.items():
            value = given.get(name, expected)
            if name == "eos_token_id" and value == [expected]:
                value = expected  # A list with a single token.
            if value != expected or type(value) is not int:
                raise json_fields.refused(given, name, f"{expected}, as in {self.path.name}")

        # By default, generate begins with BOS.
        start = self["decoder_start_token_id"]
        own_start = given.get("decoder_start_token_id", given.get("bos_token_id", start))
        if own_start != start:
            what = f"{start}, as in {self.path.name}"
            raise json_fields.refused(given, "decoder_start_token_id", what)

    @property
    def base(self) -> str:
        return _BASES[0 if self._has_experts else 1]

    def launched_model(self) -> tuple[str, tuple[str, ...]]:
        """Returns the registered model, and settings of it.

        A released model does not need settings. A model of other sizes is the largest released one,
        with settings.
        """
        for name in registry.registered_names():
            if name.startswith("nllb."):
                released = registry.get_params(name)
                has_experts = released.task.encoder.moe is not None
                if has_experts == self._has_experts and not settings(released, self.on(released)):
                    return name, ()
        return super().launched_model()

    @property
    def _has_experts(self) -> bool:
        return any(self._moe_every(side) is not None for side in SIDES)

    def _moe_every(self, side: str) -> int | None:
        """Returns n if every n-th layer of a side has experts, or None."""
        if self.family is Family.M2M_100:
            return None
        step = self[f"{side}_sparse_step"]
        return int(step) if 0 < step <= self[f"{side}_layers"] else None

    def on(self, params: Params) -> Params:
        p = params.Copy()
        p.task.Set(
            source_vocab_size=self["vocab_size"],
            target_vocab_size=self["vocab_size"],
            dim=self["d_model"],
            shared_embeddings=self["tie_word_embeddings"],
            start_piece=self._start_piece(),
        )
        p.task.embedding.Set(
            scaled=self["scale_embedding"], first_position=self["pad_token_id"] + 1
        )
        p.task.input_dropout.rate = self["dropout"]

        for side in SIDES:
            self._set_stack(p.task.Get(side), side)
        return p

    def _start_piece(self) -> int | None:
        """Returns our id of the first piece of targets; None for BOS."""
        start = self["decoder_start_token_id"]
        ours = self.rows.index(start) if start in self.rows else start
        return None if ours == BOS_ID else int(ours)

    def _set_stack(self, stack: Params, side: str) -> None:
        heads = self[f"{side}_attention_heads"]
        hidden = {
            "hidden_dim": self[f"{side}_ffn_dim"],
            "activation": ACTIVATIONS[self["activation_function"]],
        }

        stack.num_layers = self[f"{side}_layers"]
        stack.layer.attention.Set(num_heads=heads, head_dim=self["d_model"] // heads)
        stack.layer.attention.dropout.rate = self["attention_dropout"]
        stack.layer.residual_dropout.rate = self["dropout"]
        stack.dense.Set(**hidden)
        stack.dense.hidden_dropout.rate = self["activation_dropout"]
        if stack.moe is None:
            return

        stack.moe.Set(num_experts=self["num_experts"], **hidden)
        stack.moe.hidden_dropout.rate = self["activation_dropout"]
        stack.moe.output_dropout.rate = self["moe_token_dropout"]
        # If only the other side has experts, the first ones of this side would follow its last
        # layer.
        every = self._moe_every(side)
        stack.moe_every = stack.num_layers + 1 if every is None else every
        if stack.num_layers % stack.moe_every:
            stack.Set(layers_as=Layers.UNROLLED)

    def fields_of(self, params: Params, rows: tuple[int, int, int]) -> dict[str, Any]:
        task = params.task
        has_experts = task.encoder.moe is not None
        family = Family.NLLB_MOE if has_experts else Family.M2M_100
        is_padded = task.embedding.first_position > 0
        start = BOS_ID if task.start_piece is None else task.start_piece

        fields: dict[str, Any] = {
            "architectures": [_ARCHITECTURES[family]],
            "model_type": str(family),
            "vocab_size": task.target_vocab_size,
            "d_model": task.dim,
            "scale_embedding": task.embedding.scaled,
            "tie_word_embeddings": task.shared_embeddings,
            "activation_function": activation_name(task.encoder.dense.activation),
            "dropout": task.encoder.layer.residual_dropout.rate,
            "attention_dropout": task.encoder.layer.attention.dropout.rate,
            "activation_dropout": task.encoder.dense.hidden_dropout.rate,
            "max_position_embeddings": 1024,  # Not a limit, since their tables of sinusoids grow.
            "is_encoder_decoder": True,
            "pad_token_id": rows[PAD_ID] if is_padded else -1,
            "bos_token_id": rows[BOS_ID],
            "eos_token_id": rows[EOS_ID],
            "decoder_start_token_id": rows[start] if start < len(rows) else start,
            "torch_dtype": "float32",
        }

        for side in SIDES:
            stack = task.Get(side)
            fields[f"{side}_layers"] = stack.num_layers
            fields[f"{side}_attention_heads"] = stack.layer.attention.num_heads
            fields[f"{side}_ffn_dim"] = stack.dense.hidden_dim
            fields[f"{side}_layerdrop"] = 0.0
            if has_experts:
                is_sparse = stack.moe_every <= stack.num_layers
                fields[f"{side}_sparse_step"] = stack.moe_every if is_sparse else 0
                fields["num_experts"] = stack.moe.num_experts

        if has_experts:
            fields |= {name: allowed[0] for name, allowed in _FIXED_OF_EXPERTS.items()}
            fields["moe_token_dropout"] = 0.0  # Its factor is already in the weights.
        return fields

    def table_candidates(self, path: str) -> tuple[str, ...]:
        if path == names.TABLE and self["tie_word_embeddings"]:
            return _TIED
        return _TABLES.get(path, ())

    def written_tables(self, path: str) -> list[str]:
        if path == names.SOFTMAX:
            return ["lm_head.weight"]
        if self["tie_word_embeddings"]:
            return ["model.shared.weight"]
        if path == names.SOURCE_TABLE:
            return ["model.shared.weight", "model.encoder.embed_tokens.weight"]
        return ["model.decoder.embed_tokens.weight"]

    def name(self, path: str, layer: int | None, expert: int | None) -> str:
        return names.name(path, self.family, layer, expert)
