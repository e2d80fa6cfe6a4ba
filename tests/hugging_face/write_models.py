"""Writes small NLLB-MoE and M2M-100 models, and transformers' results with them, for tests.

Run it where torch and transformers are installed, in the root of the checkout:

    python -m tests.hugging_face.write_models

It writes a folder of models/ for each model: config.json and model.safetensors, by save_pretrained,
with random float16 weights; and goldens.npz with one batch of `source` and `target` ids and the
float32 `logits` of each target position. searches.json has the results of `generate` by greedy and
beam search. nllb_moe_bin/ has the weights of nllb_moe in two files of torch.save, under the names
in facebook/nllb-moe-54b.

torch 2.13.0 and transformers 4.55.4 made the files in this folder. Versions 5.0 to 5.24, at least,
cannot be used: they send all tokens through experts 0 and 1, whatever the router chose.

B batch, T source length, L target length.
"""

import json
import math
import pathlib
from typing import Any

import numpy as np
import torch
from transformers import (
    M2M100Config,
    M2M100ForConditionalGeneration,
    NllbMoeConfig,
    NllbMoeForConditionalGeneration,
    PreTrainedModel,
)

MODELS = pathlib.Path(__file__).parent / "models"
PAD, EOS = 1, 2
TARGET_LANGUAGE = 40
_V = 47
_SIZES: dict[str, Any] = {
    "vocab_size": _V,
    "d_model": 16,
    "encoder_layers": 4,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 20,
    "max_position_embeddings": 64,
}
# A table for each side and one for the logits, and other options of models without experts.
_UNTIED: dict[str, Any] = {
    "encoder_layers": 1,
    "decoder_layers": 3,
    "tie_word_embeddings": False,
    "scale_embedding": False,
    "activation_function": "silu",
}
_STEPS = 14  # generate's max_length, which counts </s> at the beginning.


def main() -> None:
    """Writes all models."""
    torch.set_num_threads(1)
    moe = {"num_experts": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2}
    sparse = {
        "num_experts": 3,
        "encoder_layers": 3,
        "encoder_sparse_step": 3,
        "decoder_sparse_step": 0,
        "scale_embedding": False,
        "moe_token_dropout": 0.0,
        "activation_function": "gelu",
        "normalize_router_prob_before_dropping": True,
    }
    _write("nllb_moe", _model(NllbMoeConfig(**_SIZES | moe), seed=4))
    _write("nllb_moe_sparse", _model(NllbMoeConfig(**_SIZES | sparse), seed=9))
    _write("m2m_100", _model(M2M100Config(**_SIZES), seed=19))
    _write("m2m_100_untied", _model(M2M100Config(**_SIZES | _UNTIED), seed=23))
    _write_in_parts(_model(NllbMoeConfig(**_SIZES | moe), seed=4))


def _model(config: NllbMoeConfig | M2M100Config, seed: int) -> PreTrainedModel:
    """Returns a model in eval mode, whose weights are all random, also biases and norms."""
    is_moe = isinstance(config, NllbMoeConfig)
    cls = NllbMoeForConditionalGeneration if is_moe else M2M100ForConditionalGeneration
    model = cls._from_config(config, attn_implementation="eager").eval()

    rng = np.random.default_rng(seed)
    for name, weight in sorted(model.named_parameters()):
        values = rng.standard_normal(tuple(weight.shape))
        if any(table in name for table in ("shared", "embed_tokens", "lm_head")):
            values /= math.sqrt(config.d_model)
            values[EOS] *= 3.5  # So that sentences end.
            values[PAD] = 0.0  # Released models never generate it, either.
        elif weight.ndim == 2:
            values *= (3.0 if "router" in name else 1.0) / math.sqrt(weight.shape[1])
        else:
            values = values * 0.2 + (1.0 if name.endswith("norm.weight") else 0.0)
        # So float16 files hold exactly the numbers of the computation.
        weight.data.copy_(torch.from_numpy(values.astype(np.float16).astype(np.float32)))
    return model


def _write(name: str, model: PreTrainedModel) -> None:
    folder = MODELS / name
    source, target = _batch()
    with torch.no_grad():
        logits = model(
            input_ids=torch.tensor(source),
            attention_mask=torch.tensor(source != PAD),
            decoder_input_ids=torch.tensor(target),
            decoder_attention_mask=torch.tensor(target != PAD),
        ).logits
        searches = [_generated(model, source, settings) for settings in _SEARCHES]
    model.half().save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    (folder / "model.safetensors").chmod(0o644)
    np.savez_compressed(folder / "goldens.npz", source=source, target=target, logits=logits)
    (folder / "searches.json").write_text(json.dumps(searches, separators=(",", ":")) + "\n")

    ended = [row.index(EOS, 1) if EOS in row[1:] else None for row in searches[1]["ids"]]
    num_weights = sum(weight.numel() for weight in model.parameters())
    print(f"{name}: {num_weights} weights; the ends of beam search are {ended}")


_SEARCHES: tuple[dict[str, Any], ...] = (
    {"num_beams": 1},
    {"num_beams": 4},
    {"num_beams": 4, "early_stopping": True},
    {"num_beams": 4, "early_stopping": "never"},
    {"num_beams": 4, "length_penalty": 0.0},
    {"num_beams": 4, "length_penalty": 2.0},
    {"num_beams": 4, "max_length": 7, "num_return_sequences": 4},
)


def _generated(model: PreTrainedModel, source: np.ndarray, settings: dict) -> dict[str, Any]:
    """Returns the settings of a search, the ids of its hypotheses, and their scores."""
    settings = {"max_length": _STEPS, "length_penalty": 1.0, "early_stopping": False} | settings
    found = model.generate(
        input_ids=torch.tensor(source),
        attention_mask=torch.tensor(source != PAD),
        forced_bos_token_id=TARGET_LANGUAGE,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
        **settings,
    )
    scores = found.sequences_scores.tolist() if settings["num_beams"] > 1 else None
    return {"settings": settings, "ids": found.sequences.tolist(), "scores": scores}


def _batch() -> tuple[np.ndarray, np.ndarray]:
    """Returns right-padded ids of sources [B, T] and targets [B, L]: language, tokens, </s>."""
    rng = np.random.default_rng(7)
    source_lengths = [9, 5, 2, 7, 7, 4]
    target_lengths = [7, 3, 6, 1, 7, 4]
    source = np.full((6, max(source_lengths)), PAD, np.int64)
    target = np.full((6, max(target_lengths)), PAD, np.int64)
    for row, length in zip(source, source_lengths, strict=True):
        row[:length] = [_V - 5, *rng.integers(4, _V - 12, length - 2), EOS]
    for row, length in zip(target, target_lengths, strict=True):
        row[:length] = [EOS, TARGET_LANGUAGE, *rng.integers(4, _V - 12, 8)][:length]
    return source, target


def _write_in_parts(model: PreTrainedModel) -> None:
    folder = MODELS / "nllb_moe_bin"
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)

    weights = {name: weight.half() for name, weight in model.model.state_dict().items()}
    tied = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    names = sorted(name for name in weights if name not in tied)
    weight_map = {}
    for i in range(2):
        file = f"pytorch_model-{i + 1:05d}-of-00002.bin"
        part = {name: weights[name].clone() for name in names[i::2]}
        torch.save(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index) + "\n")


if __name__ == "__main__":
    main()
