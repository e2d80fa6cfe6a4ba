"""Decoded tokens/s and memory: the flat beam, the same search with reordered caches, and a peer.

    python -m bench.decode [--model=toy.MoE8E4L] [--beams=1,4,8] [--batches=1,32] [--lengths=32,128]

The peer is Hugging Face transformers' beam search over a PyTorch MoE model of the same sizes
(bench/torch_peer/beam_worker.py), if --torch_python is there. The calls of all three alternate, and
the best of each counts: of many, where a call is short. Weights are untrained and no hypothesis may
end early: the work is the same in every run. A token counts once, for the best hypothesis. MiB are
those beside the weights: the program's temporaries and results, as XLA allots them, and what the
peer's process grows by.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import subprocess
import time
from collections.abc import Callable

from absl import app, flags

from lingvo_gshard.spmd import environment

_MODEL = flags.DEFINE_string("model", "toy.MoE8E4L", "A registered experiment.")
_PARTITIONS = flags.DEFINE_integer("partitions", 2, "Devices; 1 where these don't divide a batch.")
_BEAMS = flags.DEFINE_list("beams", ["1", "4", "8"], "Beam sizes to try.")
_BATCHES = flags.DEFINE_list("batches", ["1", "32"], "Sentences decoded together.")
_LENGTHS = flags.DEFINE_list("lengths", ["32", "128"], "Tokens of a source and of a hypothesis.")
_CALLS = flags.DEFINE_integer("calls", 3, "Timed calls of each, or more.")
_SECS = flags.DEFINE_float("secs", 8.0, "The least time for the calls of a case.")
_TORCH = flags.DEFINE_string(
    "torch_python", ".venv-torch/bin/python", "Of an environment with torch_peer's requirements."
)
_CLOCK = flags.DEFINE_enum(
    "clock", "wall", ["wall", "cpu"], "cpu, for a busy machine: the process' seconds on all cores."
)


@dataclasses.dataclass(frozen=True)
class Case:
    """What is decoded: k hypotheses of each of `batch` sentences, all of `length` tokens."""

    beam: int
    batch: int
    length: int


@dataclasses.dataclass
class Measured:
    """The best of its calls so far, and the memory of one beside the weights."""

    secs: float
    mib: float


# (case) -> a call that gives its Measured
Way = Callable[[Case], Callable[[], Measured]]


def main(argv: list[str]) -> None:
    environment.prepare(_PARTITIONS.value)
    ways: dict[str, Way] = {"flat": lambda c: _ours(c, True), "classic": lambda c: _ours(c, False)}
    if pathlib.Path(_TORCH.value).exists():
        ways["peer"] = _peer()
    else:
        print(f"No {_TORCH.value}: no peer is run.")
    print(f"{_MODEL.value}, {_PARTITIONS.value} devices, {_CLOCK.value} time")
    header = "".join(f"{name + ' tok/s':>15}{'MiB':>7}" for name in ways)
    ratios = "".join(f"{'flat/' + name:>14}" for name in list(ways)[1:])
    print(f"{'beam':>5}{'batch':>6}{'length':>7}{header}{ratios}")
    for length, batch, beam in itertools.product(_LENGTHS.value, _BATCHES.value, _BEAMS.value):
        case = Case(int(beam), int(batch), int(length))
        best = _best_of_each({name: way(case) for name, way in ways.items()})
        tokens = case.batch * case.length
        rates = "".join(f"{tokens / m.secs:>15.0f}{m.mib:>7.0f}" for m in best.values())
        gains = "".join(f"{best[name].secs / best['flat'].secs:>14.2f}" for name in list(ways)[1:])
        print(f"{beam:>5}{batch:>6}{length:>7}{rates}{gains}", flush=True)


def _best_of_each(calls: dict[str, Callable[[], Measured]]) -> dict[str, Measured]:
    best = {name: call() for name, call in calls.items()}
    began, num_calls = time.monotonic(), 0
    while num_calls < _CALLS.value or time.monotonic() - began < _SECS.value:
        for name, call in calls.items():
            best[name].secs = min(best[name].secs, call().secs)
        num_calls += 1
    return best


def _ours(case: Case, is_flat: bool) -> Callable[[], Measured]:
    from bench import synthetic
    from lingvo_gshard.core.nested_map import NestedMap
    from lingvo_gshard.sharding.layout import TensorSpec
    from lingvo_gshard.spmd import lowering
    from lingvo_gshard.spmd.executable import compile_program

    num_partitions = _PARTITIONS.value if case.batch % _PARTITIONS.value == 0 else 1
    model, state = synthetic.model_and_state(synthetic.experiment(_MODEL.value), num_partitions)
    annotated = _search_fn(case, is_flat, model)
    run = compile_program(lowering.export(annotated, model.partitioning))
    features = synthetic.source_features(case.batch, case.length)
    assert features.Transform(lambda x: TensorSpec(x.shape, "int32", "BL")) == annotated.args[1]
    theta, features = run.place("theta", state.theta), run.place("features", features)

    def decode() -> None:
        lengths = run(NestedMap(theta), features).lengths.block_until_ready()
        assert (lengths == case.length).all()

    clock = time.process_time if _CLOCK.value == "cpu" else time.perf_counter
    decode()
    report = run.report()
    mib = num_partitions * (report.temp_bytes + report.output_bytes) / 2**20

    def measure() -> Measured:
        began = clock()
        decode()
        return Measured(clock() - began, mib)

    return measure


def _search_fn(case: Case, is_flat: bool, model):
    """The search over the source's features, as an AnnotatedFn of theta and features."""
    from bench import classic_beam, synthetic
    from lingvo_gshard.core.nested_map import NestedMap
    from lingvo_gshard.decode import flat_beam_search
    from lingvo_gshard.decode.beam import BeamSearch, Requests
    from lingvo_gshard.sharding.annotator import Annotator
    from lingvo_gshard.spmd.annotated_fn import AnnotatedFn

    config, task = BeamSearch(case.beam, case.length, num_best=1), model.task

    def fn(theta: NestedMap, features: NestedMap) -> NestedMap:
        if is_flat:
            grow = task.GrowDecode
            state = task.InitDecode(theta, features, config.first_places)

            def step(state, *args):
                return task.DecodeStep(theta, state, *args)

        else:
            grow = classic_beam.grow(task, config)
            state = classic_beam.init_state(task, theta, features, config)
            step = classic_beam.decode_step(task, theta, config)
        requests = Requests.alike(case.batch, case.length, case.length)
        found = flat_beam_search.search(
            config, step, state, requests, Annotator(model.partitioning).annotate, grow
        )
        return NestedMap(ids=found.ids, lengths=found.lengths, scores=found.scores)

    args = (
        model.state_spec.theta,
        synthetic.specs_of(synthetic.source_features(case.batch, case.length)),
    )
    return AnnotatedFn("decode", fn, ("theta", "features"), args, unnamed_dims="B")


def _peer() -> Way:
    worker = subprocess.Popen(
        [_TORCH.value, "-m", "bench.torch_peer.beam_worker", _sizes_json()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdin is not None and worker.stdout is not None
    to_worker, from_worker = worker.stdin, worker.stdout

    def way(case: Case) -> Callable[[], Measured]:
        def measure() -> Measured:
            asked = {**dataclasses.asdict(case), "clock": _CLOCK.value}
            print(json.dumps(asked), file=to_worker, flush=True)
            return Measured(**json.loads(from_worker.readline()))

        return measure

    return way


def _sizes_json() -> str:
    from bench import synthetic
    from bench.torch_peer.sizes import Sizes

    task = synthetic.experiment(_MODEL.value).task
    stack = task.decoder
    sizes = Sizes(
        num_layers=stack.num_layers,
        model_dim=task.dim,
        hidden_dim=stack.moe.hidden_dim,
        num_heads=stack.layer.attention.num_heads,
        head_dim=stack.layer.attention.head_dim,
        num_experts=stack.moe.num_experts,
        group_size=1,
        capacity=1,
        source_vocab_size=task.source_vocab_size,
        target_vocab_size=task.target_vocab_size,
        dropout=0.0,
        label_smoothing=0.0,
        aux_loss_weight=0.0,
        random_second=False,
    )
    return json.dumps(dataclasses.asdict(sizes))


if __name__ == "__main__":
    app.run(main)
