"""Measures the host memory that an export and warm starts need; run by tests.

    python -m tests.train.host_memory FOLDER

Prints, as JSON, the bytes of one array, the bytes of the state, and the peak memory of each
operation, minus the memory in use before it.
"""

import ctypes
import gc
import json
import os
import pathlib
import sys
import threading

from xla_spmd.runtime import environment

_NUM_ARRAYS, _ROWS, _MODEL = 32, 2048, 1024


def _used_bytes():
    """Returns the memory of this process without pages backed by files."""
    status = pathlib.Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssAnon:"))
    return 1024 * int(line.split()[1])


def extra_bytes(do):
    """Returns the peak memory while `do` runs, minus the memory in use before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # `do` must not reuse freed memory, uncounted.
    before, done = _used_bytes(), threading.Event()
    most = [before]

    def watch():
        while not done.wait(0.001):
            most.append(max(most.pop(), _used_bytes()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    do()
    done.set()
    watcher.join()
    return most[0] - before


def main(folder):
    """Trains a step of a model with large weights, exports it and starts from it."""
    # Not prepare(num_devices=2): this keeps freed memory in the process, where it would count.
    os.environ.update(JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=2")
    environment.prepare()
    import tensorflow as tf

    from lingvo_gshard.checkpoints.warm_start import Rule, WarmStart
    from lingvo_gshard.core.nested_map import NestedMap
    from lingvo_gshard.model.spec import TPUEstimatorSpec
    from tests.train import regression

    shape = (_ROWS, _MODEL)
    weights = [f"w{i}" for i in range(_NUM_ARRAYS)]
    arrays = NestedMap({name: regression.f32(shape, "HM") for name in weights})
    spec = NestedMap(step=regression.STATE.step, slots=arrays, theta=arrays)

    def init_fn(seed):
        made = NestedMap({name: tf.zeros(shape) for name in weights})
        return NestedMap(step=tf.constant(0), slots=made, theta=made)

    def model_fn(state, features, labels, mode, params):
        after = NestedMap(state, step=state.step + 1)
        return TPUEstimatorSpec(mode, loss=tf.reduce_mean(features.x_BH), train_op=after)

    run = f"{folder}/run"
    estimator = regression.make(run, state_spec=spec, init_fn=init_fn, model_fn=model_fn)
    estimator.train(lambda p: regression.Batches(), max_steps=1)
    file = f"{folder}/w.safetensors"
    found = {"array": 4 * _ROWS * _MODEL, "state": 2 * _NUM_ARRAYS * 4 * _ROWS * _MODEL}
    estimator.export_weights(file, "step")  # One-time compiling and loading must not count.
    found["export"] = extra_bytes(lambda: estimator.export_weights(file))
    for source in (run, file):
        state = estimator.restore().state
        start = WarmStart(source, ((r"theta\..*", Rule.SAME),))
        found[source] = extra_bytes(lambda start=start, state=state: start.apply(state, spec))
    print(json.dumps({**found, "run": found.pop(run), "file": found.pop(file)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
