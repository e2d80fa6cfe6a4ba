"""Times a function of ours beside PyTorch's, for several group sizes, dispatches and device counts.

The peer (bench/torch_peer) computes the same function with the same weights, on 2 threads or on the
GPU. Both run with float32 products and with bfloat16 products: ours by task.product_dtype and, with
--bfloat16_activations, task.activation_dtype; the peer by autocast. Calls of our function, calls of
the peer and plain matrix products alternate, so that all of them run under the same load. The best
time of each counts. On CPUs, NumPy computes the plain float32 products and XLA the bfloat16 ones,
on all cores; on a GPU, XLA computes both. The percentages compare our rates with theirs. The last
two columns divide the peer's times with bfloat16 and with float32 by our time with bfloat16.
"""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from bench import peer, platforms, synthetic
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.dispatch import Dispatch
from xla_spmd.files import table

_MODEL = flags.DEFINE_string("model", "toy.MoE8E8L", "A registered experiment.")
_PARTITIONS = flags.DEFINE_list("partitions", ["1", "2", "4"], "The device counts to try.")
_GROUP_SIZES = flags.DEFINE_list("group_sizes", ["64", "256"], "The group sizes to try, in tokens.")
_DISPATCHES = flags.DEFINE_list("dispatches", ["einsum", "gather"], "The dispatches to try.")
_CALLS = flags.DEFINE_integer("calls", 6, "The number of timed calls of each.")
_SET = flags.DEFINE_multi_string("set", [], "A setting to change, path=value; repeatable.")
_BFLOAT16_ACTIVATIONS = flags.DEFINE_bool(
    "bfloat16_activations", False, "Whether our bfloat16 runs keep activations in bfloat16, too."
)
_TORCH = flags.DEFINE_string(
    "torch_python", peer.PYTHON, "The Python of an environment with torch_peer's requirements."
)
_TORCH_COMPILE = flags.DEFINE_bool(
    "torch_compile", False, "Whether the peer's model is compiled, by torch.compile."
)

# The sizes of a plain product's matrices, large enough to keep the device busy.
_PRODUCT_SIZES = {"cpu": 2048, "cuda": 8192}
_HEADER = (
    "group size",
    "dispatch",
    "devices",
    "ours s",
    "GFLOP/s",
    "of rate",
    "tokens/s",
    "torch s",
    "torch / ours",
    "ours bfloat16 s",
    "of rate bfloat16",
    "torch bfloat16 s",
    "both bfloat16",
    "torch / ours bfloat16",
)
_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Work:
    """A function to time.

    Attributes:
      call: the function that does the work, and returns when the devices have finished.
      theta: the model's weights; the first call may donate their memory.
      batch: the batch that the peer works on.
      gflop: the work's matrix products, counted like in model.flops, in GFLOP.
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
      title: the name of the work.
      command: the peer's command for the work.
      prepare: (params, number of devices) -> the Work.
    """
    description = platforms.start(max(map(int, _PARTITIONS.value)))
    size = _PRODUCT_SIZES[platforms.chosen()]
    if platforms.chosen() == "cpu":
        float32_rate = "NumPy's"
        product = _numpy_product(size)
    else:
        float32_rate = "XLA's"
        product = _xla_product(size, "float32")

    rates = _Rates(product, _xla_product(size, "bfloat16"))
    settings = itertools.product(_GROUP_SIZES.value, _DISPATCHES.value, _PARTITIONS.value)
    timings = {setting: _time(rates, command, prepare, *setting) for setting in settings}
    rows = [(*setting, *timing.cells(rates)) for setting, timing in timings.items()]
    print(
        f"{_MODEL.value}, {title}, {description}; matrix products alone: {float32_rate} "
        f"{rates.float32:.0f} GFLOP/s, XLA's in bfloat16 {rates.bfloat16:.0f} GFLOP/s"
    )
    print(table.text([_HEADER, *rows]))


def start_worker(folder: str, params: Params, theta: NestedMap, batch: NestedMap) -> peer.Peer:
    """Starts the peer on the platform. Raises FileNotFoundError if its Python is missing."""
    how = ["compiled"] if _TORCH_COMPILE.value else []
    return peer.start_worker(
        folder, params, theta, batch, platforms.chosen(), *how, python=_TORCH.value
    )


@dataclasses.dataclass(frozen=True)
class _Timing:
    """The best times of one setting, in seconds."""

    gflop: float
    tokens: int
    ours: float
    ours_bfloat16: float
    torch: float
    torch_bfloat16: float

    def cells(self, limits: _Rates) -> list[str]:
        """Returns the times and ratios of a row."""
        rate = self.gflop / self.ours
        bfloat16_rate = self.gflop / self.ours_bfloat16
        return [
            f"{self.ours:.3f}",
            f"{rate:.0f}",
            f"{rate / limits.float32:.0%}",
            f"{self.tokens / self.ours:.0f}",
            f"{self.torch:.3f}",
            f"{self.torch / self.ours:.2f}",
            f"{self.ours_bfloat16:.3f}",
            f"{bfloat16_rate / limits.bfloat16:.0%}",
            f"{self.torch_bfloat16:.3f}",
            f"{self.torch_bfloat16 / self.ours_bfloat16:.2f}",
            f"{self.torch / self.ours_bfloat16:.2f}",
        ]


class _Rates:
    """The best rates of matrix products alone, in GFLOP/s: the machine's limits in this run."""

    def __init__(self, *products: Callable[[], float]) -> None:
        """Takes the functions of the products: float32, then bfloat16; each returns its GFLOP."""
        self._products = products
        self._best = [0.0 for _ in products]

    def measure(self) -> None:
        """Times one call of each product."""
        for index, product in enumerate(self._products):
            began = time.perf_counter()
            gflop = product()
            rate = gflop / (time.perf_counter() - began)
            self._best[index] = max(self._best[index], rate)

    @property
    def float32(self) -> float:
        return self._best[0]

    @property
    def bfloat16(self) -> float:
        return self._best[1]


def _numpy_product(size: int) -> Callable[[], float]:
    """Returns a function that multiplies two matrices with NumPy."""
    factors = _random(size)

    def multiply() -> float:
        _ = factors[0] @ factors[1]
        return _gflop(size)

    return multiply


def _xla_product(size: int, dtype: str) -> Callable[[], float]:
    """Returns a function that multiplies two matrices on each device, at the same time."""
    pair = _random(size).astype(jnp.dtype(dtype))
    factors = [jax.device_put(pair, device) for device in jax.local_devices()]
    product = jax.jit(lambda pair: pair[0] @ pair[1])
    jax.block_until_ready([product(pair) for pair in factors])

    def multiply() -> float:
        jax.block_until_ready([product(pair) for pair in factors])
        return len(factors) * _gflop(size)

    return multiply


def _gflop(size: int) -> float:
    """Returns the work of a product of two square matrices."""
    return 2 * size**3 / 1e9


def _random(size: int) -> np.ndarray:
    """Returns two square matrices."""
    return np.random.default_rng(0).standard_normal((2, size, size), np.float32)


def _time(
    rates: _Rates,
    command: str,
    prepare: Callable[[Params, int], Work],
    group_size: str,
    dispatch: str,
    devices: str,
) -> _Timing:
    params = synthetic.experiment(_MODEL.value, _SET.value)
    for stack in (params.task.encoder, params.task.decoder):
        stack.moe.Set(group_size=int(group_size), dispatch=Dispatch(dispatch))

    works = []
    for dtype in _DTYPES:
        params.task.product_dtype = dtype
        if _BFLOAT16_ACTIVATIONS.value:
            params.task.activation_dtype = dtype
        works.append(prepare(params, int(devices)))
    work = works[0]
    questions = [command, f"{command}_bfloat16"]

    # The calls alternate, and the best time of each counts; the first call compiles.
    secs = []
    with (
        tempfile.TemporaryDirectory() as folder,
        start_worker(folder, params, work.theta, work.batch) as worker,
    ):
        for _ in range(1 + _CALLS.value):
            rates.measure()
            ours = [_secs(our_work.call) for our_work in works]
            theirs = [worker.ask(question)["secs"] for question in questions]
            secs.append([*ours, *theirs])
    return _Timing(work.gflop, work.tokens, *map(min, zip(*secs, strict=True)))


def _secs(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
