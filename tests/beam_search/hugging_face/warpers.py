"""Computes the distributions from which Hugging Face's `generate` draws, for tests.

Run it where torch and transformers are installed, in the root of the checkout:

    python -m tests.beam_search.hugging_face.warpers

It writes warpers.npz beside itself: random `logits`, the `settings` (temperature, top_k, top_p; nan
means None), and for each setting the `probabilities` of all tokens, 0 for excluded tokens. The
present file was made by torch 2.13.0 and transformers 4.55.4.

B rows, V vocabulary, C settings.
"""

import pathlib

import numpy as np
import torch
from transformers.generation import logits_process

B, V = 6, 40
# Temperature, top_k, top_p.
_SETTINGS = [
    (0.7, None, None),
    (1.0, 1, None),
    (0.7, 5, None),
    (2.0, V, None),
    (1.0, None, 0.01),
    (0.7, None, 0.6),
    (1.0, None, 0.95),
    (3.0, None, 0.999),
    (1.0, None, 1.0),
    (0.7, 12, 0.8),
    (1.5, 3, 0.5),
    (1.0, 30, 0.3),
]


def main() -> None:
    """Writes the file."""
    logits = _logits()
    probabilities = [_drawn_from(torch.tensor(logits), *setting) for setting in _SETTINGS]
    settings = np.array(_SETTINGS, np.float64)  # None becomes nan.
    path = pathlib.Path(__file__).parent / "warpers.npz"
    np.savez_compressed(
        path, logits=logits, settings=settings, probabilities=np.stack(probabilities)
    )


def _logits() -> np.ndarray:
    """Returns float32 [B, V]: peaked and flat rows, one shifted row, and one with equal numbers."""
    scales = np.array([0.1, 1.0, 3.0, 10.0, 2.0, 2.0])[:, None]
    logits = scales * np.random.default_rng(0).standard_normal((B, V))
    logits[4] -= 500.0
    logits[5, ::4] = 4.0  # Ten equal numbers at the top: top-k keeps all of them.
    return logits.astype(np.float32)


def _drawn_from(
    scores: torch.Tensor, temperature: float, top_k: int | None, top_p: float | None
) -> np.ndarray:
    """Returns float32 [B, V], computed by the warpers in `generate`'s order."""
    warpers = [logits_process.TemperatureLogitsWarper(temperature)]
    if top_k is not None:
        warpers.append(logits_process.TopKLogitsWarper(top_k))
    if top_p is not None and top_p < 1:  # `generate` skips the warper for 1.
        warpers.append(logits_process.TopPLogitsWarper(top_p))

    for warper in warpers:
        scores = warper(None, scores)
    return torch.softmax(scores, -1).numpy()


if __name__ == "__main__":
    main()
