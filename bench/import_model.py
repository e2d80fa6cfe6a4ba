"""The seconds and memory of importing a checkpoint of NLLB-MoE's form that has many parts.

    python -m bench.import_model [--experts=148] [--parts=64] [--killed]

The benchmark writes random weights, by default 5 GB in 64 safetensors files, and imports them in a
separate process, which reports its peak memory and its seconds. A model with two experts is
imported for comparison. With --killed, the process is killed after a hundred arrays, and a second
process continues the import. The files are in the page cache.
"""

import json
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
from absl import flags

from lingvo_gshard import cli
from lingvo_gshard.checkpoints import stack_forms
from lingvo_gshard.files import safetensors_file
from lingvo_gshard.hugging_face import families, names
from lingvo_gshard.input.base_input import DataFacts
from lingvo_gshard.model import placement
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.runs import launch as launches
from xla_spmd.files import table

_EXPERTS = flags.DEFINE_integer("experts", 148, "The experts of each of the four MoE layers.", 1)
_PARTS = flags.DEFINE_integer("parts", 64, "The number of files of weights.", 1)
_KILLED = flags.DEFINE_bool("killed", False, "Whether to kill the process in the middle.")

# The importer's own program, which prints its peak memory at the end.
_PROGRAM = """
import resource
from lingvo_gshard import cli, import_model
try:
    cli.run("import_model", import_model.main)
finally:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write(folder / "small", num_experts=2, num_parts=1)
        num_bytes = write(folder / "large", _EXPERTS.value, _PARTS.value)
        base_bytes, small_secs = imported(folder / "small", folder / "small_run")

        if _KILLED.value:
            kill_in_the_middle(folder / "large", folder / "run")
        peak_bytes, secs = imported(folder / "large", folder / "run")
    rows = [
        ("", "small", "large"),
        ("GB", "", f"{num_bytes / 1e9:.2f}"),
        ("seconds", f"{small_secs:.1f}", f"{secs:.1f}"),
        ("peak memory, GB", f"{base_bytes / 1e9:.2f}", f"{peak_bytes / 1e9:.2f}"),
    ]
    print(table.text(rows))


def write(folder: pathlib.Path, num_experts: int, num_parts: int, **fields: Any) -> int:
    """Writes a model's folder with random weights; returns the size of the weights in bytes.

    `fields` replace fields of config.json.
    """
    config = {
        "model_type": "nllb-moe",
        "d_model": 512,
        "vocab_size": 50_000,
        "num_experts": num_experts,
        "moe_token_dropout": 0.2,
    }
    for side in ("encoder", "decoder"):
        config[f"{side}_layers"] = 4
        config[f"{side}_ffn_dim"] = 2048
        config[f"{side}_attention_heads"] = 8
        config[f"{side}_sparse_step"] = 2
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | fields))

    shapes = list(_shapes(folder).items())
    weight_map: dict[str, str] = {}
    num_bytes = 0
    rng = np.random.default_rng(1)
    for number in range(num_parts):
        file = f"model-{number + 1:05d}-of-{num_parts:05d}.safetensors"
        part = {
            name: rng.standard_normal(shape, np.float32)
            for name, shape in shapes[number::num_parts]
        }
        safetensors_file.write(folder / file, part, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
        num_bytes += sum(array.nbytes for array in part.values())
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return num_bytes


def _shapes(folder: pathlib.Path) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors of a folder's model, computed from its config.json."""
    config = families.read(folder)
    model, overrides = config.launched_model()
    size = config["vocab_size"]
    params = launches.experiment_params(
        launches.Launch(model, overrides, None, DataFacts(size, size))
    )
    theta = TaskModel(params, placement.partitioning(params, 1)).state_spec.theta

    forms = stack_forms.forms_of({f"theta.{path}": spec for path, spec in theta.FlattenItems()})
    shapes: dict[str, tuple[int, ...]] = {}
    for path, spec in theta.FlattenItems():
        weight = f"theta.{path}"
        if weight == names.TABLE:
            shapes["model.shared.weight"] = spec.shape
            continue
        for piece in names.pieces(weight, spec, forms, config.name):
            shapes[f"model.{piece.name}"] = piece.shape
    return shapes


def imported(folder: pathlib.Path, logdir: pathlib.Path) -> tuple[int, float]:
    """Imports in a separate process; returns its peak memory in bytes, and the seconds."""
    began_secs = time.monotonic()
    output = subprocess.check_output(_command(folder, logdir), text=True)
    print(output.splitlines()[0], flush=True)
    return int(output.split()[-1]), time.monotonic() - began_secs


def kill_in_the_middle(folder: pathlib.Path, logdir: pathlib.Path) -> None:
    """Starts an import, and kills its process when a hundred arrays are complete."""
    journal = logdir / "checkpoints/0.import/journal.jsonl"
    process = subprocess.Popen(_command(folder, logdir), stdout=subprocess.DEVNULL)
    while not journal.exists() or journal.read_text().count("\n") < 100:
        if process.poll() is not None:
            raise RuntimeError(f"the import ended by itself, with status {process.returncode}")
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()


def _command(folder: pathlib.Path, logdir: pathlib.Path) -> list[str]:
    return [sys.executable, "-c", _PROGRAM, f"--from={folder}", f"--logdir={logdir}"]


if __name__ == "__main__":
    cli.run("import_model", main)
