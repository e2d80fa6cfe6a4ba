"""The time and memory that a call takes in a peer's process, on Linux and without packages."""

import dataclasses
import pathlib
import re
import time
from collections.abc import Callable
from typing import Any

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}

_PROCESS = pathlib.Path("/proc/self")


@dataclasses.dataclass(frozen=True)
class CallCost:
    """The result of a call, its seconds, and the growth of the process's resident memory in MiB."""

    result: Any
    secs: float
    mib: float


def measure(call: Callable[[], Any], clock: str) -> CallCost:
    """Returns a call's result and cost; `clock` is a key of CLOCKS."""
    # This resets the peak of the memory to the memory that is used now.
    (_PROCESS / "clear_refs").write_text("5", encoding="utf-8")
    before = _status_kib("VmRSS")

    began = CLOCKS[clock]()
    result = call()
    taken = CLOCKS[clock]() - began

    return CallCost(result, taken, (_status_kib("VmHWM") - before) / 1024)


def secs(call: Callable[[], Any], clock: str) -> float:
    """Returns a call's seconds; `clock` is a key of CLOCKS."""
    began = CLOCKS[clock]()
    call()
    return CLOCKS[clock]() - began


def _status_kib(field: str) -> int:
    status = (_PROCESS / "status").read_text(encoding="utf-8")
    found = re.search(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)
    assert found, field
    return int(found[1])
