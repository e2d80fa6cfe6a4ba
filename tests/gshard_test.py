"""The one command: it starts each program with its flags, and names them all."""

import subprocess
import sys

import pytest


def _gshard(*args):
    command = [sys.executable, "-m", "lingvo_gshard.gshard", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("args", [(), ("--help",)])
def test_it_names_its_programs(args):
    done = _gshard(*args)
    assert done.returncode == 0 and not done.stderr
    names = ("prepare", "train", "translate", "generate", "import", "prune", "export", "serve")
    for name in (*names, "compare", "plan"):
        assert f"  gshard {name} " in done.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("prepare", "--out=/none", "--input=/no"), "data_prep.build: no input folder /no"),
        (("train", "--logdir=/no", "--mode=trian"), "trainer: flag --mode=trian: value should be"),
        (("translate", "--logdir=/no"), "translate: /no: no experiment.json"),
        (("generate", "--logdir=/no"), "generate: /no: no experiment.json"),
        (("export", "--logdir=/no"), "export_bundle: give --bundle, the folder to write, and"),
        (
            ("import", "--from=/no", "--logdir=/no"),
            "import_model: /no/config.json is missing: give",
        ),
        (
            ("prune", "--logdir=/no", "--languages=de", "--keep=0.5", "--out=/none"),
            "prune: /no: no experiment.json; give the --logdir of a trained model.",
        ),
        (
            ("export", "--to=huggingface"),
            "export_bundle: --to=huggingface needs --logdir and --out",
        ),
        (("serve", "--bundle=/no", "--port=99999"), "serve: flag --port=99999: 99999 is not an"),
        (("compare", "--run=a"), "compare: --run=a: expected NAME=LOGDIR."),
        (("plan", "--compare=/no,/none"), "plan: /no: no plan.json there"),
        (("prune", "--keep=1"), "prune: --logdir is missing, --out is missing, --languages is mis"),
        (("fly",), "gshard: no program 'fly'; expected one of prepare, train, translate, gen"),
    ],
)
def test_a_program_gets_its_flags_and_tells_mistakes_in_one_line(args, message):
    done = _gshard(*args)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(message)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("compare", "--run=a=/no"), "gshard compare: sacrebleu is not installed; `pip install "),
        (("translate", "--logdir=/no"), "translate: sentencepiece is not installed; `pip install "),
    ],
)
def test_without_the_packages_of_training_a_program_says_which_extra_has_them(args, message):
    code = "import sys\n"
    for package in ("sacrebleu", "sentencepiece"):
        code += f"sys.modules[{package!r}] = None\n"
    code += "from lingvo_gshard import gshard\ngshard.run()"
    command = [sys.executable, "-c", code, *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(message) and "'lingvo_gshard[train]'" in done.stderr


def test_help_is_that_of_the_program():
    done = _gshard("serve", "--help")
    assert done.returncode == 0 and "python -m lingvo_gshard.serve --bundle=DIR" in done.stdout
