"""config.json of transformers' NLLB-MoE and M2M-100, and the settings of our task that it means.

    d_model, vocab_size, encoder_layers, encoder_attention_heads, encoder_ffn_dim      sizes
    scale_embedding, tie_word_embeddings, pad_token_id, decoder_start_token_id         the ends
    num_experts, encoder_sparse_step                                                   the experts

The first position is pad_token_id + 1. Our ids of padding and BOS are 0 and 1, which in released
models are 1 and 0: rows of tables change places. written_config.py has the way back.
"""

import dataclasses
import pathlib
import reprlib
from typing import Any

from lingvo_gshard import registry
from lingvo_gshard.core import hyperparams
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.files import json_records
from lingvo_gshard.hugging_face.names import Family
from lingvo_gshard.layers.activations import Activation
from lingvo_gshard.layers.repeat import Layers

CONFIG = "config.json"

# Our ids; that of BOS is also where targets begin without a start_piece.
PAD = 0
BOS = 1
EOS = 2
SIDES = ("encoder", "decoder")

_MAX_CONFIG_BYTES = 2**20
# Far above those of any model, and so few that a damaged number takes no memory.
_MAX_DIM = 2**18
_MAX_VOCAB = 2**24
_MAX_LAYERS = 512
_MAX_EXPERTS = 8192
_MAX_ALL_EXPERTS = 2**17  # Of all layers together.

ACTIVATIONS = {
    "relu": Activation.RELU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
}
# The defaults of the classes in transformers, which files of early versions leave out.
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
# What we compute is as theirs only with these values.
REQUIRED = {
    "router_bias": False,
    "router_dtype": "float32",
    "second_expert_policy": "all",
    "moe_eval_capacity_token_fraction": 1.0,
    "eos_token_id": EOS,
}
# The registered models that one of another size is made from: with experts, and without.
_BASES = ("nllb.MoE54B", "nllb.Dense600M")


@dataclasses.dataclass(frozen=True)
class Config:
    """A config.json: the family, the values that we read, and the order of the table's rows."""

    path: pathlib.Path
    family: Family
    values: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        """Returns a value; ValueError if it is missing and has no default."""
        if name in self.values:
            return self.values[name]
        if name in _DEFAULTS:
            return _DEFAULTS[name]
        raise ValueError(f"{self.path} has no {name}.")

    @property
    def rows(self) -> tuple[int, int, int]:
        """Returns the rows of a table there that are our ids 0, 1 and 2; the others are the same.

        Without padding, whose id is then -1, its row is the one that BOS and EOS leave.
        """
        pad = self["pad_token_id"]
        bos = self["bos_token_id"]
        eos = self["eos_token_id"]
        if pad == -1:
            pad = min({PAD, BOS, EOS} - {bos, eos})
        return (pad, bos, eos)

    @property
    def expert_scale(self) -> float:
        """Returns what experts' outputs are multiplied by: they are, in evaluation as well."""
        return 1.0 - float(self["moe_token_dropout"]) if self.family is Family.NLLB_MOE else 1.0


def read(folder: pathlib.Path) -> Config:
    """Returns a folder's config.json.

    Raises ValueError if it is missing, of another family, or of a model that we compute otherwise.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{path} is missing: give the folder of a model of transformers.")
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ValueError(f"{path.stat().st_size} bytes")
        values = dict(json_records.parse(path.read_bytes()))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is no JSON object: {error}.") from error

    model_type = values.get("model_type")
    if model_type not in list(Family):
        raise ValueError(
            f"{path}: model_type is {model_type!r}; expected one of {', '.join(Family)}."
        )
    config = Config(path, Family(model_type), values)
    _check(config)
    return config


def _check(config: Config) -> None:
    """Raises ValueError, which names the value, for a model that we compute otherwise."""
    _check_sizes(config)
    _check_types(config)
    required = dict(REQUIRED)
    if config.family is Family.M2M_100:
        required = {"eos_token_id": EOS}
    for name, value in required.items():
        if config[name] != value:
            raise ValueError(f"{config.path}: {name} is {config[name]!r}; expected {value!r}.")

    activation = config["activation_function"]
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(
            f"{config.path}: activation_function is {activation!r}; expected one of "
            f"{', '.join(ACTIVATIONS)}."
        )
    if set(config.rows) != {PAD, BOS, EOS}:
        raise ValueError(
            f"{config.path}: pad, bos and eos are {list(config.rows)}; expected 0, 1 and 2, in any "
            "order."
        )


def _check_sizes(config: Config) -> None:
    """Raises ValueError for a size that is no number, or larger than any model's."""
    limits = {"d_model": _MAX_DIM, "vocab_size": _MAX_VOCAB}
    for side in SIDES:
        limits[f"{side}_layers"] = _MAX_LAYERS
        limits[f"{side}_ffn_dim"] = _MAX_DIM
    if config.family is Family.NLLB_MOE:
        limits["num_experts"] = _MAX_EXPERTS

    for name, limit in limits.items():
        if not _is_integer(config[name]) or not 1 <= config[name] <= limit:
            raise ValueError(
                f"{config.path}: {name} is {reprlib.repr(config[name])}; expected 1 to {limit}."
            )

    if config.family is Family.NLLB_MOE:
        # Every layer may have experts.
        num_layers = sum(config[f"{side}_layers"] for side in SIDES)
        num_experts = config["num_experts"]
        if num_layers * num_experts > _MAX_ALL_EXPERTS:
            raise ValueError(
                f"{config.path}: num_experts is {num_experts} in so many layers; expected at most "
                f"{_MAX_ALL_EXPERTS} experts in all layers together."
            )

    for side in SIDES:
        heads = config[f"{side}_attention_heads"]
        if not _is_integer(heads) or heads < 1 or config["d_model"] % heads:
            raise ValueError(
                f"{config.path}: {side}_attention_heads is {reprlib.repr(heads)}; expected a "
                f"divisor of d_model {config['d_model']}."
            )


def _check_types(config: Config) -> None:
    """Raises ValueError for an id, a rate or a switch that is of another type."""
    expected = {}
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        is_id = _is_integer(config[name]) and -1 <= config[name] < config["vocab_size"]
        expected[name] = is_id, "an id of the vocabulary"
    for name in ("scale_embedding", "tie_word_embeddings"):
        expected[name] = isinstance(config[name], bool), "true or false"

    rates = ["dropout", "attention_dropout", "activation_dropout"]
    if config.family is Family.NLLB_MOE:
        rates.append("moe_token_dropout")
        for name in ("encoder_sparse_step", "decoder_sparse_step"):
            expected[name] = _is_integer(config[name]) and config[name] >= 0, "0 or more"
    for name in rates:
        is_number = _is_integer(config[name]) or isinstance(config[name], float)
        expected[name] = is_number and 0 <= config[name] < 1, "0 or more, below 1"

    for name, (is_right, what) in expected.items():
        if not is_right:
            raise ValueError(
                f"{config.path}: {name} is {reprlib.repr(config[name])}; expected {what}."
            )


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def launched_model(config: Config) -> tuple[str, tuple[str, ...]]:
    """Returns the registered model that a config.json is of, and `path=value` settings of it.

    A released model needs none. One of other sizes is the largest released one with others.
    """
    by_name = {}
    for name in _candidates(config):
        base = registry.get_params(name)
        by_name[name] = _settings(base, _with(base.Copy(), config))
    model = min(by_name, key=lambda name: len(by_name[name]))
    if by_name[model]:
        model = _BASES[0 if _has_experts(config) else 1]
    return model, by_name[model]


def _candidates(config: Config) -> list[str]:
    """Returns the registered models of the family that have experts, or have none."""
    has_experts = _has_experts(config)
    names = []
    for name in registry.registered_names():
        if name.startswith("nllb."):
            p = registry.get_params(name)
            if p.task.encoder.moe is not None and has_experts:
                names.append(name)
            elif p.task.encoder.moe is None and not has_experts:
                names.append(name)
    return names


def _has_experts(config: Config) -> bool:
    return any(_moe_every(config, side) is not None for side in SIDES)


def _moe_every(config: Config, side: str) -> int | None:
    """Returns n if every n-th layer of a side has experts; None if none has."""
    if config.family is Family.M2M_100:
        return None
    step = config[f"{side}_sparse_step"]
    return int(step) if 0 < step <= config[f"{side}_layers"] else None


def _with(p: Params, config: Config) -> Params:
    """Returns an experiment's settings with those of a config.json."""
    size = config["vocab_size"]
    p.task.Set(
        source_vocab_size=size,
        target_vocab_size=size,
        dim=config["d_model"],
        shared_embeddings=config["tie_word_embeddings"],
        start_piece=_start_piece(config),
    )
    p.task.embedding.Set(
        scaled=config["scale_embedding"], first_position=config["pad_token_id"] + 1
    )
    p.task.input_dropout.rate = config["dropout"]
    for side in SIDES:
        _set_stack(p.task.Get(side), config, side)
    return p


def _start_piece(config: Config) -> int | None:
    """Returns our id of the piece that targets begin with; None for BOS."""
    start = config["decoder_start_token_id"]
    ours = config.rows.index(start) if start in config.rows else start
    return None if ours == BOS else int(ours)


def _set_stack(stack: Params, config: Config, side: str) -> None:
    num_layers = config[f"{side}_layers"]
    heads = config[f"{side}_attention_heads"]
    hidden = {
        "hidden_dim": config[f"{side}_ffn_dim"],
        "activation": ACTIVATIONS[config["activation_function"]],
    }

    stack.num_layers = num_layers
    stack.layer.attention.Set(num_heads=heads, head_dim=config["d_model"] // heads)
    stack.layer.attention.dropout.rate = config["attention_dropout"]
    stack.layer.residual_dropout.rate = config["dropout"]
    stack.dense.Set(**hidden)
    stack.dense.hidden_dropout.rate = config["activation_dropout"]
    if stack.moe is None:
        return

    stack.moe.Set(num_experts=config["num_experts"], **hidden)
    stack.moe.hidden_dropout.rate = config["activation_dropout"]
    stack.moe.output_dropout.rate = config["moe_token_dropout"]
    # A side without experts in a model with some: its first ones would come after the last layer.
    every = _moe_every(config, side)
    stack.moe_every = num_layers + 1 if every is None else every
    if num_layers % stack.moe_every:
        stack.Set(layers_as=Layers.UNROLLED)


def _settings(base: Params, wanted: Params) -> tuple[str, ...]:
    """Returns the settings in which `wanted` differs from `base`, as --set takes them."""
    lines = hyperparams.differences(wanted.ToText(), base.ToText())
    settings = []
    for line in lines:
        path, _, values = line.partition(": ")
        value, _, _ = values.partition(", not ")
        settings.append(f"{path}={value}")
    return tuple(settings)
