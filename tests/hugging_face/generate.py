"""Writes the results of generate, without arguments, for folders with a generation_config.json.

Run it where torch and transformers are installed, in the root of the checkout:

    python -m tests.hugging_face.generate

It writes models/generate.json. For the model of models/m2m_100, it has each of CONFIGS and the ids
that generate finds with it for the sources of goldens.npz. torch 2.13.0 and transformers 4.57.6
made the file in this folder.
"""

import json
import pathlib
import shutil
import tempfile
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSeq2SeqLM

_MODELS = pathlib.Path(__file__).parent / "models"
_PAD = 1
_IDS = {
    "bos_token_id": 0,
    "decoder_start_token_id": 2,
    "eos_token_id": 2,
    "forced_bos_token_id": 40,
    "pad_token_id": _PAD,
}
CONFIGS: tuple[dict[str, Any], ...] = (
    {"num_beams": 3, "length_penalty": 0.3, "early_stopping": True, "max_length": 11},
    {"num_beams": 2, "min_length": 7, "max_length": 9, "num_return_sequences": 2},
    {"num_beams": 2, "min_new_tokens": 6, "max_new_tokens": 9, "early_stopping": "never"},
    {"max_length": 12, "num_beams": 4, "length_penalty": 0.0},
    {"num_beams": 1, "min_length": 5, "max_length": 8, "length_penalty": 2.0},
)


def main() -> None:
    """Writes the file."""
    torch.set_num_threads(1)
    source = np.load(_MODELS / "m2m_100" / "goldens.npz")["source"]
    found = []
    for config in CONFIGS:
        with tempfile.TemporaryDirectory() as directory:
            folder = pathlib.Path(directory)
            for name in ("config.json", "model.safetensors"):
                shutil.copy(_MODELS / "m2m_100" / name, folder)
            (folder / "generation_config.json").write_text(json.dumps(_IDS | config))
            model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32)
        ids = model.generate(torch.tensor(source), attention_mask=torch.tensor(source != _PAD))
        found.append({"config": _IDS | config, "ids": ids.tolist()})
    path = _MODELS / "generate.json"
    path.write_text(json.dumps(found, separators=(",", ":")) + "\n")
    print(f"{path}: {[np.shape(one['ids']) for one in found]}")


if __name__ == "__main__":
    main()
