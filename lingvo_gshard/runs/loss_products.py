"""The products of an experiment's loss, from the process that traces with TensorFlow."""

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.model import step_products
from lingvo_gshard.model.step_products import StepProduct
from lingvo_gshard.spmd import tracer


def of_experiment(params: Params) -> list[StepProduct]:
    """Returns the products of an experiment's loss on a batch of its input, traced once.

    Raises ValueError if a setting of the task or the input does not fit its model.
    """
    batch = params.input.cls.batch_specs(params.input)
    return tracer.run(step_products.products_of, params.task, batch)
