"""Computes a small Llama's logits and generated ids by Hugging Face's code, for tests.

Run it where torch and transformers are installed, in the root of the checkout:

    python -m tests.model.hugging_face.llama

It writes llama.npz and llama_tied.npz beside itself: random weights under the names of their
module, packed `ids`, and the `logits` of each position. llama.npz also has `prompts` of
`prompt_lengths`, padded at the end; the ids that `generate` adds to them by `greedy` search and by
`beam` search; and the beam's `scores`. torch 2.13.0 and transformers 4.55.4 made the files here.

A beam's scores are sums of log-probabilities: with length_penalty 0 they are ranked as ours are
with length_norm_alpha 0. (Otherwise Hugging Face divides by n ** length_penalty, and we, as Wu et
al. do, by ((5 + n) / 6) ** alpha.) Within _STEPS all of a beam's hypotheses end: at the last step,
Hugging Face returns active hypotheses without EOS, and we end them.

B batch, L length, T length of prompts, V vocabulary, k beam.
"""

import pathlib

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

V, M, H, N, D, NUM_LAYERS = 29, 12, 20, 3, 4, 2
PAD, BOS, EOS = 0, 1, 2
K = 4
_L, _STEPS = 9, 14
_SEED = 16  # With this seed, all hypotheses end, after different numbers of steps.
_HERE = pathlib.Path(__file__).parent


def main() -> None:
    """Writes both files."""
    with torch.no_grad():
        torch.manual_seed(_SEED)
        model = _model(tied=False)
        _write("llama", model, _logits(model) | _searches(model))

        tied = _model(tied=True)
        _write("llama_tied", tied, _logits(tied))


def _logits(model: LlamaForCausalLM) -> dict[str, np.ndarray]:
    ids = torch.randint(4, V, (3, _L))
    ids[:, 0] = BOS
    return {"ids": ids.numpy(), "logits": model(ids).logits.numpy()}


def _searches(model: LlamaForCausalLM) -> dict[str, np.ndarray]:
    prompt_lengths = torch.tensor([5, 3, 1])
    is_token = torch.arange(5) < prompt_lengths[:, None]
    prompts = torch.randint(4, V, (3, 5))
    prompts[:, 0] = BOS
    prompts = torch.where(is_token, prompts, PAD)

    greedy = [_generated(model, prompts, prompt_lengths, row, 1) for row in range(3)]
    beam = [_generated(model, prompts, prompt_lengths, row, K) for row in range(3)]
    assert all((ids == EOS).any(1).all() for ids, _ in [*greedy, *beam]), "choose another seed"
    return {
        "prompts": prompts.numpy(),
        "prompt_lengths": prompt_lengths.numpy(),
        "greedy": np.stack([ids[0] for ids, _ in greedy]),
        "beam": np.stack([ids for ids, _ in beam]),
        "scores": np.stack([scores for _, scores in beam]),
    }


def _write(name: str, model: LlamaForCausalLM, arrays: dict[str, np.ndarray]) -> None:
    weights = {path: weight.numpy() for path, weight in model.named_parameters()}
    np.savez_compressed(_HERE / f"{name}.npz", **weights, **arrays)


def _model(tied: bool) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=M,
        intermediate_size=H,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=N,
        num_key_value_heads=N,
        head_dim=D,
        rms_norm_eps=1e-5,
        rope_theta=500.0,
        tie_word_embeddings=tied,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).eval()
    for path, weight in model.named_parameters():
        scale = 0.5 if weight.ndim < 2 else weight.shape[-1] ** -0.5
        weight.copy_(scale * torch.randn(weight.shape) + (weight.ndim < 2) * 1.0)
        if path == "lm_head.weight":
            weight[EOS] *= 2.0  # So that hypotheses end.
    return model


def _generated(model, prompts, prompt_lengths, row, num_beams):
    """Returns the ids that continue one prompt, int [k, steps], and their scores, [k]."""
    length = int(prompt_lengths[row])
    prompt = prompts[row : row + 1, :length]
    found = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=_STEPS,
        do_sample=False,
        num_beams=num_beams,
        num_return_sequences=num_beams,
        length_penalty=0.0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    ids = found.sequences[:, length:].numpy()
    # Shorter hypotheses are padded with EOS.
    is_after = np.cumsum(ids == EOS, 1) - (ids == EOS) > 0
    ids = np.where(is_after, PAD, ids)
    padded = np.full((num_beams, _STEPS), PAD)
    padded[:, : ids.shape[1]] = ids
    scores = found.sequences_scores.numpy() if num_beams > 1 else np.zeros(1)
    return padded, scores


if __name__ == "__main__":
    main()
