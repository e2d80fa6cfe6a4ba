"""Times a function of ours beside PyTorch's, for several group sizes, dispatches and device counts.

The peer (bench/torch_peer) does the same mathematics with the same weights on 2 threads. Both run
with float32 products and with bfloat16 ones: ours by task.product_dtype, the peer's by autocast.
Calls of ours, calls of the peer and matrix products by NumPy alternate, so that all of them run
under the same load. The best time of each counts. The last two columns are what the peer takes with
bfloat16 and with float32, over what ours takes with bfloat16.
"""

import dataclasses
import itertools
import tempfile
import time
from collections.abc import Callable

import numpy as np
from absl import flags

from bench import peer, synthetic
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.files import table
from lingvo_gshard.layers.dispatch import Dispatch
from lingvo_gshard.spmd import devices, environment

_MODEL = flags.DEFINE_string("model", "toy.MoE8E8L", "A registered experiment.")
_PARTITIONS = flags.DEFINE_list("partitions", ["1", "2", "4"], "The device counts to try.")
_GROUP_SIZES = flags.DEFINE_list("group_sizes", ["64", "256"], "The group sizes to try, in tokens.")
_DISPATCHES = flags.DEFINE_list("dispatches", ["einsum", "gather"], "The dispatches to try.")
_CALLS = flags.DEFINE_integer("calls", 6, "The number of timed calls of each.")

_PRODUCT_SIZE = 2048
_HEADER = (
    "group size",
    "dispatch",
    "devices",
    "ours s",
    "GFLOP/s",
    "of NumPy's",
    "tokens/s",
    "torch s",
    "torch / ours",
    "ours bfloat16 s",
    "torch bfloat16 s",
    "both bfloat16",
    "torch / ours bfloat16",
)
_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Work:
    """A function to time.

    Attributes:
      call: does the work, and returns when the devices have finished.
      theta: the model's weights; the first call may donate their memory.
      batch: the batch that the peer works on.
      gflop: the work's matrix products, as model.flops counts them.
      tokens: the number of target tokens.
    """

    call: Callable[[], None]
    theta: NestedMap
    batch: NestedMap
    gflop: float
    tokens: int


def compare(title: str, command: str, prepare: Callable[[Params, int], Work]) -> None:
    """Prints a table of times and ratios with a line for every setting that the flags select.

    Args:
      title: what is compared.
      command: the peer's command for it.
      prepare: (params, number of devices) -> the Work.
    """
    environment.prepare(max(map(int, _PARTITIONS.value)))
    devices.start()
    numpy_rate = _NumpyRate()
    settings = itertools.product(_GROUP_SIZES.value, _DISPATCHES.value, _PARTITIONS.value)
    timings = {setting: _time(numpy_rate, command, prepare, *setting) for setting in settings}
    limit = numpy_rate.gflop_per_sec()
    rows = [(*setting, *timing.cells(limit)) for setting, timing in timings.items()]
    print(f"{_MODEL.value}, {title}; NumPy's matrix product: {limit:.0f} GFLOP/s")
    print(table.text([_HEADER, *rows]))


@dataclasses.dataclass(frozen=True)
class _Timing:
    """The best times of one setting, in seconds."""

    gflop: float
    tokens: int
    ours: float
    ours_bfloat16: float
    torch: float
    torch_bfloat16: float

    def cells(self, limit: float) -> list[str]:
        """Returns the times and ratios of a row; the limit is in GFLOP/s."""
        rate = self.gflop / self.ours
        return [
            f"{self.ours:.3f}",
            f"{rate:.0f}",
            f"{rate / limit:.0%}",
            f"{self.tokens / self.ours:.0f}",
            f"{self.torch:.3f}",
            f"{self.torch / self.ours:.2f}",
            f"{self.ours_bfloat16:.3f}",
            f"{self.torch_bfloat16:.3f}",
            f"{self.torch_bfloat16 / self.ours_bfloat16:.2f}",
            f"{self.torch / self.ours_bfloat16:.2f}",
        ]


class _NumpyRate:
    """The rate of NumPy's float32 matrix products: the machine's limit in this run."""

    def __init__(self) -> None:
        shape = (2, _PRODUCT_SIZE, _PRODUCT_SIZE)
        self._factors = np.random.default_rng(0).standard_normal(shape, np.float32)
        self._best_secs = float("inf")

    def measure(self) -> None:
        """Times one product."""
        began = time.perf_counter()
        _ = self._factors[0] @ self._factors[1]
        self._best_secs = min(self._best_secs, time.perf_counter() - began)

    def gflop_per_sec(self) -> float:
        """Returns the best rate measured so far."""
        return 2 * _PRODUCT_SIZE**3 / self._best_secs / 1e9


def _time(
    numpy_rate: _NumpyRate,
    command: str,
    prepare: Callable[[Params, int], Work],
    group_size: str,
    dispatch: str,
    devices: str,
) -> _Timing:
    params = synthetic.experiment(_MODEL.value)
    for stack in (params.task.encoder, params.task.decoder):
        stack.moe.Set(group_size=int(group_size), dispatch=Dispatch(dispatch))
    works = []
    for dtype in _DTYPES:
        params.task.product_dtype = dtype
        works.append(prepare(params, int(devices)))
    work = works[0]
    secs = []
    with (
        tempfile.TemporaryDirectory() as folder,
        peer.start_worker(folder, params, work.theta, work.batch) as worker,
    ):
        for _ in range(1 + _CALLS.value):
            numpy_rate.measure()
            ours = [_secs(each.call) for each in works]
            asked = (command, f"{command}_bfloat16")
            secs.append([*ours, *(worker.ask(each)["secs"] for each in asked)])
    return _Timing(work.gflop, work.tokens, *map(min, zip(*secs, strict=True)))


def _secs(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
