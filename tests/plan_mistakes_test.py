"""Mistakes in plans' flags are reported in one line by processes that can't import JAX."""

import pytest

from tests import without
from tests.xla_spmd import compilers
from xla_plan.measured import rates
from xla_plan.measured.rates import MeasuredRates, Rate

_MODEL = "--model=toy.MoE8E4L --topology=v3:2x2 --out=NEW"
_SIZED = f"{_MODEL} --set=task.source_vocab_size=64 --set=task.target_vocab_size=64"
_PROGRAM = "--program=FILE --topology=v3:2x2 --out=NEW"


@pytest.fixture
def folder(tmp_path):
    """A folder with a file, a damaged file of rates, and rates of another machine."""
    (tmp_path / "file").write_text("HloModule")
    (tmp_path / "damaged.json").write_text("{")
    by_size = (Rate(10, 1.0),)
    measured = MeasuredRates("NVIDIA H100", {}, {"bf16": by_size}, by_size, by_size, 1.0, 1.0)
    rates.save(measured, tmp_path / "h100.json")
    return tmp_path


@pytest.fixture(scope="module")
def programs():
    """Runs programs without slow imports."""
    with without.Programs(without.SLOW) as programs:
        yield programs


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (f"model {_MODEL} --programs=tarin", "A plan has no data to take task.source_vocab_size"),
        (f"model {_SIZED} --programs=tarin", "toy.MoE8E4L has no program 'tarin'; expected some"),
        (f"model {_SIZED} --out=FILE", "file is a file; a folder is expected."),
        (f"model {_SIZED} --out=FILE/plan", "file is a file; a folder is expected."),
        (f"model {_SIZED} --rates=/none.json", "--rates=/none.json: no such file; `xla_plan cal"),
        (
            f"model {_SIZED} --rates=FOLDER/damaged.json",
            "damaged.json is damaged or outdated (JSON",
        ),
        (f"model {_SIZED} --rates=FOLDER/h100.json", "rates of NVIDIA H100, expected rates of v3."),
        (f"model {_SIZED} --batch_tokens=7", "--batch_tokens=7: expected a multiple of 48"),
        (f"model {_SIZED} --save --programs=decode", "--save saves training steps; expected train"),
        (f"model {_SIZED} --set=mesh=data:3", "mesh=data:3: expected 3 devices, got 8."),
        (f"model {_SIZED} --set=sharding=Q:d", "sharding=Q:d: no tensor of the model has a dim Q;"),
        (f"model {_SIZED} --set=input.batch_size=7", "does not divide the batch's 448 tokens"),
        (f"search {_SIZED} --out=FILE", "file is a file; a folder is expected."),
        (f"search {_SIZED} --programs=tarin", "toy.MoE8E4L has no program 'tarin'; expected some"),
        (
            "machines --model=toy.MoE8E4L --out=NEW --programs=train,tarin",
            "A plan has no data to take task.source_vocab_size",
        ),
        ("machines --model=toy.MoE8E4L --out=FILE", "file is a file; a folder is expected."),
        (f"program {_PROGRAM} --program=/none", "--program=/none: there is no such file."),
        (f"program {_PROGRAM} --program=FOLDER", "this is a folder, expected a file."),
        (f"program {_PROGRAM} --out=FILE", "file is a file; a folder is expected."),
        (f"program {_PROGRAM} --mesh=data", "mesh=data: expected axes with their sizes"),
        (f"program {_PROGRAM} --mesh=data:4", "mesh=data:4: expected 4 devices, got 8."),
        (f"program {_PROGRAM} --role=weights", "--role=weights: expected LABEL=REGEX"),
        (f"program {_PROGRAM} --category=a=(", "--category=a=(: not a regular expression"),
        (f"program {_PROGRAM} --kernel_flops=a=b", "'a=b': expected NAME=FLOPS of one run"),
        (f"program {_PROGRAM} --device_order=0,x", "--device_order=0,x: expected numbers such as"),
        (
            f"program {_PROGRAM} --device_order=0,1",
            "--device_order=0,1: expected each number from 0 to 7 once.",
        ),
        (f"program {_PROGRAM} --rates=FOLDER", ": no such file; `xla_plan calibrate"),
        (f"search_program {_PROGRAM} --letters=M", "--letters=M: expected REGEX=LETTERS"),
        (f"search_program {_PROGRAM} --axes=a,b,c", "--axes=a,b,c: expected one or two names"),
        (
            f"search_program {_PROGRAM} --axes=a --mesh=b:8",
            "--mesh=b:8: a search takes one or two axes, the same as --axes.",
        ),
        ("calibrate --out=FOLDER", "expected a regular file."),
        ("calibrate --out=FOLDER/none/h100.json", "expected a file in a folder that exists."),
    ],
)
def test_a_mistake_is_reported_before_jax_is_imported(folder, programs, command, message):
    compilers.need("v3:2x2")
    command = command.replace("FILE", str(folder / "file")).replace("NEW", str(folder / "new"))
    words = command.replace("FOLDER", str(folder)).split()
    done = programs.run("lingvo_gshard.gshard", "plan", *words)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(f"gshard plan {words[0]}: ") and message in done.stderr
    assert not (folder / "new").exists()
