"""Decoded tokens/s and memory of the flat beam, of classic reordered caches and of peers.

    python -m bench.decode [--model=toy.MoE8E4L] [--beams=1,4,8] [--batches=1,32] [--lengths=32,128]
    taskset -c 0 python -m bench.decode --model=bilingual.TransformerBase --partitions=1 \
        --decoders=ctranslate2,flat --beams=4 --batches=1,8

For a model with experts, the peer is Hugging Face transformers' beam search over a PyTorch model of
the same sizes (bench/torch_peer/beam_worker.py). For a dense model, it is CTranslate2 with the same
weights (bench/ctranslate2_peer), and its hypotheses are compared with ours. A peer runs if its
environment exists.

    flat                the flat beam in float32
    flat_laid_out       the same; decode.weights lays the large weights out for few rows
    flat16              its products multiply bfloat16 numbers, by task.product_dtype
    flat_bfloat16       its large weights are stored in bfloat16, by decode.weights
    flat_int8           the same in int8
    classic             reordered caches in float32
    transformers        the peer in float32; transformers16 uses bfloat16 by autocast
    ctranslate2         the peer in float32; ctranslate2_int8 uses int8

Calls of all decoders alternate, and short calls are repeated more often. Each decoder uses the
cores of this process, which taskset chooses, and a thread for each core. The weights are untrained
and hypotheses may not end, so the work is the same in every run. Only the tokens of the best
hypotheses count. `speed` is relative to the first decoder, by the best and by the median time. MiB
is the memory besides the weights: for ours, the temporaries and results that XLA allocates; for a
peer, the growth of its process. `same ids` is the number of sentences with the same ids as `flat`.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np
from absl import flags

from bench import call_cost, classic_beam, peer, platforms, synthetic
from lingvo_gshard import cli
from lingvo_gshard.beam_search import flat_beam_search
from lingvo_gshard.beam_search.beam import BeamSearch, Requests
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.repeat import Layers
from lingvo_gshard.layers.stored_weights import Numbers
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.spmd import lowering, tracer
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import compile_program
from lingvo_gshard.spmd.program import Program
from lingvo_gshard.train.programs import Programs

_MODEL = flags.DEFINE_string("model", "toy.MoE8E4L", "A registered experiment.")
_DECODERS = flags.DEFINE_list(
    "decoders", None, "The decoders to run; the first one is the reference. By default, all."
)
_PARTITIONS = flags.DEFINE_integer(
    "partitions", 2, "The number of devices; 1 is used if they do not divide the batch."
)
_BEAMS = flags.DEFINE_list("beams", ["1", "4", "8"], "The beam sizes to try.")
_BATCHES = flags.DEFINE_list("batches", ["1", "32"], "The numbers of sentences in a batch to try.")
_LENGTHS = flags.DEFINE_list("lengths", ["32", "128"], "Tokens of a source and of a hypothesis.")
_MIN_STAGE_PLACES = flags.DEFINE_integer(
    "min_stage_places", 128, "decode.min_stage_places, the least places of a stage, for ours.", 1
)
_CALLS = flags.DEFINE_integer("calls", 3, "The least number of timed calls of each.")
_SECS = flags.DEFINE_float("secs", 8.0, "The least time to spend on a case, in seconds.")
_TORCH = flags.DEFINE_string(
    "torch_python", peer.PYTHON, "The Python of an environment with torch_peer's requirements."
)
_CTRANSLATE2 = flags.DEFINE_string(
    "ctranslate2_python", peer.CTRANSLATE2_PYTHON, "The same, for ctranslate2_peer."
)
_CLOCK = flags.DEFINE_enum(
    "clock",
    "wall",
    ["wall", "cpu"],
    "The clock; cpu, the process' seconds on all cores, suits a busy machine.",
)


@dataclasses.dataclass(frozen=True)
class Ours:
    """A decoder of this project."""

    is_flat: bool = True
    product_dtype: str = "float32"
    weights: Numbers = Numbers.FLOAT32


_OURS = {
    "flat": Ours(),
    "flat_laid_out": Ours(weights=Numbers.FLOAT32_LAID_OUT),
    "flat16": Ours(product_dtype="bfloat16"),
    "flat_bfloat16": Ours(weights=Numbers.BFLOAT16),
    "flat_int8": Ours(weights=Numbers.INT8),
    "classic": Ours(is_flat=False),
}
_DENSE_PEERS = ("ctranslate2", "ctranslate2_int8")
_PEERS_WITH_EXPERTS = ("transformers", "transformers16")


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch of sentences to decode into `beam` hypotheses each, all with `length` tokens."""

    beam: int
    batch: int
    length: int


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The time of a call, its memory besides the weights, and the best hypotheses [batch, length].

    The ids are None for a peer with other weights.
    """

    secs: float
    mib: float
    ids: np.ndarray | None


# Decodes one batch.
Call = Callable[[], Outcome]
Decoder = Callable[[Case], Call]


def main() -> None:
    names = _names()
    description = platforms.start(_PARTITIONS.value)
    params = _experiment()

    with contextlib.ExitStack() as stack:
        decoders: dict[str, Decoder] = {
            name: functools.partial(_our_decoder, ours) for name, ours in _OURS.items()
        }
        if not set(names) <= set(decoders):
            if _is_dense(params):
                decoders |= _dense_peers(stack, params)
            else:
                decoders |= _peers_with_experts(stack, params)
        _compare({name: decoders[name] for name in names}, description)


def _experiment() -> Params:
    params = synthetic.experiment(_MODEL.value)
    # Unrolled layers have separate weights, which a peer can load.
    params.task.encoder.layers_as = Layers.UNROLLED
    params.task.decoder.layers_as = Layers.UNROLLED
    return params


def _is_dense(params: Params) -> bool:
    return params.task.encoder.moe is None


def _names() -> list[str]:
    """Returns the decoders to run. Raises ValueError for an unknown name."""
    is_dense = _is_dense(_experiment())
    peers = _DENSE_PEERS if is_dense else _PEERS_WITH_EXPERTS
    names = [*_OURS, *peers]

    if _DECODERS.value is None:
        python = pathlib.Path(_CTRANSLATE2.value if is_dense else _TORCH.value)
        if not python.exists():
            print(f"{python} is missing, so the benchmark runs without a peer.")
            return list(_OURS)
        return names

    for name in _DECODERS.value:
        if name not in names:
            expected = ", ".join(names)
            raise ValueError(f"--decoders={name}: for {_MODEL.value}, expected {expected}.")
    return list(_DECODERS.value)


def _peers_with_experts(stack: contextlib.ExitStack, params: Params) -> dict[str, Decoder]:
    sizes = peer.sizes_json(params)
    worker = peer.Peer("bench.torch_peer.beam_worker", sizes, python=_TORCH.value)
    stack.enter_context(worker)
    return {
        "transformers": functools.partial(_torch_decoder, worker, bfloat16=False),
        "transformers16": functools.partial(_torch_decoder, worker, bfloat16=True),
    }


def _dense_peers(stack: contextlib.ExitStack, params: Params) -> dict[str, Decoder]:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    _, theta = _model_and_weights(Ours(), 1)
    num_positions = max(int(length) for length in _LENGTHS.value)
    worker = peer.start_dense_worker(folder, params, theta, num_positions, _CTRANSLATE2.value)
    stack.enter_context(worker)
    return {
        "ctranslate2": functools.partial(_ctranslate2_decoder, worker, "float32"),
        "ctranslate2_int8": functools.partial(_ctranslate2_decoder, worker, "int8_float32"),
    }


def _compare(decoders: dict[str, Decoder], description: str) -> None:
    """Prints the lines of every case as soon as it is measured."""
    cores = len(os.sched_getaffinity(0))
    print(
        f"{_MODEL.value}; {description}; cores: {cores}; {_CLOCK.value} time; "
        f"speed relative to {next(iter(decoders))}"
    )
    columns = ("tok/s best", "median", "speed best", "median", "MiB", "same ids")
    header = "".join(f"{column:>11}" for column in columns)
    print(f"{'beam':>5}{'batch':>6}{'length':>7}  {'':17}{header}")
    for length, batch, beam in itertools.product(_LENGTHS.value, _BATCHES.value, _BEAMS.value):
        case = Case(int(beam), int(batch), int(length))
        outcomes = _outcomes({name: decoder(case) for name, decoder in decoders.items()})
        for line in _lines(case, outcomes):
            print(line, flush=True)


def _outcomes(calls: dict[str, Call]) -> dict[str, list[Outcome]]:
    """Returns the outcomes of each decoder's calls, which alternate, without the first calls."""
    outcomes = {name: [call()] for name, call in calls.items()}
    began = time.monotonic()
    num_calls = 0
    while num_calls < _CALLS.value or time.monotonic() - began < _SECS.value:
        for name, call in calls.items():
            outcomes[name].append(call())
        num_calls += 1
    return outcomes


def _lines(case: Case, outcomes: dict[str, list[Outcome]]) -> list[str]:
    num_tokens = case.batch * case.length
    expected = outcomes["flat"][0].ids if "flat" in outcomes else None
    lines = []
    first_rates: list[float] = []
    for name, calls in outcomes.items():
        secs = [call.secs for call in calls[1:]]
        rates = [num_tokens / min(secs), num_tokens / statistics.median(secs)]
        first_rates = first_rates or rates
        speeds = [rate / first for rate, first in zip(rates, first_rates, strict=True)]
        numbers = [f"{rate:>11.0f}" for rate in rates] + [f"{speed:>11.2f}" for speed in speeds]

        same = ""
        if expected is not None and calls[0].ids is not None:
            same = f"{np.all(calls[0].ids == expected, axis=1).sum()} of {case.batch}"
        where = f"{case.beam:>5}{case.batch:>6}{case.length:>7}"
        lines.append(f"{where}  {name:17}{''.join(numbers)}{calls[0].mib:>11.0f}{same:>11}")
    return lines


def _params(ours: Ours) -> Params:
    """Returns the experiment's Params for a decoder."""
    params = _experiment()
    params.task.product_dtype = ours.product_dtype
    params.decode.weights = ours.weights
    return params


@functools.cache
def _model_and_weights(ours: Ours, num_partitions: int) -> tuple[TaskModel, NestedMap]:
    """Returns the model, and its weights in the form that its decoder keeps."""
    params = _params(ours)
    model = synthetic.partitioned_model(params, num_partitions)
    theta = synthetic.programs(model).initialize(seed=1).theta
    keep = compile_program(Programs(model).weight_converter())
    return model, keep(NestedMap(theta=theta)).state.theta


def _our_decoder(ours: Ours, case: Case) -> Call:
    num_partitions = _PARTITIONS.value if case.batch % _PARTITIONS.value == 0 else 1
    model, theta = _model_and_weights(ours, num_partitions)
    features = synthetic.source_features(case.batch, case.length)
    config = BeamSearch(
        case.beam, case.length, num_best=1, min_stage_places=_MIN_STAGE_PLACES.value
    )
    run = compile_program(
        tracer.traced(_program, _params(ours), model.partitioning, case, config, ours.is_flat)
    )
    theta = run.place("theta", theta)
    features = run.place("features", features)

    report = run.report()
    mib = num_partitions * (report.temp_bytes + report.output_bytes) / 2**20
    clock = call_cost.CLOCKS[_CLOCK.value]

    def call() -> Outcome:
        began = clock()
        ids = np.asarray(run(NestedMap(theta), features).ids[:, 0])
        secs = clock() - began

        assert ids.shape == (case.batch, case.length), ids.shape
        return Outcome(secs, mib, ids)

    return call


def _program(
    params: Params, partitioning: Partitioning, case: Case, config: BeamSearch, is_flat: bool
) -> Program:
    """Traces a search, with flat or with classic caches."""
    model = TaskModel(params, partitioning)
    features = synthetic.source_features(case.batch, case.length)
    args = (model.decoder_spec().theta, synthetic.specs_of(features))
    fn = functools.partial(_search, case, config, is_flat, model)
    annotated = AnnotatedFn("decode", fn, ("theta", "features"), args, unnamed_dims="B")
    return lowering.export(annotated, partitioning)


def _search(
    case: Case,
    config: BeamSearch,
    is_flat: bool,
    model: TaskModel,
    theta: NestedMap,
    features: NestedMap,
) -> NestedMap:
    """Searches for the best hypothesis of each source, with flat or with classic caches."""
    task = model.task
    if is_flat:
        grow = task.GrowDecode
        state = task.InitDecode(theta, features, config.first_places)
        step = functools.partial(task.DecodeStep, theta)
    else:
        grow = classic_beam.grow(task, config)
        state = classic_beam.init_state(task, theta, features, config)
        step = classic_beam.decode_step(task, theta, config)
    # EOS is forbidden even at the last step, like for the peers.
    lengths = tf.fill([case.batch], case.length)
    requests = Requests(lengths + 1, lengths, tf.constant([0, 0]))
    annotate = Annotator(model.partitioning).annotate
    found = flat_beam_search.search(config, step, state, requests, annotate, grow)
    return NestedMap(ids=found.ids, lengths=found.lengths, scores=found.scores)


def _torch_decoder(worker: peer.Peer, case: Case, *, bfloat16: bool) -> Call:
    asked = {**dataclasses.asdict(case), "clock": _CLOCK.value, "bfloat16": bfloat16}
    question = json.dumps(asked)

    def call() -> Outcome:
        answer = worker.ask(question)
        return Outcome(answer["secs"], answer["mib"], ids=None)

    return call


def _ctranslate2_decoder(worker: peer.Peer, compute_type: str, case: Case) -> Call:
    sources = synthetic.source_features(case.batch, case.length).source_ids
    asked = {
        "beam": case.beam,
        "length": case.length,
        "sources": sources.tolist(),
        "clock": _CLOCK.value,
        "compute_type": compute_type,
    }
    question = json.dumps(asked)

    def call() -> Outcome:
        answer = worker.ask(question)
        return Outcome(answer["secs"], answer["mib"], np.array(answer["ids"]))

    return call


if __name__ == "__main__":
    cli.run("decode", main)
