"""Compares the logits of NLLB-MoE in the installed transformers with the logits in 4.55.4.

Run it where torch and transformers are installed, in the root of the checkout:

    python -m tests.hugging_face.compare_transformers

It prints the largest difference of logits, for a model with experts and one without. For the model
with experts, it also prints whether experts other than 0 and 1 have an effect.
"""

import numpy as np
import torch
import transformers

from tests.hugging_face.write_models import MODELS, PAD


def main() -> None:
    """Prints a line for each model."""
    print(f"transformers {transformers.__version__}")
    for name in ("m2m_100", "nllb_moe"):
        difference = np.abs(_logits(name) - _golden(name))[_is_token(name)].max()
        print(f"{name}: logits differ from those of 4.55.4 by {difference:.1e}")

    same = np.array_equal(_logits("nllb_moe"), _logits("nllb_moe", without_others=True))
    effect = "no effect" if same else "an effect"
    print(f"nllb_moe: experts 2 and 3 have {effect}")


def _golden(name: str) -> np.ndarray:
    return np.load(MODELS / name / "goldens.npz")["logits"]


def _is_token(name: str) -> np.ndarray:
    return np.load(MODELS / name / "goldens.npz")["target"] != PAD


def _logits(name: str, without_others: bool = False) -> np.ndarray:
    """Returns the logits of the batch, optionally with zeros as the weights of experts 2 and 3."""
    batch = np.load(MODELS / name / "goldens.npz")
    source = torch.tensor(batch["source"])
    target = torch.tensor(batch["target"])
    cls = transformers.AutoModelForSeq2SeqLM
    model = cls.from_pretrained(MODELS / name, attn_implementation="eager").float().eval()
    if without_others:
        for weight_name, weight in model.named_parameters():
            if "expert_2" in weight_name or "expert_3" in weight_name:
                weight.data.zero_()
    with torch.no_grad():
        return model(
            input_ids=source,
            attention_mask=(source != PAD).long(),
            decoder_input_ids=target,
            decoder_attention_mask=(target != PAD).long(),
        ).logits.numpy()


if __name__ == "__main__":
    main()
