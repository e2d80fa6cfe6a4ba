"""Published steps made by hand, for tests of expected times."""

import json
import pathlib

from lingvo_gshard.planning.published.factors import Bound


def record(name: str, share: float, machine: str = "v3", **changes) -> Bound:
    """Returns a record whose bound is that share of what was measured, 4 seconds."""
    fields = dict(
        id=name,
        machine=machine,
        topology=f"{machine}:2x2",
        model="1 B weights",
        devices=8,
        bound_secs=4.0 * share,
        products_secs=2.0 * share,
        measured_secs=4.0,
        source="somebody/lm table.md@1234",
    )
    return Bound(**(fields | changes))


def write(path: pathlib.Path, *records: Bound) -> pathlib.Path:
    """Writes a file such as bounds.json, and returns its path."""
    path.write_text(json.dumps([vars(each) for each in records]))
    return path
