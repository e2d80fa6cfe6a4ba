"""The programs of a model, traced and compiled on demand. K steps, B batch, L length.

The tracing process gets only the settings that a program depends on. So with another max_steps or
data_dir, the stored Program is found again.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.model.spec import Mode
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.spmd import lowering, specs, tracer
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import Executable, compile_program
from lingvo_gshard.spmd.program import Program
from lingvo_gshard.spmd.saved_executable import SavedExecutables
from lingvo_gshard.train import steps
from lingvo_gshard.train.steps import Model


@dataclasses.dataclass(frozen=True)
class Recipe:
    """All that a program is traced from.

    An experiment's recipe is TaskModel, its settings and its partitioning: it can be pickled, so
    that another process traces it.
    """

    model: Callable[..., Model]  # Returns the model, given these ingredients.
    ingredients: tuple[Any, ...]
    # A function of steps.py, which takes the model and these arguments, such as a mode, the shapes
    # of a batch, and a number of steps.
    function: Callable[..., AnnotatedFn]
    arguments: tuple[Any, ...]

    def program(self) -> Program:
        """Traces and exports the program in this process."""
        model = self.model(*self.ingredients)
        return lowering.export(self.function(model, *self.arguments), model.partitioning)


class Programs:
    """The programs of a model; in any thread, each is compiled once."""

    def __init__(
        self, model: Model, saved: SavedExecutables | None = None, *, in_process: bool = False
    ) -> None:
        """`saved` has executables to train with.

        The process that has TensorFlow traces a TaskModel. With `in_process`, and if it is another
        model, this process does.
        """
        self.model = model
        self._saved = saved
        self._is_here = in_process or not isinstance(model, TaskModel)
        traced = functools.partial(tracer.traced, Recipe.program)
        self._trace: Callable[[Recipe], Program] = Recipe.program if self._is_here else traced
        self._compiled: dict[Any, Executable] = {}
        self._lock = threading.Lock()

    def get(self, mode: Mode, batch_spec: NestedMap, num_steps: int = 1) -> Executable:
        """Returns the compiled program of a mode; see `exported`."""
        key = (mode, num_steps, *batch_spec.FlattenItems())
        # The thread that feeds and the thread that trains may need one program at once.
        with self._lock:
            if key not in self._compiled:
                program = self.exported(mode, batch_spec, num_steps)
                # `plan model --save` saves only training programs.
                if self._saved is not None and mode is Mode.TRAIN:
                    self._compiled[key] = self._saved.load_or_compile(program)
                else:
                    self._compiled[key] = compile_program(program)
            return self._compiled[key]

    def initialize(self, seed: int) -> NestedMap:
        """Returns a new state, computed directly on its devices.

        Raises ValueError if the state differs from the model's state_spec.
        """
        compiled = compile_program(self.initializer())
        return compiled(NestedMap(seed=np.array([seed, 0], np.int32))).state

    def exported(self, mode: Mode, batch_spec: NestedMap, num_steps: int = 1) -> Program:
        """Returns the program of a mode, for batches of these TensorSpecs: see steps.annotated."""
        return self._trace(self._recipe(mode, steps.annotated, mode, batch_spec, num_steps))

    def initializer(self) -> Program:
        """Returns the program that makes a new state.

        Raises ValueError if the state differs from the model's state_spec.
        """
        program = self._trace(self._recipe(None, steps.initializer))
        # Otherwise training would fail later, with a message that names neither.
        made = dict(program.results.state.FlattenItems())
        specs.check_same("init_fn differs from state_spec", made, self.model.state_spec)
        return program

    def decoder(self, length: int) -> Program:
        """Returns the program of a TaskModel that decodes inputs of one length.

        Its state is theta alone.
        """
        return self._trace(self._recipe(Mode.PREDICT, steps.decoder, length))

    def weight_converter(self) -> Program:
        """Returns the program of a TaskModel that converts float32 weights to decode.weights."""
        return self._trace(self._recipe(Mode.PREDICT, steps.weight_converter))

    def _recipe(
        self, mode: Mode | None, function: Callable[..., AnnotatedFn], *arguments: Any
    ) -> Recipe:
        """Returns the recipe of a function of steps.py; for PREDICT it has `decode`, too."""
        model = self.model
        if self._is_here or not isinstance(model, TaskModel):
            return Recipe(lambda: model, (), function, arguments)

        settings = model.settings(*(("decode",) if mode is Mode.PREDICT else ()))
        return Recipe(TaskModel, (settings, model.partitioning), function, arguments)
