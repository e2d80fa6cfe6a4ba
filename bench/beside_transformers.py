"""Beam search with a model of NLLB-MoE's form, beside transformers: memory, seconds, ids.

    python -m bench.beside_transformers [--python=ENV/bin/python] [--num_experts=32]

ENV has torch and transformers 4, by default torch_peer's. The model has random weights, 4 + 4
layers of 512 and 2048, and experts in every other one. Both search with a beam of 4 for 32 tokens
of 16 sources of 32 tokens each, one after the other, in float32 on the cores that this process may
use: ours with its layers in a LOOP, as they are imported by default, this on one device and on two,
and UNROLLED. The best of a few calls counts, and the peak memory of each process, with its
compilation.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np
from absl import flags

from bench import import_model, peer
from lingvo_gshard import cli
from lingvo_gshard.files import table
from lingvo_gshard.hugging_face import importing
from lingvo_gshard.layers.repeat import Layers

_PYTHON = flags.DEFINE_string("python", peer.PYTHON, "A Python with torch and transformers.")
_CALLS = flags.DEFINE_integer("calls", 3, "The number of timed calls of each.", 1)
_EXPERTS = flags.DEFINE_integer("num_experts", 32, "Experts of each of the four layers.", 1)

_ROWS = 16
_SOURCE_LEN = 32
_TARGET_LEN = 32
_BEAM = 4
_FORCED = 7
# The ids of transformers.
_PAD = 1
_EOS = 2
_SEARCH = pathlib.Path(__file__).with_name("search_of_run.py")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        theirs = folder / "theirs"
        num_bytes = import_model.write(theirs, _EXPERTS.value, num_parts=4)

        # The same weights as a loop over blocks, and layer by layer.
        for form in Layers:
            settings = [f"task.{side}.layers_as={form.name}" for side in ("encoder", "decoder")]
            importing.import_folder(theirs, folder / form.name, settings)
        _write_batch(folder / "batch.npz")

        # Each in a process of its own, whose peak memory is then its own.
        results = {"transformers": _transformers(theirs, folder / "batch.npz")}
        for form, num_devices in ((Layers.LOOP, 1), (Layers.LOOP, 2), (Layers.UNROLLED, 1)):
            system = f"ours, {form.name}, {num_devices} devices"
            results[system] = _ours(folder / form.name, folder / "batch.npz", num_devices)

    rows = [("", "seconds", "peak memory, GB", "rows with the same ids")]
    want = results["transformers"]["ids"]
    for system, result in results.items():
        same = sum(got == row for got, row in zip(result["ids"], want, strict=True))
        peak = f"{result['peak_bytes'] / 1e9:.2f}"
        rows.append((system, f"{result['secs']:.2f}", peak, f"{same} of {len(want)}"))
    print(f"{num_bytes / 1e9:.2f} GB of weights, {_EXPERTS.value} experts a layer")
    print(table.text(rows))


def _write_batch(path: pathlib.Path) -> None:
    rng = np.random.default_rng(2)
    lengths = rng.integers(_SOURCE_LEN // 2, _SOURCE_LEN + 1, _ROWS)
    mask = np.arange(_SOURCE_LEN) < lengths[:, None]
    ids = rng.integers(4, 50_000, (_ROWS, _SOURCE_LEN))
    ids[np.arange(_ROWS), lengths - 1] = _EOS
    np.savez(path, ids=np.where(mask, ids, _PAD), mask=mask.astype(np.int64))


def _transformers(folder: pathlib.Path, batch: pathlib.Path) -> dict[str, Any]:
    settings = {
        "calls": _CALLS.value,
        "num_beams": _BEAM,
        "max_length": _TARGET_LEN + 1,
        "forced_bos_token_id": _FORCED,
        "early_stopping": False,
    }
    command = [_PYTHON.value, "-m", "bench.transformers_peer", str(folder), str(batch)]
    return _output([*command, json.dumps(settings)])


def _output(command: list[str], **environment: str) -> dict[str, Any]:
    output = subprocess.check_output(command, text=True, env=os.environ | environment)
    return dict(json.loads(output.splitlines()[-1]))


def _ours(run: pathlib.Path, batch: pathlib.Path, num_devices: int) -> dict[str, Any]:
    settings = {
        "calls": _CALLS.value,
        "num_devices": num_devices,
        "beam_size": _BEAM,
        "target_len": _TARGET_LEN,
        "forced": _FORCED,
    }
    command = [sys.executable, "-P", str(_SEARCH), str(run), str(batch), json.dumps(settings)]
    result = _output(command, PYTHONPATH=str(_SEARCH.parents[1]))

    # As transformers returns them: EOS first, and padding last.
    for row in result["ids"]:
        row[:] = [_EOS, *row, *[_PAD] * (_TARGET_LEN - len(row))]
    return result


if __name__ == "__main__":
    cli.run("beside_transformers", main)
