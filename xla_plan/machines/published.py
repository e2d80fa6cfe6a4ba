"""The published figures of machines.toml, by the first part of a topology's name."""

import pathlib
import tomllib
from typing import Any

_FIGURES = tomllib.loads(
    pathlib.Path(__file__).with_name("machines.toml").read_text(encoding="utf-8")
)
TPUS: dict[str, dict[str, Any]] = _FIGURES["tpu"]
GPUS: dict[str, dict[str, Any]] = _FIGURES["gpu"]
