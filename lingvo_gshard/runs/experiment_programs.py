"""The programs of a registered experiment, made by the process that traces with TensorFlow.

The functions below run in that process (spmd/tracer.py), which builds the model again from its
Params. In a process that only compiles and runs, TensorFlow is never imported.

The other process is given no setting that programs do not depend on: with another max_steps or
data_dir, the Program that was kept is found again.
"""

import dataclasses

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.model.spec import Mode
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.spmd import lowering, tracer
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.program import Program
from lingvo_gshard.train.steps import ModelPrograms

# The settings of `train` that programs depend on.
_TRAIN_SETTINGS = (
    "seed",
    "scatter_gradients",
    "gradient_accumulation_steps",
    "ema_decay",
    "frozen",
)


@dataclasses.dataclass(frozen=True)
class ExperimentPrograms:
    """A ProgramSource (train/programs.py): an experiment's programs on a partitioning."""

    params: Params
    partitioning: Partitioning

    def initializer(self) -> Program:
        """Returns the program that makes a new state."""
        return tracer.traced(initializer, self._settings(), self.partitioning)

    def step(self, mode: Mode, batch_spec: NestedMap, num_steps: int = 1) -> Program:
        """Returns the program of a mode; see ProgramSource.step."""
        groups = ("decode",) if mode is Mode.PREDICT else ()
        settings = self._settings(*groups)
        return tracer.traced(step, settings, self.partitioning, mode, batch_spec, num_steps)

    def decoder(self, length: int) -> Program:
        """Returns the program that decodes inputs of one length; its state is theta alone."""
        return tracer.traced(decoder, self._settings("decode"), self.partitioning, length)

    def keeper(self) -> Program:
        """Returns the program that makes a decoder's weights, as it keeps them, of float32 ones."""
        return tracer.traced(keeper, self._settings("decode"), self.partitioning)

    def _settings(self, *groups: str) -> Params:
        """Returns the settings that programs depend on, and these groups besides."""
        settings = Params()
        for group in ("task", "optimizer", *groups):
            settings.Define(group, self.params.Get(group), self.params.Describe(group))

        train = Params()
        for name in _TRAIN_SETTINGS:
            train.Define(name, self.params.train.Get(name), self.params.train.Describe(name))
        settings.Define("train", train, self.params.Describe("train"))
        return settings


def initializer(params: Params, partitioning: Partitioning) -> Program:
    """Traces the program that makes a new state of an experiment."""
    return in_process(params, partitioning).initializer()


def step(
    params: Params,
    partitioning: Partitioning,
    mode: Mode,
    batch_spec: NestedMap,
    num_steps: int,
) -> Program:
    """Traces the program of a mode of an experiment; see ProgramSource.step."""
    return in_process(params, partitioning).step(mode, batch_spec, num_steps)


def decoder(params: Params, partitioning: Partitioning, length: int) -> Program:
    """Traces the program that decodes inputs of one length; its state is theta alone."""
    features = params.task.cls.DecodeSpecs(params.decode, params.decode.batch_size, length)

    # A decoder has no use for the optimizer's slots.
    model = TaskModel(params, partitioning)
    weights_alone = ModelPrograms(model.model_fn, None, params, partitioning, model.decoder_spec())
    return weights_alone.step(Mode.PREDICT, NestedMap(features=features))


def keeper(params: Params, partitioning: Partitioning) -> Program:
    """Traces the program that makes a decoder's weights, as it keeps them, of float32 ones."""
    model = TaskModel(params, partitioning)
    specs = {f"state.{path}": spec for path, spec in model.decoder_spec().FlattenItems()}
    keep = AnnotatedFn(
        name="keep",
        fn=lambda weights: NestedMap(state=model.decoder_state(weights.theta)),
        arg_names=("weights",),
        args=(NestedMap(theta=model.state_spec.theta),),
        result_dims={path: spec.dims for path, spec in specs.items()},
        result_stacks={path: spec.stack for path, spec in specs.items()},
    )
    return lowering.export(keep, partitioning)


def in_process(params: Params, partitioning: Partitioning) -> ModelPrograms:
    """Returns the source that traces an experiment's programs in this process."""
    model = TaskModel(params, partitioning)
    return ModelPrograms(model.model_fn, model.init_state, params, partitioning, model.state_spec)
