"""Writes small open mixtures of experts, and transformers' results with them, for tests.

Run it where torch and transformers are installed, in the root of the checkout:

    python -m tests.hugging_face.write_decoders

It writes a folder of models/ for each model: config.json and model.safetensors, by save_pretrained,
with random weights of float16's values in float32; goldens.npz with `ids` [B, L] of one batch and
their `logits` [B, L, V], and with `prompts` of `prompt_lengths` and the ids that generate adds to
them by `greedy` search, padded by -1; and counts.json with the weights of the model, and those that
a token uses. torch 2.14.1 and transformers 5.24.0 made the files in this folder.

Special tokens have other ids than ours, and not the lowest ones.

B batch, L length, V vocabulary.
"""

import json
import math
import pathlib
from typing import Any

import numpy as np
import torch
from transformers import (
    HYV3Config,
    HYV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

MODELS = pathlib.Path(__file__).parent / "models"
_STEPS = 12
_NUM_PROMPTS = 50  # For each of four lengths.
_SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 20,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "pad_token_id": 57,
    "bos_token_id": 1,
    "eos_token_id": 40,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}


def main() -> None:
    """Writes all models."""
    torch.set_num_threads(1)
    fine = {"moe_intermediate_size": 12, "head_dim": 6}
    local = {"num_local_experts": 4, "num_experts_per_tok": 2, "bos_token_id": 1, "eos_token_id": 2}
    mixtral = MixtralConfig(**_SIZES | local | {"pad_token_id": None, "head_dim": 6})
    _write("mixtral", MixtralForCausalLM, mixtral, 3)
    qwen3 = Qwen3MoeConfig(
        **_SIZES | _EXPERTS | fine,
        mlp_only_layers=[1],
        norm_topk_prob=True,
        tie_word_embeddings=True,
    )
    _write("qwen3_moe", Qwen3MoeForCausalLM, qwen3, 4)
    _write("olmoe", OlmoeForCausalLM, OlmoeConfig(**_SIZES | _EXPERTS), 5)
    hy_v3 = HYV3Config(**_SIZES | _EXPERTS | fine, num_shared_experts=2)
    _write("hy_v3", HYV3ForCausalLM, hy_v3, 6)


def _write(name: str, cls: type[PreTrainedModel], config: Any, seed: int) -> None:
    model = cls._from_config(config, attn_implementation="eager").eval()
    model.set_experts_implementation("eager")
    _randomize(model, seed)
    folder = MODELS / name
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        ids = rng.integers(0, config.vocab_size, (5, 8))
        logits = model(input_ids=torch.tensor(ids)).logits
        prompts, lengths, greedy = _searched(model, rng)
        num_ended = int((greedy == _end(config)).any(1).sum())

    folder.mkdir(exist_ok=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    (folder / "model.safetensors").chmod(0o644)
    np.savez_compressed(
        folder / "goldens.npz",
        ids=ids,
        logits=logits.numpy(),
        prompts=prompts,
        prompt_lengths=lengths,
        greedy=greedy,
    )
    counts = _counts(model, config)
    (folder / "counts.json").write_text(json.dumps(counts) + "\n")
    print(f"{name}: {counts}; {num_ended} of {len(greedy)} searches end before the last step")


def _randomize(model: PreTrainedModel, seed: int) -> None:
    """Gives all weights random values, norms and the biases of experts included."""
    rng = np.random.default_rng(seed)
    tensors = dict(model.named_parameters())
    tensors |= {name: x for name, x in model.named_buffers() if "e_score" in name}
    for name, weight in sorted(tensors.items()):
        values = rng.standard_normal(tuple(weight.shape))
        if "embed_tokens" in name or "lm_head" in name:
            values /= math.sqrt(model.config.hidden_size)
            values[_end(model.config)] *= 2.5  # So that texts end.
        elif weight.ndim > 1:
            values *= (3.0 if "gate.weight" in name else 1.0) / math.sqrt(weight.shape[-1])
        else:
            values = values * 0.2 + (0.0 if "e_score" in name else 1.0)
        weight.data.copy_(torch.from_numpy(values.astype(np.float16).astype(np.float32)))


def _end(config: Any) -> int:
    return int(config.eos_token_id)


def _searched(model: PreTrainedModel, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Returns prompts [B, L], their lengths [B], and the ids that follow, -1 after EOS."""
    config = model.config
    longest = 6
    prompts = []
    lengths = []
    found = []
    for length in (1, 3, 4, longest):
        batch = rng.integers(0, config.vocab_size, (_NUM_PROMPTS, length))
        ids = model.generate(
            input_ids=torch.tensor(batch),
            attention_mask=torch.ones(batch.shape, dtype=torch.long),
            max_new_tokens=_STEPS,
            do_sample=False,
            pad_token_id=config.pad_token_id or 0,
        )[:, length:].numpy()
        ids = np.pad(ids, ((0, 0), (0, _STEPS - ids.shape[1])), constant_values=-1)
        is_after = np.cumsum(ids == _end(config), 1) - (ids == _end(config)) > 0
        found.append(np.where(is_after, -1, ids))
        prompts.append(np.pad(batch, ((0, 0), (0, longest - length))))
        lengths += [length] * _NUM_PROMPTS
    return np.concatenate(prompts), np.array(lengths), np.concatenate(found)


def _counts(model: PreTrainedModel, config: Any) -> dict[str, int]:
    """Returns the number of all weights, and of the weights that a token uses."""
    total = sum(weight.numel() for weight in model.parameters())
    total += sum(x.numel() for name, x in model.named_buffers() if "e_score" in name)
    experts = sum(
        weight.numel() for name, weight in model.named_parameters() if ".experts." in name
    )
    used = experts * config.num_experts_per_tok // config.num_local_experts
    return {"all": total, "active": total - experts + used}


if __name__ == "__main__":
    main()
