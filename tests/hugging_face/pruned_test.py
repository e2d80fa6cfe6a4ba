"""An NLLB-MoE with fewer experts can be exported to transformers, too."""

import json

import numpy as np
import pytest

from lingvo_gshard.files import safetensors_file
from lingvo_gshard.hugging_face import exporting, importing
from lingvo_gshard.runs import launch as launches
from lingvo_gshard.runs import pruning
from lingvo_gshard.runs.prune_request import Request
from lingvo_gshard.runs.run import open_run
from tests.hugging_face import models

# The remaining two of four experts, in the encoder's layers 1 and 3 and the decoder's layer 1.
_KEPT = {"encoder_1": (1, 3), "encoder_3": (0, 1), "decoder_1": (0, 2)}


def _exported(logdir, folder):
    run = open_run(launches.recorded(str(logdir)), str(logdir), 1)
    exporting.export_folder(run, folder)
    return dict(safetensors_file.read(folder / "model.safetensors").arrays)


def _gathered(tensors):
    """Renames the remaining experts, selects their rows of the routers, and drops the others."""
    gathered = {}
    for name, tensor in tensors.items():
        _, stack, _, number, *_ = (*name.split("."), "", "")
        ids = _KEPT.get(f"{stack}_{number}")
        if ids is not None and ".router." in name:
            gathered[name] = tensor[list(ids)]
        elif ids is not None and ".experts." in name:
            for k, i in enumerate(ids):
                if f".expert_{i}." in name:
                    gathered[name.replace(f".expert_{i}.", f".expert_{k}.")] = tensor
        else:
            gathered[name] = tensor
    return gathered


@pytest.mark.slow
def test_a_pruned_model_is_exported_with_the_kept_experts(tmp_path):
    importing.import_folder(models.MODELS / "nllb_moe", tmp_path / "run")
    loads = {"name": "dev_deu_Latn", "step": 0}
    for layer, ids in _KEPT.items():
        loads[f"load_E_{layer}"] = [2.0 if i in ids else 0.0 for i in range(4)]
    (tmp_path / "run/eval_metrics.jsonl").write_text(json.dumps(loads) + "\n")

    run = open_run(launches.recorded(str(tmp_path / "run")), str(tmp_path / "run"), 1)
    done = pruning.prune(run, tmp_path / "new", Request(("deu_Latn",), 0.5))
    assert {layer: experts.ids for layer, experts in done.kept.items()} == _KEPT

    want = _gathered(_exported(tmp_path / "run", tmp_path / "whole"))
    got = _exported(tmp_path / "new", tmp_path / "pruned")
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        np.testing.assert_array_equal(got[name], tensor, err_msg=name)
    assert json.loads((tmp_path / "pruned/config.json").read_text())["num_experts"] == 2
