"""The commands that `make` would run for paths with spaces; they are not run."""

import pathlib
import re
import shlex
import subprocess

_ROOT = pathlib.Path(__file__).parents[2]


def _dry_run(*arguments):
    """Returns the commands as `make` prints them, also where the tests themselves run under it."""
    command = ["make", "--dry-run", "--no-print-directory", *arguments]
    return subprocess.run(
        command, cwd=_ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout


def _commands(*arguments):
    """Returns the commands as lists of words, divided like a shell."""
    lines = _dry_run(*arguments).replace("\\\n", "").splitlines()
    return [shlex.split(line) for line in lines]


def test_a_corpus_may_have_spaces_in_its_path(tmp_path):
    corpus = tmp_path / "my corpus, é"
    corpus.mkdir()
    commands = _commands("demo", f"CORPUS={corpus}")
    build = next(words for words in commands if "data_prep.build" in words)
    assert f"--input={corpus}" in build
    (out,) = (word for word in build if word.startswith("--out="))
    assert out == f"--out=out/demo{str(tmp_path).replace('/', '-')}-my-corpus----/data"
    trainer = next(words for words in commands if "lingvo_gshard.trainer" in words)
    assert f"--data_dir={out.removeprefix('--out=')}" in trainer


def test_the_demo_ends_with_three_translations(tmp_path):
    """The last command of the dry run is run, on files as the decoder writes them."""
    commands = _dry_run("demo", f"CORPUS={tmp_path}")
    command = commands[commands.index("source=") :]
    (name,) = set(re.findall(r"(\S+)/run/decode_test/\*", command))
    folder = tmp_path / name / "run/decode_test"
    folder.mkdir(parents=True)
    (folder / "de.source.txt").write_text("Ein Hund.\nEine Katze.\nEin Kind.\nBrot.\n")
    (folder / "de.txt").write_text("A dog.\nA cat.\nA child.\nBread.\n")

    printed = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    assert printed.stdout == (
        "Ein Hund.\n    A dog.\nEine Katze.\n    A cat.\nEin Kind.\n    A child.\n"
    )
