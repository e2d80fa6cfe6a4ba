"""A complete folder of transformers: weights, a tokenizer, options of generate."""

import json
import pathlib

import numpy as np

from bench import import_model
from lingvo_gshard.files import safetensors_file
from lingvo_gshard.hugging_face.names import Family
from tests.input import fairseq_vocabulary_test

SIZES = {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
# The fields that save_pretrained writes, and some that a user sets.
_CONFIG = {
    "architectures": ["M2M100ForConditionalGeneration"],
    "decoder_start_token_id": 2,
    "dropout": 0.1,
    "encoder_layerdrop": 0.05,
    "is_encoder_decoder": True,
    "pad_token_id": 1,
    "scale_embedding": True,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "transformers_version": "4.57.6",
}
_GENERATION = {
    "decoder_start_token_id": 2,
    "early_stopping": True,
    "eos_token_id": 2,
    "length_penalty": 0.7,
    "max_length": 12,
    "min_length": 3,
    "num_beams": 3,
    "pad_token_id": 1,
    "repetition_penalty": 1.2,
    "transformers_version": "4.57.6",
}


def write(folder: pathlib.Path, family: Family = Family.M2M_100, num_parts: int = 1) -> None:
    """Writes the folder; its tables are tied, and its tokenizer is NLLB's with added tokens."""
    golden = fairseq_vocabulary_test.write_added(folder, "nllb_bpe")
    vocab_size = golden["files"]["config.json"]["vocab_size"]
    fields = {"model_type": str(family), "vocab_size": vocab_size} | _CONFIG | SIZES
    for side in ("encoder", "decoder"):
        fields[f"{side}_layers"] = 2
        fields[f"{side}_attention_heads"] = 2
    import_model.write(folder, num_experts=2, num_parts=num_parts, **fields)
    if family is Family.M2M_100:
        _drop_fields(folder / "config.json", ("num_experts", "moe_token_dropout"))
    (folder / "generation_config.json").write_text(json.dumps(_GENERATION))

    if num_parts == 1:
        _whole(folder)


def _drop_fields(path: pathlib.Path, names: tuple[str, ...]) -> None:
    fields = json.loads(path.read_text())
    for name in names:
        del fields[name]
    path.write_text(json.dumps(fields))


def _whole(folder: pathlib.Path) -> None:
    """Writes all weights to one file, with sinusoids, like early versions of transformers."""
    part = folder / "model-00001-of-00001.safetensors"
    arrays = {name: np.array(array) for name, array in safetensors_file.read(part).arrays.items()}
    arrays["model.encoder.embed_positions.weights"] = np.zeros((5, 16), np.float32)
    safetensors_file.write(folder / "model.safetensors", arrays, {"format": "pt"})
    part.unlink()
    (folder / "model.safetensors.index.json").unlink()
