"""Runs of step 0 with given weights, without training."""

import numpy as np

from lingvo_gshard.checkpoints import streamed
from lingvo_gshard.checkpoints.checkpoints import Contents
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.input.base_input import DataFacts
from lingvo_gshard.model import placement
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.runs import launch as launches
from lingvo_gshard.runs.launch import Launch
from lingvo_gshard.runs.run import Run, open_run
from tests.checkpoints import in_memory


def launch_of(model: str, vocab_size: int, *settings: str) -> Launch:
    """Returns a launch without data."""
    return Launch(model, settings, None, DataFacts(vocab_size, vocab_size))


def random_theta(launch: Launch, seed: int) -> NestedMap:
    """Returns normal weights with the layers' own scales; constants are random, too."""
    params = launches.experiment_params(launch)
    specs = TaskModel(params, placement.partitioning(params, 1)).task.weight_specs
    rng = np.random.default_rng(seed)
    return specs.Transform(
        lambda w: (rng.standard_normal(w.shape) * min(w.scale or 0.5, 0.8)).astype("float32")
    )


def write(logdir, launch: Launch, theta: NestedMap) -> Run:
    """Writes a run with these weights, and opens it on one device."""
    params = launches.experiment_params(launch)
    partitioning = placement.partitioning(params, 1)
    state_spec = TaskModel(params, partitioning).state_spec
    values = {f"theta.{path}": np.asarray(x) for path, x in theta.FlattenItems()}
    arrays = {}
    for path, spec in state_spec.FlattenItems():
        arrays[path] = streamed.zeros(path, spec)
        if path in values:
            arrays[path] = in_memory.array(values[path], spec.dims, path)
    launches.record(launch, str(logdir))
    streamed.write(logdir, 0, Contents(params, partitioning, state_spec), arrays, "test")
    return open_run(launch, str(logdir), 1)
