"""The files of a folder of transformers that hold its weights.

A folder may have several of these forms. Like transformers, we use the first one:

    model.safetensors
    model.safetensors.index.json    and the parts that it names, such as
                                    model-00001-of-00064.safetensors
    pytorch_model.bin
    pytorch_model.bin.index.json    and the parts that it names
"""

import dataclasses
import pathlib
from typing import Any

from lingvo_gshard.files import git_lfs, json_fields, safetensors_file
from lingvo_gshard.files.json_fields import some
from lingvo_gshard.files.safetensors_parts import INDEX_SUFFIX
from lingvo_gshard.files.tensor_span import TensorSpan
from lingvo_gshard.hugging_face import torch_file

_ADAPTER = "adapter_config.json"
_FORMATS = ("pt", "mlx", None)  # Formats in which a product's matrix is [out, in].


@dataclasses.dataclass(frozen=True)
class WeightFiles:
    """The places of a folder's tensors, by name, and the files that hold or list them."""

    spans: dict[str, TensorSpan]
    paths: frozenset[pathlib.Path]
    not_used: tuple[str, ...]  # Lines that name the unused fields of an index.


def find(folder: pathlib.Path) -> WeightFiles:
    """Returns the weights of a folder, from the headers of its files.

    Raises ValueError for a folder without weights or with an adapter, and for a file that is
    missing, damaged, a pointer of git-lfs, or another framework's.
    """
    if (folder / _ADAPTER).is_file():
        raise ValueError(
            f"{folder / _ADAPTER}: an adapter changes the model's weights; merge it, and save the "
            "whole model."
        )

    for stem in ("model.safetensors", "pytorch_model.bin"):
        if (folder / stem).is_file():
            return WeightFiles(_spans(folder / stem), frozenset([folder / stem]), ())
        index = folder / f"{stem}{INDEX_SUFFIX}"
        if index.is_file():
            return _indexed(index)

    raise ValueError(
        f"{folder} has no weights: neither model.safetensors nor pytorch_model.bin, nor an index "
        "of their parts."
    )


def _spans(path: pathlib.Path) -> dict[str, TensorSpan]:
    """Returns the tensors of a file; raises ValueError for one that TensorFlow or Flax wrote."""
    git_lfs.check(path)
    if path.suffix == ".bin":
        return torch_file.spans(path)
    contents = safetensors_file.read(path)
    written_as = contents.metadata.get("format")
    if written_as not in _FORMATS:
        raise ValueError(f"{path}: its metadata has the format {written_as!r}; expected 'pt'.")
    return contents.spans


def _indexed(index: pathlib.Path) -> WeightFiles:
    """Returns the tensors in the files that an index names."""
    fields = json_fields.read(index)
    try:
        weight_map: dict[str, Any] = dict(fields.get("weight_map"))
        files = {str(file) for file in weight_map.values()}
        if any(pathlib.PurePath(file).name != file for file in files):
            raise ValueError("it names files of other folders")
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{index} is damaged: it does not describe weights ({error!r})."
        ) from error

    spans = {}
    paths = {index}
    for file in sorted(files):
        paths.add(index.parent / file)
        in_file = _spans(index.parent / file)
        for name, span in in_file.items():
            if weight_map.get(name) != file:
                raise ValueError(f"{index} does not say that {file} has {json_fields.shown(name)}.")
            spans[name] = span
    missing = sorted(weight_map.keys() - spans.keys())
    if missing:
        raise ValueError(f"{index.parent / weight_map[missing[0]]} lacks {some(missing)}.")
    return WeightFiles(spans, frozenset(paths), tuple(json_fields.not_used(fields)))
