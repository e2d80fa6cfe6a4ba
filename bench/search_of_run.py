"""Times the beam search of a run; bench.beside_transformers starts it.

    PYTHONPATH=. python -P bench/search_of_run.py RUN BATCH.npz SETTINGS

It does not run as a module of bench, whose import would load TensorFlow and so change the measured
memory. BATCH and the printed ids use transformers' ids, in which padding and <s> are exchanged. The
program prints a JSON object: the ids, the best seconds of a call, and the peak memory in bytes,
including compilation and the reading of the weights.
"""

import json
import resource
import sys
import time

import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.runs import launch as launches
from lingvo_gshard.runs.run import converted_weights, open_run
from lingvo_gshard.spmd.executable import compile_program
from lingvo_gshard.train.programs import Programs
from xla_spmd.runtime import environment


def main(logdir: str, batch_file: str, settings_text: str) -> None:
    settings = json.loads(settings_text)
    num_devices = settings["num_devices"]
    environment.prepare(num_devices, "cpu")

    batch = np.load(batch_file)
    num_rows, source_len = batch["ids"].shape
    launch = launches.recorded(logdir).changed(
        [
            "decode.forces_first=True",
            f"decode.batch_size={num_rows}",
            f"decode.max_target_len={settings['target_len']}",
            f"decode.beam_size={settings['beam_size']}",
            f"decode.weights={settings['weights']}",
        ]
    )
    run = open_run(launch, logdir, num_devices)
    model = TaskModel(run.params, run.estimator.partitioning)
    executable = compile_program(Programs(model).decoder(source_len))
    theta = run.estimator.restore(weights_alone=True).state.theta
    state = NestedMap(theta=converted_weights(model, theta))
    del theta  # Weights in fewer bits have replaced it.

    # The batch is converted to our ids and our rows.
    positions = np.arange(source_len, dtype=np.int32)
    features = NestedMap(
        source_ids=_exchanged(batch["ids"]),
        source_segment_ids=batch["mask"].astype(np.int32),
        source_positions=np.tile(positions, (num_rows, 1)),
        first_ids=np.full(num_rows, settings["forced"], np.int32),
    )

    secs = []
    predictions = NestedMap()
    for _ in range(settings["calls"]):
        began = time.perf_counter()
        predictions = executable(state, NestedMap(features=features)).predictions
        predictions = predictions.Transform(np.asarray)
        secs.append(time.perf_counter() - began)

    # The best hypotheses are cut at their ends.
    best = zip(predictions.ids[:, 0], predictions.lengths[:, 0], strict=True)
    ids = [_exchanged(row[:length]).tolist() for row, length in best]
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"ids": ids, "secs": min(secs), "peak_bytes": peak_bytes}))


def _exchanged(ids: np.ndarray) -> np.ndarray:
    """Returns ids with 0 and 1 exchanged."""
    return np.where(ids < 2, 1 - ids, ids).astype(np.int32)


if __name__ == "__main__":
    main(*sys.argv[1:])
