import os
import re
import subprocess
import sys

import pytest

from xla_spmd.files import lock


def _run(folder, *flags, file_bytes=None):
    """Runs the program; a limit on the size of its files acts like a full disk."""
    limited = [] if file_bytes is None else ["prlimit", f"--fsize={file_bytes}"]
    return subprocess.run(
        [*limited, sys.executable, "-m", "data_prep.build", "--workers=1", *flags],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("build")
    (folder / "text").mkdir()
    # Each source has another rare character.
    lines = (f"Satz Nummer {chr(0x4E00 + i)}\tsentence number {i}\n" for i in range(1000))
    (folder / "text" / "de-en.tsv").write_text("".join(lines))
    (folder / "file").touch()
    return folder


@pytest.mark.parametrize(
    ("flags", "file_bytes", "line"),
    [
        (["--out=data"], None, "data_prep.build: give --input=TEXT_DIR, --config=FILE, or both"),
        (
            ["--input=text", "--out=data", "x"],
            None,
            "data_prep.build: unexpected arguments ['x']; see",
        ),
        (
            ["--input=text", "--out=./text"],
            None,
            "data_prep.build: --out=./text is the folder of --input; choose another.",
        ),
        (
            ["--input=text", "--out=data", "--vocabulary=gs://bucket/run"],
            None,
            "data_prep.build: --vocabulary=gs://bucket/run must be on this machine.",
        ),
        (
            ["--input=text", "--out=data", "--vocabulary=run"],
            None,
            "data_prep.build: {folder}/run: there is no such vocabulary",
        ),
        (
            ["--input=text", "--out=file"],
            None,
            "data_prep.build: {folder}/file is a file; a folder is expected.",
        ),
        (
            ["--input=text", "--out=full"],
            5000,
            "data_prep.build: full: file too large",
        ),
    ],
)
def test_a_mistake_is_one_line_and_a_status(folder, flags, file_bytes, line):
    ended = _run(folder, *flags, file_bytes=file_bytes)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith(line.replace("{folder}", str(folder)))
    assert "Traceback" not in ended.stderr


def test_a_second_build_in_the_same_folder_is_refused(folder):
    out = folder / "locked"
    with lock.held(out, "builds in this folder", out / "build.lock"):
        ended = _run(folder, "--input=text", "--out=locked")
        assert ended.returncode == 1
        message = "data_prep.build: locked: another process builds in this folder; wait for it, or"
        assert ended.stderr.splitlines()[-1].startswith(message)
        assert [path.name for path in out.iterdir()] == ["build.lock"]


def test_verbosity_shows_where_it_came_from(folder):
    ended = _run(folder, "--input=nowhere", "--out=data", "--verbosity=1")
    assert ended.returncode == 1
    assert "Traceback" in ended.stderr
    assert f"no input folder {folder}/nowhere" in ended.stderr


@pytest.mark.slow
def test_the_summary_names_languages_with_many_bytes(folder):
    sizes = ("--source_vocab_size=1200", "--target_vocab_size=400", "--character_coverage=0.98")
    ended = _run(folder, "--input=text", "--out=data", *sizes)
    assert ended.returncode == 0
    told = ended.stderr
    assert re.search(r"de: \{'train': 9\d\d, 'dev': \d+, 'test': \d+\}, dropped none", told)
    assert re.search(
        r"\nwarning: de: \d\d\.\d % of the source's tokens are bytes of characters", told
    )
    assert re.search(r"data: 9\d\d training examples in 1 directions, .* in data/report", told)
    command = "gshard train --model=small.MoE8E6L --data_dir=data --logdir=RUN"
    assert (
        f"Next: {command} (for a first look, add --set=train.max_steps=200; "
        in told.splitlines()[-1]
    )


@pytest.mark.slow
def test_reports_of_documents_use_their_terms(folder):
    (folder / "notes").mkdir()
    (folder / "notes/a.txt").write_text("".join(f"a note about {i}\n" for i in range(300)))
    flags = ("--kind=text", "--input=notes", "--text_vocab_size=300")
    ended = _run(folder, *flags, "--out=notes_data")
    assert ended.returncode == 0
    assert re.search(r"a: \{'train': 29\d, 'dev': \d, 'test': \d\}, dropped none", ended.stderr)
    totals = (
        r"notes_data: 29\d training documents in 1 corpora, \d+ tokens of \d{4} bytes; vocabulary"
    )
    assert re.search(totals, ended.stderr)
    command = "gshard train --model=toy.LmMoE8E4L --data_dir=notes_data --logdir=RUN"
    assert f"Next: {command} (" in ended.stderr.splitlines()[-1]
