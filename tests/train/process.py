"""One process of several that train the regression on four partitions; run by tests.

    python -m tests.train.process FOLDER COORDINATOR NUM_PROCESSES PROCESS_ID MAX_STEPS \
        [DIES_AT [UNEVEN_ROWS]]

Each process reads its own rows of a batch. If FOLDER.source, a run's folder, exists beside FOLDER,
a new run begins from its weights. Exports the last checkpoint, and prints the losses of its steps
and an evaluation's error; at the step DIES_AT it kills itself. With UNEVEN_ROWS, a batch has that
many rows, and weights are split unevenly.
"""

import contextlib
import functools
import json
import os
import pathlib
import signal
import sys

from xla_spmd.runtime import environment

_PARTITIONS = 4


def _train(folder, max_steps, dies_at, num_rows):
    from lingvo_gshard.checkpoints.warm_start import Rule, WarmStart
    from lingvo_gshard.train.hooks import TrainHook
    from tests.train import regression

    class _Losses(TrainHook):
        def __init__(self):
            self.losses = []

        def after_call(self, call):
            self.losses += call.metrics.loss.tolist()
            if call.step == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)

    options = {}
    if num_rows is None:
        num_rows = regression.B
    else:
        options["partitioning"] = regression.uneven(_PARTITIONS)
    losses, source = _Losses(), pathlib.Path(f"{folder}.source")
    estimator = regression.make(
        folder,
        _PARTITIONS,
        steps_per_call=2,
        save_checkpoints_steps=4,
        warm_start=WarmStart(str(source), (("theta.*", Rule.SAME),)) if source.exists() else None,
        **options,
    )
    batches = functools.partial(
        regression.Batches, share=estimator.input_share(num_rows), num_rows=num_rows
    )
    estimator.train(lambda p: batches(), max_steps=max_steps, hooks=[losses])
    result = estimator.evaluate(lambda p: batches(num_batches=3))
    estimator.export_weights(f"{folder}/weights.safetensors", part_bytes=64)
    print(json.dumps({"losses": losses.losses, "error": result["error"]}), flush=True)


def main(folder, coordinator, num_processes, process_id, max_steps, dies_at="-1", num_rows=None):
    """Trains with the arguments of the command line."""
    environment.prepare(num_devices=_PARTITIONS // int(num_processes))
    from lingvo_gshard.spmd import processes
    from lingvo_gshard.spmd.process_flags import Processes

    settings = Processes(
        coordinator, int(num_processes), int(process_id), timeout_secs=60, heartbeat_timeout_secs=10
    )
    alone = int(num_processes) == 1
    with contextlib.nullcontext() if alone else processes.joined(settings):
        _train(folder, int(max_steps), int(dies_at), num_rows and int(num_rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
