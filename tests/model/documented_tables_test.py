"""Every table that docs/partitionings.md names places the toy model on 8 devices.

partitionings_test.py trains, evaluates and decodes with such tables.
"""

import pathlib
import re

import pytest

from bench import synthetic
from lingvo_gshard.model import placement
from lingvo_gshard.model.task_model import TaskModel

_DOCUMENT = pathlib.Path(__file__).parents[2] / "docs/partitionings.md"
_ROW = re.compile(r"\| ([^|]+) \| ((?:`[^`]+`(?:, )?)+) \|")
_DEVICES = 8
_STACKS = ("encoder", "decoder")

# Fewer tokens, in as many groups as there are devices: 8 rows of 16.
_SIZES = ["input.batch_size=8", "eval_input.batch_size=8", "decode.batch_size=8"]
_SIZES += [
    f"{batch}.{side}_len=16" for batch in ("input", "eval_input") for side in ("source", "target")
]
_SIZES += [f"task.{stack}.moe.group_size=16" for stack in _STACKS]
_SIZES += [f"task.{stack}.moe.dispatch=EINSUM" for stack in _STACKS]
_SIZES += ["decode.max_target_len=4", "decode.max_source_len=16"]

# The document's `task.*.stages`: two stages, and two blocks of two layers.
_STAGES = [
    f"task.{stack}.{setting}"
    for stack in _STACKS
    for setting in ("layers_as=LOOP", "remat=BLOCK", "num_layers=4", "stages=2", "microbatches=2")
]


def _documented():
    """The settings of each row of the table, by its name."""
    text = _DOCUMENT.read_text(encoding="utf-8")
    section = text.partition("\n## The ways of the literature, as tables\n")[2].partition("\n## ")[
        0
    ]
    rows = {}
    for name, settings in _ROW.findall(section):
        rows[name.split(" (")[0]] = re.findall(r"`([^`]+)`", settings)
    return rows


_ROWS = _documented()


def test_the_document_has_its_table():
    assert {"GShard", "Megatron", "ZeRO-2", "An Efficient 2D Method", "GPipe"} < _ROWS.keys()


@pytest.mark.parametrize("row", _ROWS)
def test_a_documented_table_places_the_toy_model(row):
    settings = list(_SIZES)
    for setting in _ROWS[row]:
        if setting.startswith("mesh="):
            setting = re.sub(r":\d+", ":2", setting)  # The document's meshes have more devices.
        settings += _STAGES if setting == "task.*.stages" else [setting]

    params = synthetic.experiment("toy.MoE8E4L", settings)
    placement.check_divisible(params, placement.partitioning(params, _DEVICES))
    TaskModel(params, placement.partitioning(params, _DEVICES))
