"""The config.json of one of our tasks, for NLLB-MoE or M2M-100: see encoder_decoder.py."""

from typing import Any

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.hugging_face.config import ACTIVATIONS
from lingvo_gshard.hugging_face.encoder_decoder import FIXED_OF_EXPERTS, SIDES
from lingvo_gshard.hugging_face.names import Family
from lingvo_gshard.input.example_codec import BOS_ID, EOS_ID, PAD_ID
from lingvo_gshard.layers.gating import CapacityBy
from lingvo_gshard.layers.gating_layers import Top2Gating
from lingvo_gshard.layers.norms import LayerNorm
from lingvo_gshard.layers.positions import NoPositions
from lingvo_gshard.model.translation import TranslationTask

_EPSILON = 1e-5  # The epsilon of all norms in transformers.


def written(task: Params, rows: tuple[int, int, int]) -> dict[str, Any]:
    """Returns the config.json of a task whose exported table has these `rows`; see Config.rows.

    Raises ValueError, in one line, if transformers' models cannot express the task.
    """
    problems = _inexpressible(task)
    if problems:
        raise ValueError(
            f"--to=huggingface: transformers' models have no {'; nor '.join(problems)}."
        )

    has_experts = task.encoder.moe is not None
    is_padded = task.embedding.first_position > 0
    start = BOS_ID if task.start_piece is None else task.start_piece
    config: dict[str, Any] = {
        "architectures": [
            "NllbMoeForConditionalGeneration" if has_experts else "M2M100ForConditionalGeneration"
        ],
        "model_type": str(Family.NLLB_MOE if has_experts else Family.M2M_100),
        "vocab_size": task.target_vocab_size,
        "d_model": task.dim,
        "scale_embedding": task.embedding.scaled,
        "tie_word_embeddings": task.shared_embeddings,
        "activation_function": _activation_name(task),
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
        config[f"{side}_layers"] = stack.num_layers
        config[f"{side}_attention_heads"] = stack.layer.attention.num_heads
        config[f"{side}_ffn_dim"] = stack.dense.hidden_dim
        config[f"{side}_layerdrop"] = 0.0
        if has_experts:
            is_sparse = stack.moe_every <= stack.num_layers
            config[f"{side}_sparse_step"] = stack.moe_every if is_sparse else 0
            config["num_experts"] = stack.moe.num_experts
    if has_experts:
        config |= {name: allowed[0] for name, allowed in FIXED_OF_EXPERTS.items()}
        config["moe_token_dropout"] = 0.0  # Its factor is already in the weights.
    return config


def _activation_name(task: Params) -> str:
    activation = task.encoder.dense.activation
    return next(name for name, ours in ACTIVATIONS.items() if ours is activation)


def _inexpressible(task: Params) -> list[str]:
    """Returns the features of a task that transformers' models lack, as nouns."""
    if task.cls is not TranslationTask:
        return [f"{task.cls.__name__}"]
    embedding = task.embedding
    problems = _missing(
        {
            "embeddings without sinusoids": embedding.sinusoids,
            f"first position {embedding.first_position}": embedding.first_position in (0, 2),
            f"source_vocab_size {task.source_vocab_size} beside target_vocab_size "
            f"{task.target_vocab_size}": task.source_vocab_size == task.target_vocab_size,
            "experts on one side alone by task.*.moe=None": (task.encoder.moe is None)
            == (task.decoder.moe is None),
            "activations that differ by side": task.encoder.dense.activation
            is task.decoder.dense.activation,
        }
    )
    for side in SIDES:
        problems += [f"{problem} in the {side}" for problem in _of_stack(task.Get(side), task.dim)]

    both_have_experts = task.encoder.moe is not None and task.decoder.moe is not None
    if both_have_experts and task.encoder.moe.num_experts != task.decoder.moe.num_experts:
        problems.append("numbers of experts that differ by side")
    return problems


def _of_stack(stack: Params, dim: int) -> list[str]:
    attention = stack.layer.attention
    dense = stack.dense
    problems = _missing(
        {
            f"{stack.layer.norm.cls.__name__}": stack.layer.norm.cls is LayerNorm,
            f"{attention.positions.cls.__name__}": attention.positions.cls is NoPositions,
            "unscaled products of attention": attention.scaled,
            f"{attention.num_heads} heads of {attention.head_dim} beside dim {dim}": (
                attention.num_heads * attention.head_dim == dim
            ),
            "gated feed-forwards": not dense.gated,
        }
    )
    moe = stack.moe
    if moe is None:
        return problems
    return problems + _missing(
        {
            f"{moe.gating.cls.__name__}": moe.gating.cls is Top2Gating,
            "shared experts": not moe.num_shared,
            "gated experts": not moe.gated,
            f"experts of {moe.hidden_dim} beside layers of {dense.hidden_dim}": (
                moe.hidden_dim == dense.hidden_dim
            ),
            "experts with an activation of their own": moe.activation is dense.activation,
            "capacity in evaluation": moe.eval_capacity.by is CapacityBy.TOKENS,
        }
    )


def _missing(is_expressible: dict[str, bool]) -> list[str]:
    return [noun for noun, is_there in is_expressible.items() if not is_there]


def epsilons(task: Params) -> set[float]:
    """Returns the epsilons of a task's norms that differ from transformers'."""
    return {task.Get(side).layer.norm.epsilon for side in SIDES} - {_EPSILON}
