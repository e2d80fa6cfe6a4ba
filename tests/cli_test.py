"""Mistakes are reported in one line by processes that can import neither TensorFlow nor JAX."""

import os
import pathlib
import subprocess
import sys

import pytest
from absl import flags
from absl.testing import flagsaver

from lingvo_gshard import cli
from tests import without
from xla_spmd.files import digests

_ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A folder with the record of a run, and with text."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "train").mkdir()
    (folder / "train/de-en.tsv").write_text("ja\tyes\n")
    record = {
        "launch": {
            "model": "toy.Dense4L",
            "overrides": ["input.languages=('de', 'en-fr')"],
            "data_dir": "/data",
        },
        "data": {
            "source_vocab_size": 30,
            "target_vocab_size": 40,
            "languages": ["de", "en-fr", "fr"],  # The languages of the data.
        },
        "files": [],
    }
    digests.write_json(folder / "experiment.json", 1, record)

    # Without overrides, and with experts.
    (folder / "moe").mkdir()
    record["launch"] = {"model": "toy.MoE8E4L", "overrides": [], "data_dir": "/data"}
    digests.write_json(folder / "moe/experiment.json", 1, record)

    # With a checkpoint, by the file that says so, and the settings of its model.
    (folder / "trained/checkpoints/4").mkdir(parents=True)
    (folder / "trained/checkpoints/4/commit_success.txt").touch()
    digests.write_json(folder / "trained/experiment.json", 1, record)
    (folder / "trained/params.txt").write_text("task.dim : 32\n")
    return folder


@pytest.fixture(scope="module")
def programs():
    """Runs programs without slow imports."""
    with without.Programs(without.SLOW) as programs:
        yield programs


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("trainer --logdir=/no --mode=trian", "--mode=trian: expected one of train|eval"),
        (
            "trainer --logdir=/no --coordinator=here:1 --process_id=1",
            "--coordinator and --process_id need --num_processes.",
        ),
        (
            "trainer --logdir=/no --num_processes=2 --coordinator=here",
            "--coordinator=here: expected HOST:PORT, the address of process 0.",
        ),
        ("trainer --logdir=/no --num_processes=2", "--num_processes needs --coordinator=HOST:PORT"),
        (
            "trainer --logdir=/no --num_partition=2",
            "--num_partition is not a flag of this",
        ),
        (
            "trainer --logdir=RUN --mode=train --split=dev",
            "--split needs --mode=decode or eval",
        ),
        (
            "trainer --logdir=RUN --mode=eval --split=tset",
            "--split=tset: --mode=eval evaluates",
        ),
        ("translate --logdir=RUN --temperature=-1", "--temperature must be 0 or more, got -1.0;"),
        ("translate --logdir=RUN --scores=ALL", "translate: --scores=ALL: expected one of NONE"),
        ("translate --logdir=RUN --nbest=9", "num_best must be 1 to beam_size 4, got 9."),
        (
            "export_bundle --from_bundle=/no --bundle=/new",
            "/no: no bundle.json; give a folder that gshard export wrote.",
        ),
        ("export_bundle --logdir=/no --bundle=RUN", "holds experiment.json, which is not part of"),
        ("serve --bundle=/no --port=99999", "--port must be 0 to 65535, got 99999;"),
        ("trainer --logdir=/no --num_partitions=0", "--num_partitions must be 1 or more, got 0;"),
        ("trainer --logdir=/no --model=toy.Dense4L", "/no holds no run yet (no experiment.json)"),
        (
            "trainer --model=toy.MoE8E4L --logdir=/no --data_dir=/none",
            "no data folder /none: prepare it with",
        ),
        ("trainer --logdir=RUN --model=toy.Dense", "No model 'toy.Dense'. Did you mean toy.De"),
        ("trainer --logdir=RUN --set=bogus=1", "--set=bogus=1: No hyperparameter 'bogus'"),
        (
            "plan_model --model=toy.Dense4L --topology=v1:2 --out=/none",
            "topology 'v1:2' is unknown;",
        ),
        ("plan_search --model=toy.Dense4L --topology=v1:2 --out=/none", "topology 'v1:2' is unkn"),
        (
            "plan_model --from=RUN --topology=v3:2x2 --out=/none",
            "run0/config.json is missing: give the folder of a model of transformers.",
        ),
        (
            "prune --logdir=RUN --languages=de --keep=0.5 --out=/new",
            "toy.Dense4L has no experts",
        ),
        (
            "import_model --from=RUN --logdir=/none",
            "run0/config.json is missing: give the folder of a model of transformers.",
        ),
        (
            "import_model --from=MIXTRAL --logdir=RUN/trained",
            "trained has checkpoints already, of steps [4]: choose another.",
        ),
        ("trainer --logdir=RUN/trained --mode=train", "holds another model; choose another one."),
        ("trainer --logdir=RUN/trained --mode=report", "holds another model; choose another one."),
        ("trainer --logdir=RUN/moe --mode=export", "moe: there is no checkpoint; train first."),
        (
            "export_bundle --logdir=RUN/trained --bundle=RUN/new",
            "holds another model; choose another one.",
        ),
        ("export_bundle --logdir=RUN/moe --bundle=RUN/new", "moe: there is no checkpoint; train"),
        (
            "export_bundle --logdir=RUN/moe --bundle=/new --average_checkpoints=0",
            "--average_checkpoints must be 1 or more, got 0;",
        ),
        ("translate --logdir=/no", "/no: no experiment.json; give the --logdir of a trained model"),
        (
            "translate --bundle=/no --serve=8080",
            "--serve: serving is a program, gshard serve; see --help.",
        ),
        ("trainer --logdir=RUN --executables=/no", "/no: no saved executables there; `plan model"),
        ("trainer --logdir=RUN --set=task.encoder.num_layers=0", "num_layers must be 1 or more"),
        (
            "trainer --logdir=RUN/moe --set=input.batch_size=7",
            "does not divide the batch's 448 tok",
        ),
        (
            "trainer --logdir=RUN/moe --set=task.encoder.moe.num_experts=-1",
            "task.encoder.moe.num_experts = -1: expected 1 or more.",
        ),
        (
            "trainer --logdir=RUN --set=input.batch_size=0",
            "input.batch_size = 0: expected 1 or more.",
        ),
        ("trainer --logdir=", "trainer: --logdir= is empty; give it a value, or leave it out."),
        ("trainer --logdir=RUN --set=sharding=Q:d", "sharding=Q:d: no tensor of the model has a"),
        ("trainer --logdir=RUN --set=sharding=B:x", "sharding=B:x: no axis 'x' in ('x',); the axe"),
        ("trainer --logdir=RUN --set=mesh=data", "mesh=data: expected axes with their sizes"),
        (
            "trainer --logdir=RUN --num_partitions=2 --set=mesh=d:3",
            "mesh=d:3: expected 3 devices, got 2.",
        ),
        ("trainer --logdir=RUN --config=RUN", "run0: this is a folder; expected a TOML file."),
        ("serve --logdir=RUN --host=256.0.0.1", "--port=8080 on 256.0.0.1: "),
        ("prune --logdir=RUN/moe --languages=de --keep=1 --out=RUN/experiment.json", "is a file;"),
        ("export_bundle --logdir=RUN --bundle=RUN/experiment.json/x", "experiment.json is a file;"),
        (
            "export_bundle --logdir=RUN --export_saved_model=RUN/experiment.json",
            "experiment.json is a file; a folder is expected.",
        ),
        (
            "export_bundle --logdir=RUN --to=huggingface --out=RUN",
            "which is not part of the exported model; export to a new or empty folder.",
        ),
        ("import_model --from=MIXTRAL --logdir=RUN/experiment.json", "experiment.json is a file;"),
        ("import_model --from=MIXTRAL --logdir=/new --set=foo=1", "--set=foo=1: No hyperparameter"),
        ("import_model --from=MIXTRAL --logdir=/new --set=task.decoder.num_layers=0", "num_layers"),
        ("compare --run=a=RUN --out=RUN/experiment.json/x", "experiment.json is a file; a folder"),
        (
            "data_prep.build --out=/none --config=RUN",
            "run0: this is a folder; expected a TOML file",
        ),
        (
            "translate --logdir=RUN --input=RUN --output=RUN/out.txt",
            "run0: this is a folder; expected a file.",
        ),
        (
            "translate --logdir=RUN --input=RUN/experiment.json --output=RUN/no/out.txt",
            "out.txt: expected a file in a folder that exists.",
        ),
        ("translate --logdir=RUN --source_lang=fr", "fr: the model was trained on de, en."),
        ("compare --run=a=/no", "/no/decode_test/scores.json is not a file of scores by language"),
        ("data_prep.build --out=/none --input=/no", "no input folder /no"),
        ("data_prep.build --out=/none --config=/no", "/no: there is no such file"),
        (
            "data_prep.build --out=/none --input=RUN --seed=-1",
            "seed -1: expected 0 to 18446744073709551615",
        ),
    ],
)
def test_a_mistake_is_reported_before_anything_slow_is_imported(
    run_dir, programs, command, message
):
    mixtral = _ROOT / "tests/hugging_face/models/mixtral"
    command = command.replace("RUN", str(run_dir)).replace("PLAN", "--topology=v3:2x2 --out=/none")
    command = command.replace("MIXTRAL", str(mixtral))
    name, *flags = command.split()
    done = programs.run(_module(name), *flags)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(f"{name.replace('plan_', 'plan ')}: ") and message in done.stderr


@pytest.mark.parametrize("name", ["trainer", "serve", "data_prep.build"])
def test_help_succeeds(name):
    module = _module(name)
    command = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=_ROOT, timeout=60)
    assert done.returncode == 0 and not done.stderr
    assert done.stdout.startswith(f"usage: {name.replace('plan_', 'plan ')} [FLAGS]\n\n")
    assert "gshard " in done.stdout and "flags:\n  --" in done.stdout
    assert name != "trainer" or "--logdir=RUN \\\n" in done.stdout


def test_help_ends_quietly_when_its_output_is_closed():
    command = f"{sys.executable} -m lingvo_gshard.trainer --help | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=_ROOT)
    assert done.stdout.startswith("usage: trainer") and not done.stderr


def test_processes_share_the_partitions_equally():
    cli.define_devices()
    flags.FLAGS.mark_as_parsed()
    cli.processes.cache_clear()
    given = {"num_processes": 2, "coordinator": "here:1", "num_partitions": 1}
    refused = pytest.raises(
        ValueError, match="2 processes need --num_partitions of 2 or a mult.* 1"
    )
    with flagsaver.flagsaver(**given), refused:
        cli.joined()
    cli.processes.cache_clear()


def test_a_lack_of_memory_is_one_line():
    code = "from lingvo_gshard import cli; cli.run('x', lambda: bytearray(1 << 62))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=_ROOT, timeout=60)
    assert (done.returncode, done.stderr) == (1, "x: out of memory\n")


def test_an_error_without_a_message_is_reported_by_name():
    code = "from lingvo_gshard import cli\ndef main(): raise TimeoutError\ncli.run('x', main)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=_ROOT, timeout=60)
    assert (done.returncode, done.stderr) == (1, "x: TimeoutError()\n")


def test_a_warning_is_one_line():
    code = "from lingvo_gshard import cli; import logging; cli.run('x', lambda: {})"
    command = [sys.executable, "-c", code.format("logging.warning('%s is damaged', 'it')")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=_ROOT, timeout=60)
    assert done.stderr == "warning: it is damaged\n"


def _module(name):
    return name if name.startswith("data_prep") else f"lingvo_gshard.{name}"


_TELLS = """
import pathlib
import sys
from lingvo_gshard import cli

def main():
    path = pathlib.Path("Größe 日本")
    path.write_text(str(path.resolve()))  # In the encoding that Python has by default.
    print(path, path.exists(), sys.flags.utf8_mode)

cli.run("tells", main)
"""


@pytest.mark.parametrize("encoding", [{}, {"PYTHONIOENCODING": "ascii"}])
def test_paths_and_text_are_utf8_in_a_locale_of_ascii(tmp_path, encoding):
    (tmp_path / "tells.py").write_text(_TELLS, encoding="utf-8")
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "tells.py"],
        cwd=tmp_path,
        env=os.environ | ascii_alone | encoding | {"PYTHONPATH": str(_ROOT)},
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    path = "Größe 日本"
    shown = path.encode("ascii", "backslashreplace") if encoding else path.encode()
    assert done.stdout == shown + b" True 1\n"
    assert (tmp_path / path).read_text(encoding="utf-8") == str(tmp_path / path)
