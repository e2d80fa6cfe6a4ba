"""How much memory a call takes, by the kernel's own count; imports the standard library alone."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable

_SELF = pathlib.Path("/proc/self")


def extra_mib(run: Callable[[], object]) -> float:
    """MiB that the process' resident memory grew by, at its highest, while `run` ran."""
    (_SELF / "clear_refs").write_text("5")  # The high-water mark starts from what is held now.
    before = _kib("VmRSS")
    run()
    return (_kib("VmHWM") - before) / 1024


def _kib(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", (_SELF / "status").read_text(), re.MULTILINE)
    assert found, field
    return int(found[1])
