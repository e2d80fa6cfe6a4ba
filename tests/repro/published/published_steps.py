"""Handmade published steps, for tests of expected times."""

import json
import pathlib

from xla_plan.expected.factors import Bound


def record(name: str, share: float, machine: str = "v3", **changes) -> Bound:
    """Returns a record whose bound is the given share of its measured time, 4 seconds."""
    fields = dict(
        id=name,
        machine=machine,
        topology=f"{machine}:2x2",
        model="1 B weights",
        devices=8,
        row_tokens=1024,
        bound_secs=4.0 * share,
        attention_secs=0.0,
        products_secs=2.0 * share,
        measured_secs=4.0,
        source="somebody/lm table.md@1234",
    )
    return Bound(**(fields | changes))


def write(path: pathlib.Path, *records: Bound) -> pathlib.Path:
    """Writes a file in the format of bounds.json, and returns its path."""
    path.write_text(json.dumps([vars(each) for each in records]))
    return path
