"""The one command: it starts each program with its flags, and names them all."""

import functools
import re
import subprocess
import sys

import pytest

import lingvo_gshard
from tests import without


@pytest.fixture(scope="module")
def run():
    """Returns a function that runs `gshard` with some arguments."""
    with without.Programs(()) as programs:
        yield functools.partial(programs.run, "lingvo_gshard.gshard")


@pytest.mark.parametrize("args", [(), ("--help",)])
def test_it_names_its_programs(run, args):
    done = run(*args)
    assert done.returncode == 0 and not done.stderr
    names = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")]
    first = ["prepare", "models", "settings", "train", "translate", "generate", "compare"]
    assert names == [*first, "export", "serve", "import", "prune", "plan", "completion"]
    clause = (
        "  train       trains, evaluates and scores a model; continues a run that was stopped\n"
    )
    assert clause in done.stdout


def test_it_has_a_version(run):
    assert run("--version").stdout == f"gshard {lingvo_gshard.__version__}\n"


def test_without_any_package_it_lists_its_programs_and_says_what_to_install(run):
    bare = [sys.executable, "-S", "-m", "lingvo_gshard.gshard"]  # Without site-packages.
    listed = subprocess.run(bare, capture_output=True, text=True, timeout=60)
    assert listed.stdout == run().stdout

    for words in (["train", "--logdir=RUN"], ["plan", "model"]):
        done = subprocess.run([*bare, *words], capture_output=True, text=True, timeout=60)
        line = f"gshard {words[0]}.*: absl is not installed; `pip install lingvo_gshard`, or `make"
        assert done.returncode == 1 and done.stderr.count("\n") == 1
        assert re.match(line, done.stderr)


def test_the_programs_of_plan_are_listed_alike(run):
    done = run("plan")
    assert done.stdout.startswith("usage: gshard plan PROGRAM [FLAGS]\n\n  model           plans")
    assert run("help", "plan").stdout == done.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("prepare", "--out=/none", "--input=/no"), "gshard prepare: no input folder /no"),
        (
            ("train", "--logdir=/no", "--mode=trian"),
            "gshard train: --mode=trian: expected one of train|eval|decode|",
        ),
        (("translate", "--logdir=/no"), "gshard translate: /no: no experiment.json"),
        (("generate", "--logdir=/no"), "gshard generate: /no: no experiment.json"),
        (("export", "--logdir=/no"), "gshard export: give --bundle, the folder to write, and"),
        (
            ("import", "--from=/no", "--logdir=/no"),
            "gshard import: /no/config.json is missing: give",
        ),
        (
            ("prune", "--logdir=/no", "--languages=de", "--keep=0.5", "--out=/none"),
            "gshard prune: /no: no experiment.json; give the --logdir of a trained model.",
        ),
        (
            ("export", "--to=huggingface"),
            "gshard export: --to=huggingface needs --logdir and --out",
        ),
        (
            ("serve", "--bundle=/no", "--port=99999"),
            "gshard serve: --port must be 0 to 65535, got 99999",
        ),
        (("compare", "--run=a"), "gshard compare: --run=a: expected NAME=LOGDIR."),
        (("plan", "compare", "/no", "/none"), "gshard plan compare: /no: no plan.json there"),
        (
            ("--logdir=R",),
            "gshard: --logdir=R: expected a program first, such as `gshard train --l",
        ),
        (("plan", "modle"), "gshard plan: no program 'modle'; expected one of model, search, mach"),
        (("fly",), "gshard: no program 'fly'; expected one of prepare, models, settings, "),
    ],
)
def test_a_program_gets_its_flags_and_reports_mistakes_in_one_line(run, args, message):
    done = run(*args)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(message)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ("translate", "--logdir=/no"),
            "gshard translate: sentencepiece is not installed; `pip install ",
        )
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
    assert done.stderr.startswith(message) and "`pip install lingvo_gshard`" in done.stderr


def test_a_near_name_is_suggested(run):
    assert run("trian").stderr.endswith(" Did you mean train?\n")


@pytest.mark.parametrize("args", [("serve", "-h"), ("help", "serve")])
def test_help_is_the_program_s_own(run, args):
    done = run(*args)
    assert done.returncode == 0 and done.stdout.startswith("usage: gshard serve [FLAGS]\n\nServes")
    assert "\n  --port=N\n      The port; 0 chooses a free one. (default: 8080)\n" in done.stdout
    assert "\n  --bundle=TEXT\n" in done.stdout and "(default: None)" not in done.stdout
    assert "\n  --platform=auto|cpu|cuda|tpu\n      What to compute on;" in done.stdout


@pytest.mark.parametrize(
    ("program", "unused"),
    [("serve", "num_processes"), ("export", "coordinator"), ("generate", "source_lang")],
)
def test_help_leaves_out_what_the_program_refuses(run, program, unused):
    printed = run(program, "--help").stdout
    assert f"--{unused}" not in printed.partition("flags:")[2]


def test_words_are_named_in_the_usage(run):
    assert run("settings", "-h").stdout.startswith("usage: gshard settings [MODEL] [WORD] [FL")
    assert run("plan", "compare", "-h").stdout.startswith("usage: gshard plan compare PLAN PL")
