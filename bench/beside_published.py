"""Times a layer of a published shape beside PyTorch, and beside its products alone.

The layer has balanced routing. Its peer, torch_peer/grouped_experts.py, computes the same function
of the same arrays. The norms of all results are compared first. The same products are also timed
alone: on a CPU by NumPy, one expert after the other, and by XLA, all experts at once; on a GPU by
XLA, and by its operator ragged_dot. Calls of all alternate, and the median of each round counts. A
CPU without instructions for bfloat16 computes in float32 only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import statistics
from collections.abc import Callable, Iterable, Mapping

from bench import call_cost, compiled_layer, peer, platforms, published_shapes, published_times
from bench.balanced_layer import BalancedLayer
from bench.compiled_layer import CompiledLayer
from bench.published_shapes import PRODUCTS, Shape
from bench.published_times import Pass, Round, Times
from lingvo_gshard.layers.dispatch import Dispatch
from xla_spmd.runtime import environment

_ROUNDS = 2
_TORCH = "torch"
_TIMED = (Pass.FORWARD, Pass.BOTH)

# The relative differences of norms that rounding may make; GPUs multiply float32 numbers in TF32.
_TOLERANCES = {"float32": 2e-3, "bfloat16": 3e-2}

# The libraries that compute the products alone. NumPy has no fast product of bfloat16 numbers.
_LIBRARIES = {
    ("cpu", "float32"): ("NumPy", "XLA"),
    ("cpu", "bfloat16"): ("XLA",),
    ("cuda", "float32"): ("XLA", "ragged_dot"),
    ("cuda", "bfloat16"): ("XLA", "ragged_dot"),
}

# Functions that time a call, by the contender and its pass or product.
_Timers = dict[tuple[str, str], Callable[[], float]]


@dataclasses.dataclass(frozen=True)
class How:
    """The choices of a run besides the shape."""

    dispatches: tuple[Dispatch, ...]
    clock: str  # A key of call_cost.CLOCKS.
    calls: int  # The calls of each contender in a round.
    torch_python: str


def compare(shape: Shape, layer: BalancedLayer, how: How) -> None:
    """Prints the times of a layer, which is the shape or a part of it, in each dtype.

    Raises ValueError if the processes need more than half of a CPU machine's memory.
    """
    device = platforms.start(1)
    on_cpu = platforms.chosen() == "cpu"
    has_torch = shutil.which(how.torch_python) is not None
    if on_cpu:
        _check_memory(shape, layer, num_processes=2 if has_torch else 1)

    print(published_times.described(shape, layer))
    print(f"{device}; {how.clock} time; the medians of {how.calls} calls", flush=True)
    if not has_torch:
        print(f"PyTorch is left out: {how.torch_python} is missing; `make .venv-torch/ready`.")

    dtypes = ["float32", "bfloat16"]
    if on_cpu and not environment.multiplies_bfloat16():
        print("bfloat16 is left out: this CPU has no instructions that multiply it.")
        dtypes.remove("bfloat16")
    for dtype in dtypes:
        rounds = _rounds(layer, dtype, how, has_torch=has_torch)
        print(f"\n{dtype}\n{published_times.text(shape, layer, rounds)}", flush=True)


def _check_memory(shape: Shape, layer: BalancedLayer, num_processes: int) -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    needed = published_shapes.needed_gib(layer, num_processes)
    if needed <= total / 2:
        return

    experts = published_shapes.fitting_experts(layer, total / 2, num_processes)
    hint = "use fewer --tokens" if experts is None else f"--experts={experts} fits"
    raise ValueError(
        f"--shapes={shape.name}: about {needed:.1f} GiB are needed, more than half of this "
        f"machine's {total:.1f} GiB; {hint}."
    )


def _rounds(layer: BalancedLayer, dtype: str, how: How, *, has_torch: bool) -> list[Round]:
    """Times all contenders, in rounds of calls that alternate."""
    with contextlib.ExitStack() as stack:
        worker = None
        if has_torch:
            sizes = json.dumps(dataclasses.asdict(layer))
            module = "bench.torch_peer.grouped_experts"
            started = peer.Peer(module, sizes, platforms.chosen(), dtype, python=how.torch_python)
            worker = stack.enter_context(started)

        weights = compiled_layer.weights_of(layer, dtype)
        batch = compiled_layer.batch_of(layer, dtype)
        ours = {
            dispatch.value: CompiledLayer(layer, dispatch, dtype, weights, batch)
            for dispatch in how.dispatches
        }
        if worker is not None:
            expected = worker.ask("norms")
            for compiled in ours.values():
                _check(compiled.norms(), expected, _TOLERANCES[dtype])

        libraries = _LIBRARIES[platforms.chosen(), dtype]
        products = compiled_layer.products_of(layer, dtype, weights, libraries)
        timers = _layer_timers(ours, worker, how.clock)
        for library, calls in products.items():
            for equation, call in calls.items():
                timers[library, equation] = functools.partial(call_cost.secs, call, how.clock)

        for timer in timers.values():  # The first calls compile, and touch all memory.
            timer()
        return [_round(timers, ours, products, how.calls) for _ in range(_ROUNDS)]


def _layer_timers(
    ours: Mapping[str, CompiledLayer], worker: peer.Peer | None, clock: str
) -> _Timers:
    """Returns the timers of ours and of the peer, which take turns."""
    timers: _Timers = {}
    for part in _TIMED:
        for dispatch, compiled in ours.items():
            call = functools.partial(compiled.call, part)
            timers[dispatch, part.value] = functools.partial(call_cost.secs, call, clock)
        if worker is not None:
            question = f"{part.value} {clock}"
            timers[_TORCH, part.value] = functools.partial(_peer_secs, worker, question)
    return timers


def _peer_secs(worker: peer.Peer, question: str) -> float:
    return float(worker.ask(question)["secs"])


def _round(timers: _Timers, ours: Iterable[str], products: Iterable[str], calls: int) -> Round:
    """Times all contenders: our dispatches, the libraries of products, and perhaps the peer."""
    secs: dict[tuple[str, str], list[float]] = {key: [] for key in timers}
    for _ in range(calls):
        for key, timer in timers.items():
            secs[key].append(timer())
    medians = {key: statistics.median(taken) for key, taken in secs.items()}

    def times(contender: str) -> Times:
        forward, both = (medians[contender, part.value] for part in _TIMED)
        return Times(forward, both)

    has_torch = (_TORCH, Pass.BOTH.value) in medians
    return Round(
        {dispatch: times(dispatch) for dispatch in ours},
        times(_TORCH) if has_torch else None,
        {library: [medians[library, p.equation] for p in PRODUCTS] for library in products},
    )


def _check(actual: Mapping[str, float], expected: Mapping[str, float], tolerance: float) -> None:
    """Raises AssertionError unless both sides compute the same function."""
    assert actual.keys() == expected.keys(), (actual, expected)
    for name, norm in expected.items():
        if not abs(actual[name] - norm) <= tolerance * norm:
            raise AssertionError(f"{name}: our norm is {actual[name]}, the peer's {norm}.")
