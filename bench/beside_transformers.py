"""Beam search with a model of NLLB-MoE's form, beside transformers: memory, seconds, ids.

    python -m bench.beside_transformers [--python=ENV/bin/python] [--num_experts=32]

ENV is an environment with torch and transformers 4, by default torch_peer's. The model has random
weights, 4 + 4 layers of dims 512 and 2048, and experts in every other layer. Each system searches
with a beam of 4 for 32 target tokens, for 16 sources of 32 tokens, on the cores that this process
may use. The systems run one after the other: transformers in float32; ours with its layers in a
LOOP (the default of an import) on one device and on two, and UNROLLED; and ours with its weights in
fewer bits, by decode.weights. The best of a few calls counts, and the peak memory of the process,
including compilation.
"""

import dataclasses
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
from lingvo_gshard.hugging_face import importing
from lingvo_gshard.layers.repeat import Layers
from lingvo_gshard.layers.stored_weights import Numbers
from xla_spmd.files import table

_PYTHON = flags.DEFINE_string("python", peer.PYTHON, "A Python with torch and transformers.")
_CALLS = flags.DEFINE_integer("calls", 3, "The number of timed calls of each.", 1)
_EXPERTS = flags.DEFINE_integer("num_experts", 32, "The experts of each of the four layers.", 1)

_ROWS = 16
_SOURCE_LEN = 32
_TARGET_LEN = 32
_BEAM = 4
_FORCED = 7
# The ids in transformers.
_PAD = 1
_EOS = 2
_SEARCH = pathlib.Path(__file__).with_name("search_of_run.py")


@dataclasses.dataclass(frozen=True)
class _Ours:
    """A configuration in which this project searches with the model."""

    form: Layers
    num_devices: int = 1
    weights: Numbers = Numbers.FLOAT32

    @property
    def name(self) -> str:
        devices = "one device" if self.num_devices == 1 else f"{self.num_devices} devices"
        return f"ours, {self.form.name}, {self.weights.name}, {devices}"


_OURS = (
    _Ours(Layers.LOOP),
    _Ours(Layers.LOOP, num_devices=2),
    _Ours(Layers.UNROLLED),
    _Ours(Layers.LOOP, weights=Numbers.BFLOAT16),
    _Ours(Layers.UNROLLED, weights=Numbers.BFLOAT16),
    _Ours(Layers.LOOP, weights=Numbers.INT8),
    _Ours(Layers.UNROLLED, weights=Numbers.INT8),
)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        theirs = folder / "theirs"
        num_bytes = import_model.write(theirs, _EXPERTS.value, num_parts=4)

        # The same weights are imported as a loop over blocks, and layer by layer.
        for form in Layers:
            settings = [f"task.{side}.layers_as={form.name}" for side in ("encoder", "decoder")]
            importing.import_folder(theirs, folder / form.name, settings)
        _write_batch(folder / "batch.npz")

        # Each system runs in a separate process, so that its peak memory can be read.
        results = {"transformers": _transformers(theirs, folder / "batch.npz")}
        for ours in _OURS:
            run = folder / ours.form.name
            results[ours.name] = _ours(run, folder / "batch.npz", ours)

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


def _ours(run: pathlib.Path, batch: pathlib.Path, ours: _Ours) -> dict[str, Any]:
    settings = {
        "calls": _CALLS.value,
        "num_devices": ours.num_devices,
        "weights": ours.weights.name,
        "beam_size": _BEAM,
        "target_len": _TARGET_LEN,
        "forced": _FORCED,
    }
    command = [sys.executable, "-P", str(_SEARCH), str(run), str(batch), json.dumps(settings)]
    result = _output(command, PYTHONPATH=str(_SEARCH.parents[1]))

    # The rows get the form that transformers returns: EOS first, and padding last.
    for row in result["ids"]:
        row[:] = [_EOS, *row, *[_PAD] * (_TARGET_LEN - len(row))]
    return result


if __name__ == "__main__":
    cli.run("beside_transformers", main)
