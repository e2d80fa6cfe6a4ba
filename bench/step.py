"""The train step's model-GFLOP/s beside numpy's matrix-product rate, and tokens/s.

    python -m bench.step [--model=toy.MoE8E8L] [--partitions=1,2,4] [--group_sizes=64,256]

Steps and products alternate, so that both see the same machine; the best of each counts.
"""

from __future__ import annotations

import time

from absl import app, flags

from lingvo_gshard.spmd import environment

_MODEL = flags.DEFINE_string("model", "toy.MoE8E8L", "A registered experiment.")
_PARTITIONS = flags.DEFINE_list("partitions", ["1", "2", "4"], "Device counts to try.")
_GROUP_SIZES = flags.DEFINE_list("group_sizes", ["64", "256"], "Tokens of a group to try.")
_STEPS = flags.DEFINE_integer("steps", 6, "Timed steps of each.")


def main(argv: list[str]) -> None:
    environment.prepare(max(int(n) for n in _PARTITIONS.value))
    from bench.machine import NumpyRate

    rate = NumpyRate()
    rows = [
        (int(size), int(count), *_time_step(rate, int(size), int(count)))
        for size in _GROUP_SIZES.value
        for count in _PARTITIONS.value
    ]
    print(f"{_MODEL.value}, train step; numpy's product: {rate.gflop_per_sec:.0f} GFLOP/s")
    print(f"{'group':>6}{'devices':>9}{'s/step':>9}{'GFLOP/s':>9}{'of numpy':>10}{'tokens/s':>10}")
    for size, count, secs, gflop, tokens in rows:
        speed = gflop / secs
        share = f"{speed / rate.gflop_per_sec:.0%}"
        print(f"{size:>6}{count:>9}{secs:>9.3f}{speed:>9.0f}{share:>10}{tokens / secs:>10.0f}")


def _time_step(rate, group_size: int, num_partitions: int) -> tuple[float, float, int]:
    """(best seconds, model GFLOP, target tokens) of a step."""
    from bench import synthetic
    from lingvo_gshard.analysis import flops
    from lingvo_gshard.core.nested_map import NestedMap
    from lingvo_gshard.sharding.mesh import Mesh
    from lingvo_gshard.sharding.partitioning import Partitioning
    from lingvo_gshard.spmd import program
    from lingvo_gshard.train import steps

    params = synthetic.experiment(_MODEL.value)
    for stack in (params.task.encoder, params.task.decoder):
        if stack.moe is not None:
            stack.moe.group_size = group_size
    model, state = synthetic.model_and_state(params, num_partitions)
    batch = synthetic.training_batch(params)
    partitioning = Partitioning.from_dict(Mesh.flat(num_partitions), params.sharding)
    step = steps.train_step(model.model_fn, params)
    annotated = steps.trainer(step, model.state_spec, synthetic.specs_of(batch), 1, partitioning)
    run = program.export(annotated, partitioning).compile()
    batches = run.place_arg("batches", batch.Transform(lambda x: x[None]))
    best = float("inf")
    for _ in range(1 + _STEPS.value):
        rate.measure()
        began = time.perf_counter()
        result = run(NestedMap(state), batches)
        float(result.metrics.loss[0])  # Waits for the devices.
        best, state = min(best, time.perf_counter() - began), result.state
    rows, source_len, target_len = (
        params.input.Get(name) for name in ("batch_size", "source_len", "target_len")
    )
    gflop = flops.train_step_flops(model.task, rows, source_len, target_len) / 1e9
    return best, gflop, rows * target_len


if __name__ == "__main__":
    app.run(main)
