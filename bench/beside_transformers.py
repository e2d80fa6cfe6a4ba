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
import pathlib
import resource
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
from absl import flags

from bench import import_model, peer
from lingvo_gshard import cli
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.files import table
from lingvo_gshard.hugging_face import importing
from lingvo_gshard.layers.repeat import Layers
from lingvo_gshard.runs import launch as launches
from lingvo_gshard.runs.experiment_programs import ExperimentPrograms
from lingvo_gshard.runs.run import open_run
from lingvo_gshard.spmd import environment
from lingvo_gshard.spmd.executable import compile_program

_PYTHON = flags.DEFINE_string("python", peer.PYTHON, "A Python with torch and transformers.")
_CALLS = flags.DEFINE_integer("calls", 3, "The number of timed calls of each.", 1)
_EXPERTS = flags.DEFINE_integer("num_experts", 32, "Experts of each of the four layers.", 1)
_RUN = flags.DEFINE_string("run", None, "Searches with this run, and prints JSON.")
_DEVICES = flags.DEFINE_integer("devices", 1, "With --run, on so many devices.", 1)

_ROWS = 16
_SOURCE_LEN = 32
_TARGET_LEN = 32
_BEAM = 4
_FORCED = 7
# The ids of transformers, whose padding and BOS are 1 and 0: ours are 0 and 1.
_PAD = 1
_EOS = 2


def main() -> None:
    if _RUN.value is not None:
        print(json.dumps(_ours(_RUN.value, _DEVICES.value)))
        return

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
            command = ["bench.beside_transformers", f"--run={folder / form.name}"]
            command += [f"--devices={num_devices}", f"--calls={_CALLS.value}"]
            system = f"ours, {form.name}, {num_devices} devices"
            results[system] = _output([sys.executable, "-m", *command])

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


def _output(command: list[str]) -> dict[str, Any]:
    output = subprocess.check_output(command, text=True)
    return dict(json.loads(output.splitlines()[-1]))


def _ours(logdir: str, num_devices: int) -> dict[str, Any]:
    """Returns the ids, in their order, the best seconds, and the peak memory in bytes."""
    environment.prepare(num_devices, "cpu")
    launch = launches.recorded(logdir).changed(
        [
            "decode.forces_first=True",
            f"decode.batch_size={_ROWS}",
            f"decode.max_target_len={_TARGET_LEN}",
            f"decode.beam_size={_BEAM}",
        ]
    )
    run = open_run(launch, logdir, num_devices)
    program = ExperimentPrograms(run.params, run.estimator.partitioning).decoder(_SOURCE_LEN)
    executable = compile_program(program)
    state = run.estimator.restore(weights_alone=True).state

    # The batch of transformers in our ids and as our rows.
    batch = np.load(pathlib.Path(logdir).with_name("batch.npz"))
    positions = np.arange(_SOURCE_LEN, dtype=np.int32)
    features = NestedMap(
        source_ids=_exchanged(batch["ids"]),
        source_segment_ids=batch["mask"].astype(np.int32),
        source_positions=np.tile(positions, (_ROWS, 1)),
        first_ids=np.full(_ROWS, _FORCED, np.int32),
    )

    secs = []
    predictions = NestedMap()
    for _ in range(_CALLS.value):
        began = time.perf_counter()
        predictions = executable(state, NestedMap(features=features)).predictions
        predictions = predictions.Transform(np.asarray)
        secs.append(time.perf_counter() - began)

    # As transformers returns them: EOS first, and padding last.
    ids = []
    for row, length in zip(predictions.ids[:, 0], predictions.lengths[:, 0], strict=True):
        padding = [_PAD] * (_TARGET_LEN - length)
        ids.append([_EOS, *_exchanged(row[:length]).tolist(), *padding])
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"ids": ids, "secs": min(secs), "peak_bytes": peak_bytes}


def _exchanged(ids: np.ndarray) -> np.ndarray:
    """Returns ids with 0 and 1 exchanged: padding and <s> have them in the other order there."""
    return np.where(ids < 2, 1 - ids, ids).astype(np.int32)


if __name__ == "__main__":
    cli.run("beside_transformers", main)
