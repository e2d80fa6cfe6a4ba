"""A trained model that decodes batches: its weights on the devices, a program for each length.

B batch, L source length, n hypotheses, T target length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.spmd import processes
from lingvo_gshard.spmd.executable import Executable, compile_program
from lingvo_gshard.spmd.program import Program


@dataclasses.dataclass(frozen=True)
class DecoderSpec:
    """What a decoder's caller must know.

    Attributes:
      model: the registered experiment's name.
      languages: codes of the languages that it was trained on.
      batch_size: B, the rows of every batch.
      source_lengths: the L that there are programs for, shortest first.
      num_best: n.
      num_partitions: devices.
    """

    model: str
    languages: tuple[str, ...]
    batch_size: int
    source_lengths: tuple[int, ...]
    num_best: int
    num_partitions: int


class Decoder:
    """Decodes batches; compiles for a length when it first comes."""

    def __init__(
        self, spec: DecoderSpec, theta: NestedMap, program_for: Callable[[int], Program]
    ) -> None:
        """Keeps what it is given.

        Args:
          spec: what it is.
          theta: the weights: arrays of NumPy or JAX.
          program_for: the program `predict` of (state.theta, batch.features) of a source length.
        """
        self.spec, self._program_for = spec, program_for
        self._state = NestedMap(theta=theta)
        self._compiled: dict[int, Executable] = {}

    def __call__(self, features: NestedMap) -> dict[str, np.ndarray]:
        """The hypotheses of a batch.

        Args:
          features: int32 [B, L] source_ids, source_segment_ids and source_positions.

        Returns:
          ids int32 [B, n, T], lengths int32 [B, n], scores float32 [B, n], token_log_probs
          float32 [B, n, T], and attention [B, n, T, L] if the model records it: see Hypotheses.
        """
        run = self._executable(features.source_ids.shape[1])
        found = run(self._state, NestedMap(features=features)).predictions
        return dict(processes.to_host(found).FlattenItems())

    def _executable(self, source_len: int) -> Executable:
        if source_len not in self._compiled:
            run = compile_program(self._program_for(source_len))
            # Once for all lengths: they want the weights in the same places.
            self._state = run.place("state", self._state)
            self._compiled[source_len] = run
        return self._compiled[source_len]
