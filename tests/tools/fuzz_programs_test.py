"""Random programs: how they are drawn, judged and shrunk."""

import collections
import json
import os
import time

import numpy as np
import pytest
import tensorflow as tf

import lingvo_gshard as gshard
from tools.fuzz_programs import __main__ as fuzz_programs
from tools.fuzz_programs import eager, generate, partitioned, shrink, worker
from tools.fuzz_programs.draft import Choices
from tools.fuzz_programs.program import Argument, Program, Record, from_json, to_json
from tools.fuzz_programs.registry import FAMILIES
from tools.fuzz_programs.source import source

_PART = 50


def _program(records, arguments, results, gradients=(), mesh=None, table=None):
    return Program(
        mesh=mesh or {"x": 2, "y": 4},
        table=table or {"P": ["y"]},
        arguments=tuple(arguments),
        records=tuple(records),
        results=results,
        gradients=gradients,
    )


def _images():
    """A convolution among other operators, with gradients."""
    return _program(
        [
            Record("t0", "exp", ("a0",), {}, "gshard.split({0}, 1, 8)"),
            Record(
                "t1",
                "convolution",
                ("t0", "a1"),
                {"strides": [1, 1], "padding": "SAME", "dilations": [1, 1]},
                "gshard.shard({0}, np.arange(4).reshape([2, 2, 1, 1]))",
            ),
            Record("t2", "reduce_sum", ("t1",), {"axes": [1], "keepdims": False}),
            Record("t3", "tanh", ("a2",)),
        ],
        [
            Argument("a0", (3, 7, 5, 2), "float32", "P___"),
            Argument("a1", (3, 2, 2, 3), "float32", "____"),
            Argument("a2", (11,), "float32", "P"),
            Argument("d_t2", (3, 5, 3), "float32", "___"),
            Argument("d_t3", (11,), "float32", "P"),
        ],
        {"t2": "P__", "t3": "_"},
        ("a0", "a1", "a2"),
    )


@pytest.fixture(scope="module")
def process():
    """Programs are drawn in one process with the tool's environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "_MAX_CALLS", 10**6)
        process = worker.Worker()
        yield process
        process.close()


@pytest.mark.slow
def test_a_seed_is_always_the_same_program(process):
    programs = [process.call(generate.generate, seed) for seed in range(8)]
    assert programs == [process.call(generate.generate, seed) for seed in range(8)]
    assert len({to_json(program) for program in programs}) == 8
    for program in programs:
        assert from_json(to_json(program)) == program


@pytest.mark.slow
def test_programs_contain_risky_operators(process):
    kinds = collections.Counter()
    for seed in range(80):
        program = process.call(generate.generate, seed)
        assert 1 <= len(program.results) and len(program.records) <= 8
        kinds["gradients"] += bool(program.gradients)
        kinds[f"mesh of {len(program.mesh)}"] += 1
        for argument in program.arguments:
            kinds[argument.dtype] += 1
            kinds["split argument"] += argument.dims.strip("_") != ""
            kinds["empty"] += 0 in argument.shape
            kinds["small"] += any(0 < size < program.num_devices for size in argument.shape)
            kinds["uneven"] += any(size % program.num_devices for size in argument.shape)
        for record in program.records:
            kinds[record.annotation.split("(")[0]] += 1
            kinds["partial tile"] += "arange(2)" in record.annotation
            kinds["manual"] += "locally" in record.expression
            kinds["loop"] += "while_loop" in record.expression
    expected = "gradients,mesh of 1,mesh of 2,mesh of 3,float32,bfloat16,int32,bool,split argument,"
    expected += "empty,small,uneven,gshard.split,gshard.shard,gshard.replicate,annotator.annotate,"
    expected += "partial tile,manual,loop"
    assert [kind for kind in expected.split(",") if not kinds[kind]] == []


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_operator_is_drawn(family, process):
    missing = set(FAMILIES[family].operators)
    choices = Choices((family, "unary"))
    for seed in range(400):
        for record in process.call(generate.generate, seed, choices).records:
            missing.discard(record.operator)
        if not missing:
            return
    raise AssertionError(missing)


def test_a_right_program_is_the_same_and_a_wrong_one_is_not(monkeypatch):
    assert partitioned.outcome(_images(), 5).kind == partitioned.SAME

    right = gshard.convolution
    monkeypatch.setattr(gshard, "convolution", lambda *args: right(*args) * 1.001)
    wrong = partitioned.outcome(_images(), 5)
    assert (wrong.kind, wrong.names) == (partitioned.WRONG, ("t2", "g_a0", "g_a1"))
    assert wrong.detail.startswith("t2: ")


def test_errors_of_the_library_are_refusals(monkeypatch):
    split = Record("t0", "exp", ("a0",), {}, "gshard.split({0}, 0, 9)")
    program = _program([split], [Argument("a0", (7,), "float32", "_")], {"t0": "_"})
    refused = partitioned.outcome(program, 1)
    assert refused.kind == partitioned.REFUSED and "expected at most 8" in refused.detail

    def broken(*args):
        raise KeyError("broken")

    monkeypatch.setattr(gshard, "split", broken)
    error = partitioned.outcome(program, 1)
    assert (error.kind, error.detail) == (partitioned.ERROR, "KeyError: 'broken'")


def test_differences_on_one_device_are_not_faults_of_partitioning(monkeypatch):
    run = eager._run

    def another(program, given, noise_seed):
        return {name: tensor + 1.0 for name, tensor in run(program, given, noise_seed).items()}

    monkeypatch.setattr(eager, "_run", another)
    program = _program(
        [Record("t0", "tanh", ("a0",))], [Argument("a0", (7,), "float32", "P")], {"t0": "_"}
    )
    outcome = partitioned.outcome(program, 1)
    assert outcome.kind == partitioned.UNLIKE and outcome.detail.startswith("one device: wrong")


def test_ties_and_comparisons_are_not_compared():
    program = _program(
        [
            Record("t0", "tile", ("a0",), {"counts": [2]}),
            Record("t1", "argsort", ("t0",), {"axis": 0}),
            Record("t2", "sort", ("t0",), {"axis": 0}),
        ],
        [Argument("a0", (6,), "float32", "_")],
        {"t0": "_", "t1": "_", "t2": "_"},
    )
    expected = eager.expected(program, 3)
    t0 = expected["t0"].values
    assert np.all(expected["t0"].tolerance < 1e-3)
    assert not np.any(expected["t0"].differs(t0 + 1e-6))
    assert np.all(expected["t0"].differs(t0 + 0.01))
    assert np.all(expected["t0"].differs(np.full_like(t0, np.nan)))

    # Two ids of equal numbers may be in either order, but the numbers are known.
    assert np.any(np.isinf(expected["t1"].tolerance))
    assert np.all(expected["t2"].tolerance < 1e-2)


def test_a_planted_fault_is_shrunk_to_its_operator(process):
    program = process.call(generate.generate, 4)
    sick = next(record for record in program.records if record.operator == "pad_with")
    assert len(program.records) > 5 and sick.inputs

    def fails(candidate):
        """Fails as if pads of split tensors, and their gradients, were wrong."""
        is_there = any(record.operator == "pad_with" for record in candidate.records)
        return is_there and "a1" in candidate.gradients and candidate.num_devices > 2

    small = shrink.shrunk(program, 4, fails)
    (record,) = small.records
    assert record.operator == "pad_with" and not record.annotation
    assert [argument.dims.strip("_") for argument in small.arguments] == ["", ""]
    assert max(small.arguments[0].shape) == 1
    assert (small.mesh, small.table) == ({"d": 4}, {})
    assert eager.expected(small, 4).keys() == {record.name, f"g_{small.gradients[0]}"}


def test_a_shrunk_program_runs_by_itself(capsys):
    text = source(_images(), 5, 'wrong: a "quoted" \\ detail')
    exec(compile(text, "found", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    differences = [line for line in lines if "differs by" in line]
    assert [line.split()[0] for line in differences] == ["g_a0", "g_a1", "g_a2", "t2", "t3"]
    assert all(float(line.split()[-1]) < 1e-4 for line in differences)


def test_the_printed_values_are_the_arguments():
    for dtype, below in (("float32", 0), ("bfloat16", 0), ("int32", 7), ("bool", 0)):
        argument = Argument("a3", (4, 3), dtype, "__", below)
        record = Record("t0", "where", ("a3", "a3", "a3"))
        text = source(_program([record], [argument], {"t0": "__"}), 9, "")
        line = next(line for line in text.splitlines() if '"a3":' in line)
        values = eval("{" + line + "}", {"gshard": gshard, "np": np, "tf": tf})["a3"][1]
        np.testing.assert_array_equal(values, eager.array(argument, 9))


def test_a_worker_survives_the_death_of_its_process(monkeypatch):
    process = worker.Worker()
    try:
        assert process.call(max, 3, 5) == 5
        with pytest.raises(worker.Died, match="exit code -6"):
            process.call(os.abort)
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            process.call(divmod, 1, 0)
        monkeypatch.setattr(worker, "_HANG_SECS", 0.2)
        with pytest.raises(worker.Died, match="no answer"):
            process.call(time.sleep, 60)
    finally:
        process.close()


def test_a_run_continues_where_its_log_ends(tmp_path, monkeypatch):
    asked = []

    def outcome(process, seed, choices):
        asked.append(seed)
        kind = "wrong" if seed == 12 else "same"
        deaths = {"died_once": "exit code -11"} if seed == 15 else {}
        return {"kind": kind, "detail": f"of {seed}", "names": [], "secs": 0.5} | deaths

    monkeypatch.setattr(worker, "outcome_of_seed", outcome)
    log = tmp_path / "log.jsonl"
    assert len(list(fuzz_programs.run(log, range(10, 14)))) == 4
    with log.open("a") as file:
        file.write('{"seed": 14, "ki')  # Stopped in the middle of a line.
    assert len(list(fuzz_programs.run(log, range(10, 16)))) == 2
    assert asked == [10, 11, 12, 13, 14, 15]
    assert [json.loads(line)["seed"] for line in log.read_text().splitlines()] == asked

    text = fuzz_programs.summary([log])
    assert text.splitlines() == [
        "6 programs, 0.50 s of CPU each",
        "      5 same",
        "      1 wrong",
        "seed 12: wrong: of 12",
        "seed 15: once: exit code -11",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 300, _PART))
def test_partitioned_programs_compute_what_one_device_computes(first, tmp_path):
    """For 10,000 programs: `python -m tools.fuzz_programs --log=LOG --count=10000`."""
    found = {}
    for line in fuzz_programs.run(tmp_path / "log.jsonl", range(first, first + _PART)):
        if line["kind"] in worker.FINDINGS:
            found[line["seed"]] = line["kind"]
    assert found == {}


@pytest.mark.slow
def test_programs_that_were_wrong_once_compute_what_one_device_computes(tmp_path):
    """Seeds that gave wrong numbers or ended the process, each of another cause."""
    seeds = (2310, 2800, 3268, 3369, 3483, 3536, 5671, 5705, 6360, 7259, 8545, 8854)
    found = {}
    for line in fuzz_programs.run(tmp_path / "log.jsonl", seeds):
        found[line["seed"]] = line["kind"]
    assert found == dict.fromkeys(seeds, "same")
