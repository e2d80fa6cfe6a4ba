"""Changes one thing in a folder of transformers: a field, a token, a tensor or a file.

The files keep their formats, so that their reader has to notice the change itself; fuzz.py judges
its answer.
"""

import copy
import dataclasses
import json
import pathlib
import random
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from lingvo_gshard.files import safetensors_file

_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n"
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, -1, 0.5, 1.5, 7, 2**31, "", "x", "never", [], [1], {}, {"x": 1}),
)
# Fields that are added to a file: some that users have written there, and one that is unknown.
_NEW_FIELDS = {
    "config.json": (
        "quantization_config tie_encoder_decoder pruned_heads hidden_size num_attention_heads "
        "num_beams forced_bos_token_id rope_scaling layer_norm_eps router_bias of_nobody"
    ),
    "generation_config.json": (
        "min_length max_new_tokens do_sample forced_bos_token_id repetition_penalty "
        "no_repeat_ngram_size bad_words_ids num_return_sequences eos_token_id of_nobody"
    ),
    "tokenizer_config.json": (
        "legacy_behaviour sp_model_kwargs language_codes do_lower_case src_lang cls_token "
        "extra_special_tokens chat_template of_nobody"
    ),
}
_NEW_FILES = (
    "README.md",
    "adapter_config.json",
    "chat_template.jinja",
    "flax_model.msgpack",
    "model-00009-of-00009.safetensors",
    "modeling_own.py",
    "pytorch_model.bin",
    "tf_model.h5",
)
_NEW_TENSORS = (
    "lm_head.weight",
    "model.decoder.embed_tokens.weight",
    "model.encoder.embed_positions.weights",
    "model.encoder.embed_tokens.weight",
    "model.encoder.layers.0.self_attn.q_proj.weight_scale",
    "shared.weight",
)


@dataclasses.dataclass(frozen=True)
class Change:
    """The changed content of one file, and the name of the changed thing."""

    path: pathlib.Path  # An existing file, or a new one.
    name: str  # The field's, tensor's or file's name.
    content: bytes


def change(folder: pathlib.Path, rng: random.Random) -> Change:
    """Returns a random change of a folder."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    texts = [path for path in files if path.suffix == ".json"]
    tensors = [path for path in files if path.suffix == ".safetensors"]
    draw = rng.random()
    if draw < 0.7:
        return _other_json(rng.choice(texts), rng)
    if draw < 0.9 and tensors:
        return _other_tensors(rng.choice(tensors), rng)
    if draw < 0.95:
        path = rng.choice(files)
        return Change(path, path.name, _POINTER)
    name = rng.choice([name for name in _NEW_FILES if not (folder / name).exists()])
    return Change(folder / name, name, b'{"x": 1}')


def _other_json(path: pathlib.Path, rng: random.Random) -> Change:
    """Returns a JSON file with a new field, or with another value in one of its fields."""
    before = json.loads(path.read_text(encoding="utf-8"))
    while True:
        values = copy.deepcopy(before)
        if rng.random() < 0.2 and path.name in _NEW_FIELDS:
            field = rng.choice(_NEW_FIELDS[path.name].split())
            if field not in values:
                values[field] = rng.choice(_VALUES)
                if values[field]:
                    return Change(path, field, json.dumps(values).encode())
            continue

        field = rng.choice(list(values))
        container, key = rng.choice([(values, field), *_places(values[field])])
        old = container[key]
        container[key] = _other_value(old, rng)
        # False, null, 0 and an empty list count as the same value.
        if container[key] != old and (container[key] or old):
            return Change(path, field, json.dumps(values).encode())


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields each list or object within a value, with the index or key of each of its values."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def _other_value(old: Any, rng: random.Random) -> Any:
    """Returns another value, which may be close to the old one."""
    if rng.random() < 0.5:
        return rng.choice(_VALUES)
    if isinstance(old, bool):
        return not old
    if isinstance(old, int | float):
        return old + rng.choice((-1, 1))
    if isinstance(old, str):
        return old + "x"
    if isinstance(old, list):
        return old[:-1]
    if isinstance(old, dict):
        # A false flag means the same as a missing one.
        dropped = rng.choice([key for key, value in old.items() if value] or [None])
        return {key: value for key, value in old.items() if key != dropped}
    return "x"


def _other_tensors(path: pathlib.Path, rng: random.Random) -> Change:
    """Returns a safetensors file in which one tensor is changed, missing, renamed or new."""
    contents = safetensors_file.read(path)
    arrays = {name: np.array(array) for name, array in contents.arrays.items()}
    metadata = {"format": "pt"}
    name = rng.choice(sorted(arrays))
    how = rng.choice(("changed", "changed", "changed", "missing", "renamed", "new", "format"))
    if how == "changed":
        index = rng.randrange(arrays[name].size)
        arrays[name].flat[index] += 1
    elif how == "missing":
        del arrays[name]
    elif how == "renamed":
        arrays[name + "_of_nobody"] = arrays.pop(name)
    elif how == "format":
        metadata = {"format": "tf"}
    else:
        name = rng.choice([new for new in _NEW_TENSORS if new not in arrays])
        like = arrays.get("model.shared.weight", np.ones((2, 2), np.float32))
        arrays[name] = like + 1
    return Change(path, name, _written(arrays, metadata))


def _written(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "model.safetensors")
        safetensors_file.write(path, arrays, metadata)
        return path.read_bytes()
