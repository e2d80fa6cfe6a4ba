"""The estimator's programs, compiled on demand. K steps, B batch, L length.

Where they come from is the business of a ProgramSource: ModelPrograms (steps.py) traces a model_fn
in this process, and a registered experiment's come from a process of their own (spmd/tracer.py).
"""

import dataclasses
import threading
from typing import Any, Protocol

import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.model.spec import Mode
from lingvo_gshard.spmd.executable import Executable, compile_program
from lingvo_gshard.spmd.program import Program
from lingvo_gshard.spmd.saved_executable import SavedExecutables


class ProgramSource(Protocol):
    """Makes the programs that train, evaluate and predict."""

    def initializer(self) -> Program:
        """Returns the program from `seed`, int32 [2], to a new state."""
        ...

    def step(self, mode: Mode, batch_spec: NestedMap, num_steps: int = 1) -> Program:
        """Returns the program of a mode, for batches of these TensorSpecs.

        In TRAIN it does `num_steps` steps, from (state, batches [K, B, L]) to the new state and
        metrics [K, ...], and its state is donated. In EVAL it goes from (state, batch) to the
        metrics' sums and weights, and in PREDICT to predictions whose rows are split.
        """
        ...


@dataclasses.dataclass(eq=False)
class Programs:
    """Compiles programs on demand, in any thread; training programs that `saved` has are loaded."""

    source: ProgramSource
    saved: SavedExecutables | None = None
    _compiled: dict[Any, Executable] = dataclasses.field(default_factory=dict, init=False)
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock, init=False)

    def initialize(self, seed: int) -> NestedMap:
        """Returns a new state, computed where it lies. Raises as the source's `initializer`."""
        compiled = compile_program(self.source.initializer())
        return compiled(NestedMap(seed=np.array([seed, 0], np.int32))).state

    def get(self, mode: Mode, batch_spec: NestedMap, num_steps: int = 1) -> Executable:
        """Returns the compiled program of a mode; see ProgramSource.step."""
        key = (mode, num_steps, *batch_spec.FlattenItems())
        # The thread that feeds and the one that trains may ask for one program at once.
        with self._lock:
            if key not in self._compiled:
                self._compiled[key] = self._compile(mode, batch_spec, num_steps)
            return self._compiled[key]

    def _compile(self, mode: Mode, batch_spec: NestedMap, num_steps: int) -> Executable:
        exported = self.source.step(mode, batch_spec, num_steps)
        # `plan --save` saves the programs that train alone.
        if self.saved is not None and mode is Mode.TRAIN:
            return self.saved.load_or_compile(exported)
        return compile_program(exported)
