"""Work of ours beside PyTorch's, for several group sizes, ways of dispatch and device counts.

The peer (bench/torch_peer) does the same mathematics on the same weights with 2 threads. Calls of
ours, of the peer and numpy's products alternate, so that all see the same machine; the best of each
counts.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import tempfile
import time
from collections.abc import Callable

from absl import flags

from bench.machine import NumpyRate
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.spmd import environment

_MODEL = flags.DEFINE_string("model", "toy.MoE8E8L", "A registered experiment.")
_PARTITIONS = flags.DEFINE_list("partitions", ["1", "2", "4"], "Device counts to try.")
_GROUP_SIZES = flags.DEFINE_list("group_sizes", ["64", "256"], "Tokens of a group to try.")
_DISPATCHES = flags.DEFINE_list("dispatches", ["einsum", "gather"], "Ways of dispatch to try.")
_CALLS = flags.DEFINE_integer("calls", 6, "Timed calls of each.")


@dataclasses.dataclass(frozen=True)
class Work:
    """What one call does.

    Attributes:
      call: does it, and returns when the devices have done.
      theta: the model's weights; the first call may take their memory over.
      batch: what it is done on.
      gflop: its matrix products, as analysis.flops counts them.
      tokens: target tokens.
    """

    call: Callable[[], None]
    theta: NestedMap
    batch: NestedMap
    gflop: float
    tokens: int


def compare(title: str, command: str, prepare: Callable[[Params, int], Work]) -> None:
    """Prints a line of times and ratios for every setting that the flags ask for.

    Args:
      title: what is compared.
      command: the peer's name for it.
      prepare: (params, number of devices) -> the Work.
    """
    environment.prepare(max(int(n) for n in _PARTITIONS.value))
    rate = NumpyRate()
    settings = itertools.product(_GROUP_SIZES.value, _DISPATCHES.value, _PARTITIONS.value)
    rows = [
        _time(rate, command, prepare, int(size), way, int(count)) for size, way, count in settings
    ]
    limit = rate.gflop_per_sec
    print(f"{_MODEL.value}, {title}; numpy's product: {limit:.0f} GFLOP/s")
    head = f"{'group':>6}{'dispatch':>10}{'devices':>9}{'ours s':>9}{'GFLOP/s':>9}{'of numpy':>10}"
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
    """One setting's best times."""

    group_size: int
    dispatch: str
    devices: int
    secs: float
    gflop: float
    tokens: int
    peer_secs: float
    peer_bfloat16_secs: float


def _time(
    rate: NumpyRate,
    command: str,
    prepare: Callable[[Params, int], Work],
    group_size: int,
    dispatch: str,
    devices: int,
) -> _Row:
    from bench.peer import Peer

    params = _params(group_size, dispatch)
    work = prepare(params, devices)
    bfloat16_command = f"{command}_bfloat16"
    best = dict.fromkeys(("ours", command, bfloat16_command), float("inf"))
    with (
        tempfile.TemporaryDirectory() as folder,
        Peer(pathlib.Path(folder), params, work.theta, work.batch) as peer,
    ):
        for _ in range(1 + _CALLS.value):
            rate.measure()
            began = time.perf_counter()
            work.call()
            best["ours"] = min(best["ours"], time.perf_counter() - began)
            for each in (command, bfloat16_command):
                best[each] = min(best[each], peer.ask(each)["secs"])
    return _Row(
        group_size,
        dispatch,
        devices,
        best["ours"],
        work.gflop,
        work.tokens,
        best[command],
        best[bfloat16_command],
    )


def _params(group_size: int, dispatch: str) -> Params:
    from bench import synthetic
    from lingvo_gshard.layers.dispatch import Dispatch

    params = synthetic.experiment(_MODEL.value)
    for stack in (params.task.encoder, params.task.decoder):
        stack.moe.Set(group_size=group_size, dispatch=Dispatch(dispatch))
    return params
