"""A trained model that decodes batches: weights on the devices and a program for each length.

B batch, L source length, n hypotheses, T target length.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.spmd import processes
from lingvo_gshard.spmd.executable import Executable, compile_program
from lingvo_gshard.spmd.program import Program


@dataclasses.dataclass(frozen=True)
class DecoderSpec:
    """What the caller of a decoder must know.

    Attributes:
      model: the name of the registered experiment.
      languages: codes of the languages that it was trained on.
      batch_size: B, the rows of every batch.
      source_lengths: the lengths L that have a program, shortest first.
      num_best: n.
      num_partitions: the number of devices.
    """

    model: str
    languages: tuple[str, ...]
    batch_size: int
    source_lengths: tuple[int, ...]
    num_best: int
    num_partitions: int


class Decoder:
    """Decodes batches; compiles the program of a length when it is first needed."""

    def __init__(
        self, spec: DecoderSpec, theta: NestedMap, program_for: Callable[[int], Program]
    ) -> None:
        """Takes a model; compiles nothing yet.

        Args:
          spec: its description.
          theta: the weights, arrays of NumPy or JAX.
          program_for: returns the program `predict` of (state.theta, batch.features) for a source
            length.
        """
        self.spec, self._program_for = spec, program_for
        self._state = NestedMap(theta=theta)
        self._compiled: dict[int, Executable] = {}

    def __call__(self, features: NestedMap) -> dict[str, np.ndarray]:
        """Decodes a batch.

        Args:
          features: int32 [B, L] source_ids, source_segment_ids and source_positions.

        Returns:
          ids int32 [B, n, T], lengths int32 [B, n], scores float32 [B, n], token_log_probs
          float32 [B, n, T] and, if the model records it, attention [B, n, T, L]: see Hypotheses.
        """
        run = self._executable(features.source_ids.shape[1])
        found = run(self._state, NestedMap(features=features)).predictions
        return dict(processes.to_host(found).FlattenItems())

    def _executable(self, source_len: int) -> Executable:
        if source_len not in self._compiled:
            run = compile_program(self._program_for(source_len))
            # The programs of all lengths need the weights on the same devices.
            self._state = run.place("state", self._state)
            self._compiled[source_len] = run
        return self._compiled[source_len]
