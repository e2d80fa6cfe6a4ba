"""Decoded tokens/s and memory of the flat beam, of classic reordered caches and of a peer.

    python -m bench.decode [--model=toy.MoE8E4L] [--beams=1,4,8] [--batches=1,32] [--lengths=32,128]

The peer is Hugging Face transformers' beam search over a PyTorch MoE model of the same sizes
(bench/torch_peer/beam_worker.py); it runs if --torch_python exists. flat16 and peer16 multiply
bfloat16 numbers: ours by task.product_dtype, the peer by autocast. Calls of all alternate, more of
them where a call is short, and the best time of each counts. The weights are untrained and
no hypothesis may end early, so the work is the same in every run. Tokens are those of the best
hypotheses. MiB are memory beside the weights: for ours, the temporaries and results that XLA
allocates; for the peer, the growth of its process.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import pathlib
import time
from collections.abc import Callable

import tensorflow as tf
from absl import flags

from bench import classic_beam, peer, synthetic
from lingvo_gshard import cli
from lingvo_gshard.beam_search import flat_beam_search
from lingvo_gshard.beam_search.beam import BeamSearch, Requests
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.spmd import devices, environment, lowering
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import compile_program

_MODEL = flags.DEFINE_string("model", "toy.MoE8E4L", "A registered experiment.")
_PARTITIONS = flags.DEFINE_integer(
    "partitions", 2, "Devices; 1 is used where they do not divide the batch."
)
_BEAMS = flags.DEFINE_list("beams", ["1", "4", "8"], "The beam sizes to try.")
_BATCHES = flags.DEFINE_list("batches", ["1", "32"], "The numbers of sentences in a batch to try.")
_LENGTHS = flags.DEFINE_list("lengths", ["32", "128"], "Tokens of a source and of a hypothesis.")
_CALLS = flags.DEFINE_integer("calls", 3, "The least number of timed calls of each.")
_SECS = flags.DEFINE_float("secs", 8.0, "The least time to spend on a case, in seconds.")
_TORCH = flags.DEFINE_string(
    "torch_python", peer.PYTHON, "The Python of an environment with torch_peer's requirements."
)
_CLOCK = flags.DEFINE_enum(
    "clock",
    "wall",
    ["wall", "cpu"],
    "What is measured; cpu, the process' seconds on all cores, suits a busy machine.",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch of sentences to decode into `beam` hypotheses each, all with `length` tokens."""

    beam: int
    batch: int
    length: int


@dataclasses.dataclass
class Cost:
    """The best time of the calls so far, and the memory of a call beside the weights."""

    secs: float
    mib: float


# Decodes one batch and returns the cost.
Call = Callable[[], Cost]


def main() -> None:
    environment.prepare(_PARTITIONS.value)
    devices.start()
    decoders: dict[str, Callable[[Case], Call]] = {
        "flat": functools.partial(_our_decoder, is_flat=True),
        "flat16": functools.partial(_our_decoder, is_flat=True, product_dtype="bfloat16"),
        "classic": functools.partial(_our_decoder, is_flat=False),
    }
    with contextlib.ExitStack() as stack:
        if pathlib.Path(_TORCH.value).exists():
            sizes = peer.sizes_json(synthetic.experiment(_MODEL.value))
            worker = stack.enter_context(peer.Peer("beam_worker", sizes, _TORCH.value))
            decoders["peer"] = functools.partial(_peer_decoder, worker)
            decoders["peer16"] = functools.partial(_peer_decoder, worker, bfloat16=True)
        else:
            print(f"There is no {_TORCH.value}, so no peer runs.")
        _compare(decoders)


def _compare(decoders: dict[str, Callable[[Case], Call]]) -> None:
    """Prints a line for every case as soon as it is measured; the flat decoder comes first."""
    names = list(decoders)
    print(f"{_MODEL.value}; devices: {_PARTITIONS.value}; {_CLOCK.value} time")
    header = "".join(f"{name + ' tok/s':>15}{'MiB':>7}" for name in names)
    ratios = "".join(f"{'flat/' + name:>14}" for name in names[1:])
    print(f"{'beam':>5}{'batch':>6}{'length':>7}{header}{ratios}")
    for length, batch, beam in itertools.product(_LENGTHS.value, _BATCHES.value, _BEAMS.value):
        case = Case(int(beam), int(batch), int(length))
        best = _best_costs({name: decoder(case) for name, decoder in decoders.items()})
        tokens = case.batch * case.length
        rates = "".join(f"{tokens / m.secs:>15.0f}{m.mib:>7.0f}" for m in best.values())
        speedups = "".join(f"{best[name].secs / best['flat'].secs:>14.2f}" for name in names[1:])
        print(f"{beam:>5}{batch:>6}{length:>7}{rates}{speedups}", flush=True)


def _best_costs(calls: dict[str, Call]) -> dict[str, Cost]:
    best = {name: call() for name, call in calls.items()}
    began = time.monotonic()
    num_calls = 0
    while num_calls < _CALLS.value or time.monotonic() - began < _SECS.value:
        for name, call in calls.items():
            best[name].secs = min(best[name].secs, call().secs)
        num_calls += 1
    return best


def _our_decoder(case: Case, is_flat: bool, product_dtype: str = "float32") -> Call:
    num_partitions = _PARTITIONS.value if case.batch % _PARTITIONS.value == 0 else 1
    params = synthetic.experiment(_MODEL.value)
    params.task.product_dtype = product_dtype
    model, state = synthetic.model_and_state(params, num_partitions)
    features = synthetic.source_features(case.batch, case.length)
    args = (model.state_spec.theta, synthetic.specs_of(features))
    fn = functools.partial(_search, case, is_flat, model)
    annotated = AnnotatedFn("decode", fn, ("theta", "features"), args, unnamed_dims="B")
    run = compile_program(lowering.export(annotated, model.partitioning))
    theta = run.place("theta", state.theta)
    features = run.place("features", features)

    def decode() -> None:
        lengths = run(NestedMap(theta), features).lengths.block_until_ready()
        assert (lengths == case.length).all()

    clock = time.process_time if _CLOCK.value == "cpu" else time.perf_counter
    decode()
    report = run.report()
    mib = num_partitions * (report.temp_bytes + report.output_bytes) / 2**20

    def call() -> Cost:
        began = clock()
        decode()
        return Cost(clock() - began, mib)

    return call


def _search(
    case: Case, is_flat: bool, model: TaskModel, theta: NestedMap, features: NestedMap
) -> NestedMap:
    """Searches for the best hypothesis of each source, with flat or with classic caches."""
    config = BeamSearch(case.beam, case.length, num_best=1)
    task = model.task
    if is_flat:
        grow = task.GrowDecode
        state = task.InitDecode(theta, features, config.first_places)
        step = functools.partial(task.DecodeStep, theta)
    else:
        grow = classic_beam.grow(task, config)
        state = classic_beam.init_state(task, theta, features, config)
        step = classic_beam.decode_step(task, theta, config)
    lengths = tf.fill([case.batch], case.length)
    requests = Requests(lengths, lengths, tf.constant([0, 0]))
    annotate = Annotator(model.partitioning).annotate
    found = flat_beam_search.search(config, step, state, requests, annotate, grow)
    return NestedMap(ids=found.ids, lengths=found.lengths, scores=found.scores)


def _peer_decoder(worker: peer.Peer, case: Case, *, bfloat16: bool = False) -> Call:
    asked = {**dataclasses.asdict(case), "clock": _CLOCK.value, "bfloat16": bfloat16}
    question = json.dumps(asked)
    return lambda: Cost(**worker.ask(question))


if __name__ == "__main__":
    cli.run("decode", main)
