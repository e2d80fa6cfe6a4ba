"""What `make` would run where paths have spaces; nothing of it is run."""

import pathlib
import shlex
import subprocess

_ROOT = pathlib.Path(__file__).parents[2]


def _commands(*arguments):
    """The commands as lists of words, as the shell would divide them."""
    command = ["make", "--dry-run", *arguments]
    made = subprocess.run(
        command, cwd=_ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    return [shlex.split(line) for line in made.stdout.replace("\\\n", "").splitlines()]


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
