"""The families of models that can be imported and exported, by the model_type in config.json."""

import pathlib

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.files import json_fields
from lingvo_gshard.files.json_fields import Fields
from lingvo_gshard.hugging_face.config import CONFIG, Config
from lingvo_gshard.hugging_face.encoder_decoder import EncoderDecoder
from lingvo_gshard.hugging_face.hy_v3 import HyV3
from lingvo_gshard.hugging_face.mixtral import Mixtral
from lingvo_gshard.hugging_face.names import Family
from lingvo_gshard.hugging_face.olmoe import Olmoe
from lingvo_gshard.hugging_face.qwen3_moe import Qwen3Moe
from lingvo_gshard.layers.gating_layers import TopKGating
from lingvo_gshard.layers.positions import RotaryPositions
from lingvo_gshard.model.language_model import LanguageModelTask
from lingvo_gshard.model.translation import TranslationTask

_MAX_CONFIG_BYTES = 2**20
_DECODERS = (Mixtral, Qwen3Moe, Olmoe, HyV3)
_CLASSES: dict[str, type[Config]] = {
    **{str(family): EncoderDecoder for family in Family},
    **{cls.MODEL_TYPE: cls for cls in _DECODERS},
}


def read(folder: pathlib.Path) -> Config:
    """Returns a folder's config.json.

    Raises ValueError if it is missing, of another family, or has values that we do not support.
    """
    path = folder if folder.suffix == ".json" else folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{path} is missing: give the folder of a model of transformers.")

    values = json_fields.read(path, _MAX_CONFIG_BYTES)
    model_type = values.get("model_type")
    if model_type not in list(_CLASSES):
        raise ValueError(
            f"{path}: model_type is {model_type!r}; expected one of {', '.join(_CLASSES)}."
        )

    config = _CLASSES[model_type](path, values)
    config.check()
    return config


def written(params: Params, rows: tuple[int, int, int]) -> Config:
    """Returns the config.json of an experiment whose exported table has these `rows`.

    These are their ids of our ids 0, 1 and 2. Raises ValueError, in one line, that names what the
    closest family cannot express.
    """
    task = params.task
    families: tuple[type[Config], ...] = _DECODERS
    if task.cls is TranslationTask:
        families = (EncoderDecoder,)
        if (task.encoder.moe is None) != (task.decoder.moe is None):
            raise ValueError("--to=huggingface: experts on one side alone cannot be exported.")
    elif task.cls is not LanguageModelTask:
        raise ValueError(f"--to=huggingface: {task.cls.__name__} cannot be exported.")
    elif task.decoder.moe is None:
        raise ValueError("--to=huggingface: decoders without experts cannot be exported.")
    elif task.decoder.layer.attention.positions.cls is not RotaryPositions:
        raise ValueError("--to=huggingface: decoders without rotary positions cannot be exported.")
    elif task.decoder.moe.gating.cls is not TopKGating:
        raise ValueError("--to=huggingface: decoders without TopKGating cannot be exported.")

    path = pathlib.Path(CONFIG)
    missing: dict[str, list[str]] = {}
    for family in families:
        fields = family(path, Fields(path, {})).fields_of(params, rows)
        config = family(path, Fields(path, fields))
        lost = config.inexpressible(params)
        if not lost:
            config.check()
            return config
        missing[config["model_type"]] = lost

    closest = min(missing, key=lambda name: len(missing[name]))
    raise ValueError(f"--to=huggingface: {closest} has no {'; nor '.join(missing[closest])}.")
