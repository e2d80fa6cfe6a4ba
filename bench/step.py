"""A train step beside PyTorch's and numpy's matrix-product rate.

    python -m bench.step [--model=toy.MoE8E8L] [--partitions=1,2,4] [--group_sizes=64,256]

The peer (bench/torch_peer) does the same mathematics on the same weights with 2 threads; its loss
and its gradient's norm are checked first, without randomness. Steps of ours, of the peer and
products alternate, so that all see the same machine; the best of each counts.
"""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
import time

from absl import app, flags

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.spmd import environment

_MODEL = flags.DEFINE_string("model", "toy.MoE8E8L", "A registered experiment.")
_PARTITIONS = flags.DEFINE_list("partitions", ["1", "2", "4"], "Device counts to try.")
_GROUP_SIZES = flags.DEFINE_list("group_sizes", ["64", "256"], "Tokens of a group to try.")
_DISPATCHES = flags.DEFINE_list("dispatches", ["einsum", "gather"], "Ways of dispatch to try.")
_STEPS = flags.DEFINE_integer("steps", 6, "Timed steps of each.")


_TOLERANCE = 1e-4  # Of the loss and the gradient's norm, relative.


def main(argv: list[str]) -> None:
    environment.prepare(max(int(n) for n in _PARTITIONS.value))
    from bench.machine import NumpyRate

    rate = NumpyRate()
    rows = [
        _time_step(rate, int(size), int(count), way)
        for size in _GROUP_SIZES.value
        for way in _DISPATCHES.value
        for count in _PARTITIONS.value
    ]
    limit = rate.gflop_per_sec
    print(f"{_MODEL.value}, train step; numpy's product: {limit:.0f} GFLOP/s")
    head = f"{'group':>6}{'dispatch':>10}{'devices':>9}{'s/step':>9}{'GFLOP/s':>9}{'of numpy':>10}"
    print(f"{head}{'tokens/s':>10}{'torch s':>9}{'faster':>8}{'torch bf16 s':>14}")
    for row in rows:
        speed = row.gflop / row.secs
        print(
            f"{row.group_size:>6}{row.dispatch:>10}{row.devices:>9}{row.secs:>9.3f}{speed:>9.0f}"
            f"{speed / limit:>10.0%}{row.tokens / row.secs:>10.0f}{row.peer_secs:>9.3f}"
            f"{row.peer_secs / row.secs:>8.2f}{row.peer_bfloat16_secs:>14.3f}"
        )


@dataclasses.dataclass(frozen=True)
class _Row:
    """One setting's best times; `tokens` are target tokens."""

    group_size: int
    dispatch: str
    devices: int
    secs: float
    gflop: float
    tokens: int
    peer_secs: float
    peer_bfloat16_secs: float


def _time_step(rate, group_size: int, num_partitions: int, dispatch: str) -> _Row:
    from bench import synthetic
    from bench.peer import Peer
    from lingvo_gshard.analysis import flops
    from lingvo_gshard.core.nested_map import NestedMap

    params = _params(group_size, dispatch)
    run, model, state = _compiled(params, num_partitions)
    batch = synthetic.training_batch(params)
    _check_peer(group_size, dispatch, num_partitions)
    with tempfile.TemporaryDirectory() as folder:
        peer = Peer(pathlib.Path(folder), params, state.theta, batch)
        with peer:
            batches = run.place_arg("batches", batch.Transform(lambda x: x[None]))
            best = dict.fromkeys(("ours", "step", "step_bfloat16"), float("inf"))
            for _ in range(1 + _STEPS.value):
                rate.measure()
                began = time.perf_counter()
                result = run(NestedMap(state), batches)
                float(result.metrics.loss[0])  # Waits for the devices.
                best["ours"] = min(best["ours"], time.perf_counter() - began)
                state = result.state
                for command in ("step", "step_bfloat16"):
                    best[command] = min(best[command], peer.ask(command)["secs"])
    sizes = [params.input.Get(name) for name in ("batch_size", "source_len", "target_len")]
    gflop = flops.train_step_flops(model.task, *sizes) / 1e9
    return _Row(
        group_size,
        dispatch,
        num_partitions,
        best["ours"],
        gflop,
        sizes[0] * sizes[2],
        best["step"],
        best["step_bfloat16"],
    )


def _check_peer(group_size: int, dispatch: str, num_partitions: int) -> None:
    """One step without dropout or random routing: ours has the peer's loss and gradient norm."""
    from bench import synthetic
    from bench.peer import Peer
    from lingvo_gshard.core.nested_map import NestedMap

    params = _params(group_size, dispatch, random=False)
    run, _, state = _compiled(params, num_partitions)
    batch = synthetic.training_batch(params)
    with (
        tempfile.TemporaryDirectory() as folder,
        Peer(pathlib.Path(folder), params, state.theta, batch) as peer,
    ):
        theirs = peer.ask("loss")
    metrics = run(NestedMap(state), batch.Transform(lambda x: x[None])).metrics
    for name, expected in theirs.items():
        got = float(metrics[name][0])
        if abs(got - expected) > _TOLERANCE * abs(expected):
            raise AssertionError(f"{name}: {got} is ours, {expected} the peer's.")


def _params(group_size: int, dispatch: str, *, random: bool = True) -> Params:
    from bench import synthetic
    from lingvo_gshard.layers.dispatch import Dispatch
    from lingvo_gshard.layers.gating import SecondExpert

    params = synthetic.experiment(_MODEL.value)
    for stack in (params.task.encoder, params.task.decoder):
        stack.moe.Set(group_size=group_size, dispatch=Dispatch(dispatch))
        if not random:
            stack.moe.second_expert = SecondExpert.ALL
            stack.layer.attention.dropout.rate = stack.layer.residual_dropout.rate = 0.0
    if not random:
        params.task.input_dropout.rate = 0.0
    return params


def _compiled(params: Params, num_partitions: int):
    """The compiled step of a single batch, the model and its first state."""
    from bench import synthetic
    from lingvo_gshard.sharding.mesh import Mesh
    from lingvo_gshard.sharding.partitioning import Partitioning
    from lingvo_gshard.spmd import program
    from lingvo_gshard.train import steps

    model, state = synthetic.model_and_state(params, num_partitions)
    batch_spec = synthetic.specs_of(synthetic.training_batch(params))
    partitioning = Partitioning.from_dict(Mesh.flat(num_partitions), params.sharding)
    step = steps.train_step(model.model_fn, params)
    annotated = steps.trainer(step, model.state_spec, batch_spec, 1, partitioning)
    return program.export(annotated, partitioning).compile(), model, state


if __name__ == "__main__":
    app.run(main)
