"""Loads the folder of export_model.py with transformers, and writes its results.

See there. torch 2.13.0 and transformers 4.55.4 made the file in this folder.
"""

import hashlib
import pathlib
import sys

import numpy as np
import torch
from transformers import AutoModelForSeq2SeqLM


def main(folder: pathlib.Path) -> None:
    """Writes exported.npz."""
    model, info = AutoModelForSeq2SeqLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info.values()), info

    batch = {name: torch.tensor(array) for name, array in np.load(folder / "batch.npz").items()}
    source = {
        "input_ids": batch["source_ids"].long(),
        "attention_mask": batch["source_segment_ids"],
    }
    with torch.no_grad():
        logits = model.eval()(
            **source,
            decoder_input_ids=batch["target_ids"].long(),
            decoder_attention_mask=batch["target_segment_ids"],
        ).logits
        ids = model.generate(**source)  # The options come from generation_config.json.

    sha256 = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    path = pathlib.Path(__file__).with_name("exported.npz")
    np.savez_compressed(path, sha256=sha256, logits=logits.numpy(), ids=ids.numpy())
    print(f"{type(model).__name__}: {ids.tolist()}")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
