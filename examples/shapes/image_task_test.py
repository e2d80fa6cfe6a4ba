"""Images that are split train as whole ones do."""

import functools

import numpy as np
import pytest

from lingvo_gshard import registry
from lingvo_gshard.model import placement
from lingvo_gshard.model.spec import Mode
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.train.programs import Programs


@functools.cache
def trained(model, num_partitions):
    """The program of a step, and the metrics of three steps and of an evaluation after them."""
    p = registry.get_params(model)
    partitioning = placement.partitioning(p, num_partitions)
    programs = Programs(TaskModel(p, partitioning), in_process=True)
    batches = p.input.Instantiate()
    step = programs.get(Mode.TRAIN, batches.specs)
    evaluate = programs.get(Mode.EVAL, batches.specs)

    state = programs.initialize(p.train.seed)
    history = []
    for _ in range(3):
        result = step(state, next(batches).Transform(lambda array: array[None]))
        state = result.state
        history += result.metrics.Transform(np.asarray).FlattenItems()
    evaluated = evaluate(state, next(batches)).Transform(np.asarray).FlattenItems()
    batches.close()
    return step, [*history, *evaluated]


@pytest.mark.parametrize("model", ["shapes.ByRows", "shapes.ByImages"])
@pytest.mark.parametrize("num_partitions", [2, 4, 8])
def test_several_devices_compute_the_same_as_one(model, num_partitions):
    _, expected = trained("shapes.ByRows", 1)
    step, metrics = trained(model, num_partitions)
    for (path, value), (expected_path, expected_value) in zip(metrics, expected, strict=True):
        assert path == expected_path
        np.testing.assert_allclose(value, expected_value, rtol=1e-3, atol=1e-4, err_msg=path)
    exchanges_rows = "collective-permute" in step.report().table()
    assert exchanges_rows == (model == "shapes.ByRows")
