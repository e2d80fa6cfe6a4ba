"""Decoded tokens/s of the flat beam search, all hypotheses at full length.

    python -m bench.decode [--model=toy.MoE8E4L] [--partitions=2] [--batch=32] [--length=32]

The weights are untrained and no hypothesis may end early: the work is the same in every run.
"""

from __future__ import annotations

import time

from absl import app, flags

from lingvo_gshard.spmd import environment

_MODEL = flags.DEFINE_string("model", "toy.MoE8E4L", "A registered experiment.")
_PARTITIONS = flags.DEFINE_integer("partitions", 2, "Devices.")
_BATCH = flags.DEFINE_integer("batch", 32, "Sentences decoded together.")
_LENGTH = flags.DEFINE_integer("length", 32, "Tokens of each source and of each hypothesis.")
_BEAMS = flags.DEFINE_list("beams", ["1", "4"], "Beam sizes to try.")
_CALLS = flags.DEFINE_integer("calls", 3, "Timed calls of each.")


def main(argv: list[str]) -> None:
    environment.prepare(_PARTITIONS.value)
    print(
        f"{_MODEL.value}, batch {_BATCH.value}, length {_LENGTH.value}, {_PARTITIONS.value} devices"
    )
    print(f"{'beam':>5}{'s/call':>9}{'tokens/s':>10}{'hypothesis tokens/s':>21}")
    for beam in _BEAMS.value:
        secs = _time_decode(int(beam))
        best = _BATCH.value * _LENGTH.value
        print(f"{beam:>5}{secs:>9.3f}{best / secs:>10.0f}{int(beam) * best / secs:>21.0f}")


def _time_decode(beam_size: int) -> float:
    from bench import synthetic
    from lingvo_gshard.core.nested_map import NestedMap
    from lingvo_gshard.spmd import program
    from lingvo_gshard.train import steps

    params = synthetic.experiment(_MODEL.value)
    length = _LENGTH.value
    params.decode.Set(beam_size=beam_size, min_target_len=length, max_target_len=length)
    model, state = synthetic.model_and_state(params, _PARTITIONS.value)
    batch = NestedMap(features=synthetic.source_features(_BATCH.value, _LENGTH.value))
    annotated = steps.predictor(model.model_fn, params, model.state_spec, synthetic.specs_of(batch))
    run = program.export(annotated, model.partitioning).compile()
    best = float("inf")
    for _ in range(1 + _CALLS.value):
        began = time.perf_counter()
        run(state, batch).predictions.ids.block_until_ready()
        best = min(best, time.perf_counter() - began)
    return best


if __name__ == "__main__":
    app.run(main)
