"""Remedies and machines as text, from plans made by hand."""

import pytest

from lingvo_gshard.plans import commands_text
from lingvo_gshard.plans.machines import Machine
from tests.repro.published import published_steps
from tests.repro.published.published_steps import record
from tests.xla_plan import samples
from xla_plan.expected import factors


def test_machines_are_columns(monkeypatch, tmp_path):
    path = published_steps.write(tmp_path / "bounds.json", record("a", 0.5, "v4"))
    monkeypatch.setattr(factors, "BOUNDS", path)
    machines = [
        Machine("v3:8x8", samples.plan(None, topology="v3:8x8")),
        Machine("v4:4x4x4", samples.plan(samples.cost(), topology="v4:4x4x4")),
        Machine("gb200:2x64", None),
    ]
    assert [commands_text.machine_line(machine) for machine in machines] == [
        "v3:8x8: does NOT fit: train",
        "v4:4x4x4: fits",
        "gb200:2x64: left out, its compiler is not installed",
    ]

    header, *lines = commands_text.machines_table(machines).splitlines()
    assert header.split() == ["v3:8x8", "v4:4x4x4", "ratio"]
    rows = {line.partition("  ")[0]: line.split()[-3:] for line in lines}
    assert rows["devices"][:2] == ["128", "128"] and rows["fits"][:2] == ["0", "1"]
    # 10^12 tokens at 2^20 in half a second, on 128 devices.
    without, hours, _ = rows["device-hours for 10^12 tokens"]
    assert without == "-" and float(hours) == pytest.approx(128e12 / 2**21 / 3600, rel=1e-3)

    # Steps that took twice as long as their bound were published for one of them.
    assert rows["expected step ms"][:2] == ["-", "1000"]
    assert rows["expected device-hours"][1] == f"{2 * float(hours):.0f}"
    assert lines[-1].startswith("expected on v4: the bound over 0.50, as 1 published")
