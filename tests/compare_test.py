"""The command that makes Figure 6 of runs' scores."""

import pathlib
import subprocess
import sys

import pytest

from lingvo_gshard.evaluation.quality import LanguageQuality, Quality, Score


def _scores(bleu):
    """BLEU, chrF and chrF++."""
    return Score(bleu, 1.0, "s"), Score(50.0, 1.0, "c"), Score(45.0, 1.0, "w")


def _run(logdir, **bleu):
    """A run's folder as far as the command reads it."""
    rows = tuple(
        LanguageQuality(code, 8000 >> i, 10, *_scores(value))
        for i, (code, value) in enumerate(bleu.items())
    )
    (logdir / "decode_test").mkdir(parents=True)
    Quality(rows).save(logdir / "decode_test" / "scores.json")
    return logdir


@pytest.fixture(scope="module")
def logdirs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return {
        "MoE": _run(folder / "moe", qa=40.0, qb=30.0),
        "dense": _run(folder / "dense", qa=36.0, qb=29.0),
        "qb": _run(folder / "qb", qb=20.0),
    }


def _compare(*flags):
    return subprocess.run(
        [sys.executable, "-m", "lingvo_gshard.compare", *flags],
        capture_output=True,
        text=True,
        cwd=pathlib.Path(__file__).parent.parent,
        timeout=120,
    )


@pytest.mark.slow
def test_table_and_picture_of_runs_over_a_baseline(logdirs, tmp_path):
    done = _compare(
        f"--run=MoE={logdirs['MoE']}",
        f"--run=dense={logdirs['dense']}",
        f"--baseline={logdirs['qb']}",
        f"--out={tmp_path}/figure6",
    )
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "figure6.txt").read_text()
    assert table in done.stdout
    want = ["qb", "4000", "20.00", "30.00", "+10.00", "29.00", "+9.00"]
    assert table.splitlines()[2].split() == want
    assert (tmp_path / "figure6.png").read_bytes().startswith(b"\x89PNG")


def test_runs_of_a_name_are_a_model(logdirs):
    done = _compare(f"--run=MoE={logdirs['MoE']}", f"--run=MoE={logdirs['dense']}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].split() == ["qa", "8000", "-", "38.00", "-"]


def test_paired_bootstrap_of_two_runs(logdirs):
    for name, translated in (("MoE", "rain all day\n"), ("dense", "rain\n")):
        folder = logdirs[name] / "decode_test"
        for code in ("qa", "qb"):
            (folder / f"{code}.txt").write_text("the cat\n" + translated)
            (folder / f"{code}.reference.txt").write_text("the cat\nrain all day\n")
    runs = [f"--run={name}={logdirs[name]}" for name in ("MoE", "dense")]
    done = _compare(*runs, "--paired")
    assert done.returncode == 0, done.stderr
    tables = done.stdout.strip().split("\n\n")
    headers = [table.split("\n")[0].split() for table in tables]
    unpaired = ["language", "train", "pairs", "baseline", "MoE", "gain", "dense", "gain"]
    assert headers[:3] == [unpaired] * 3  # BLEU, chrF and chrF++.
    paired = headers[3:]
    assert len(paired) >= 3 and all(
        header == ["language", "MoE", "dense", "gain", "from", "to", "p"] for header in paired
    )
    assert tables[-1].splitlines()[3].startswith("average")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--run=MoE"], "--run=MoE: expected NAME=LOGDIR"),
        (["--run=MoE=/nowhere"], "scores.json is not a file of scores by language"),
        (["--run=MoE={MoE}", "--run=dense={MoE}"], "--run: {MoE} is given twice"),
        (
            ["--run=MoE={MoE}", "--baseline={qb}", "--baseline={qb}"],
            "--baseline: qb is given twice",
        ),
        (["--run=MoE={MoE}", "--paired"], "--paired: MoE is the only model"),
        (["--run=MoE={MoE}", "--baseline={dense}"], "expected a run of one language, got qa, qb"),
    ],
)
def test_a_mistake_is_reported_in_one_line(logdirs, flags, message):
    done = _compare(*(flag.format(**logdirs) for flag in flags))
    told = [line for line in done.stderr.splitlines() if line.startswith("compare: ")]
    assert done.returncode == 1 and len(told) == 1 and message.format(**logdirs) in told[0]
