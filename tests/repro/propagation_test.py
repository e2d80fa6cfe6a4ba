"""Programs with both propagators: the table, the log, and one program that is compiled and run."""

import dataclasses
import json
import math

import pytest

from lingvo_gshard.model import placement
from repro import propagation, propagation_programs
from repro.propagation_programs import CASES, CPU, GSPMD, SHARDY, Case
from repro.propagation_table import Compiled, largest_difference

_ANY = Compiled("k", "", False, {"all-reduce": (3, 2**20)}, 700, 2**21, 4.0, (7.5, 7.25), ())
_PARTITIONS = {CPU: 8, "h100:1x8": 8, "v5e:4x4": 16, "v3:8x8": 128}


def test_largest_difference():
    assert largest_difference([1.0, -math.inf, math.nan], [1.0, -math.inf, math.nan]) == 0
    assert largest_difference([1.0, 4.0], [1.0, 5.0]) == pytest.approx(0.2)
    assert largest_difference([1.0], [math.nan]) == math.inf
    assert largest_difference([1.0], [1.0, 2.0]) == math.inf


def test_the_log_continues_behind_the_last_whole_line(tmp_path):
    log = tmp_path / "compiled.jsonl"
    assert propagation._load(log) == {}
    propagation._append(log, _ANY)
    with log.open("a") as file:
        file.write('{"key": "cut sh')

    assert propagation._load(log) == {"k": _ANY}
    second = dataclasses.replace(_ANY, key="l", numbers=(math.inf,))
    propagation._append(log, second)
    assert propagation._load(log) == {"k": _ANY, "l": second}


def test_programs_fit_their_machines():
    names = [(case.model, case.name) for case in CASES]
    assert len(set(names)) == len(names) >= 20
    batches = {"train": ["input"], "evaluate": ["eval_input"], "decode": ["decode"]}
    for case in CASES:
        params = case.params()
        for machine in case.machines:
            table = placement.partitioning(params, _PARTITIONS[machine])
            placement.check_sizes(params, table, batches[case.kind])


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_program_compiles_and_runs_by_both(tmp_path, monkeypatch):
    settings = (
        "task.source_vocab_size=64",
        "task.target_vocab_size=64",
        "task.encoder.num_layers=1",
        "task.decoder.num_layers=1",
        "task.dim=16",
        "input.batch_size=8",
        "input.source_len=4",
        "input.target_len=4",
        "sharding=B:d,HNV:d",
    )
    monkeypatch.setattr(propagation_programs, "VOCABULARY", 64)
    (tmp_path / "programs").mkdir()
    case = Case("tiny", "toy.Dense4L", settings)

    made = {}
    for propagator in (GSPMD, SHARDY):
        fields = propagation._compile(case, CPU, propagator, tmp_path, steps=2)
        made[propagator] = json.loads(json.dumps(fields))

        # The second variant is derived from the first one's trace.
        monkeypatch.setattr(propagation_programs, "_trace", None)
    assert made[GSPMD]["collectives"]["all-reduce"][0] > 0
    assert made[GSPMD]["numbers"] == pytest.approx(made[SHARDY]["numbers"], rel=1e-5)
    assert made[SHARDY]["numbers"][0] == pytest.approx(math.log(64), rel=0.2)

    by_gspmd = propagation_programs.make(case, GSPMD, CPU, tmp_path / "programs")
    by_shardy = propagation_programs.make(case, SHARDY, CPU, tmp_path / "programs")
    assert by_gspmd.exported != by_shardy.exported
