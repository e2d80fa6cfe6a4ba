"""A bundle translates in a process with only jax, numpy, sentencepiece, flatbuffers and tqdm."""

import ast
import dataclasses
import json
import pathlib
import re
import shutil
import subprocess
import sys
import urllib.request

import numpy as np
import pytest

from lingvo_gshard import registry
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.decoding import bundle, bundle_spec
from lingvo_gshard.decoding.bundle_spec import DecoderSpec
from lingvo_gshard.decoding.outcomes import Finish
from lingvo_gshard.input.tokenizer import vocabulary_files
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.spmd.executable import compile_program
from lingvo_gshard.train.programs import Programs
from tests.decoding import vocabularies
from tests.layers import building
from tests.spmd import functions
from xla_spmd.files import digests

_LINES = [
    "ba ke lixmo",
    "",
    "a line that is longer than sixteen pieces, in parts: ba ke li mo",
    "x",
]
_TEXT = "\n".join(_LINES).encode()
_ROOT = pathlib.Path(bundle.__file__).parents[2]

# Only these packages and the standard library can be imported.
_ALONE = """
import importlib.metadata, sys
owners = importlib.metadata.packages_distributions()
allowed = {"jax", "jaxlib", "numpy", "ml_dtypes", "opt_einsum", "scipy"}
allowed |= {"absl", "sentencepiece", "flatbuffers", "tqdm", "lingvo_gshard", "xla_spmd"}
allowed |= {name for name in owners if name.startswith(("jax_", "libtpu", "nvidia"))}  # Plugins.

class Refuse:
    def find_spec(self, name, path=None, target=None):
        root = name.split(".")[0]
        if root in owners and root not in allowed:
            raise ImportError(f"{name} is not on this machine")

sys.meta_path.insert(0, Refuse())
try:
    import tensorflow
    sys.exit("tensorflow was found")
except ImportError:
    pass
import runpy
sys.argv = ["translate", *sys.argv[1:]]
runpy.run_module("lingvo_gshard.translate", run_name="__main__")
"""


def _translate(folder, *flags, text=_TEXT):
    return subprocess.run(
        [sys.executable, "-c", _ALONE, "--bundle=.", *flags],
        input=text,
        capture_output=True,
        cwd=folder,
        timeout=300,
    )


@pytest.mark.slow
def test_a_bundle_translates_like_the_model(made):
    folder, translator = made
    done = _translate(folder, "--nbest=2", "--scores")
    assert done.returncode == 0, done.stderr.decode()
    lines = done.stdout.decode().removesuffix("\n").split("\n")
    wanted = list(translator.decode(_LINES))

    # With untrained weights, translations seldom end.
    devices, *warnings = done.stderr.decode().splitlines()
    assert re.fullmatch(r"2 virtual CPU devices on \d+ cores?", devices)
    num_cut = sum(Finish.LENGTH in {each.finish for each in found} for found in wanted)
    assert num_cut > 0 and len(warnings) == 1
    assert f"{num_cut} of 4 lines were cut at the maximum length" in warnings[0]

    assert len(lines) == len(wanted) == 4 and lines[1] == "0.0000\t"
    for line, want in zip(lines, wanted, strict=True):
        fields = line.split("\t")
        assert fields[1::2] == [t.text for t in want]
        np.testing.assert_allclose(
            [float(score) for score in fields[::2]], [t.score for t in want], atol=2e-4
        )
    assert len(wanted[0]) == 2 and any(want[0].text for want in wanted)


@pytest.mark.slow
def test_any_input_bytes_give_one_output_line_per_line(made):
    """Random bytes, many line breaks, incomplete characters, and no newline at the end."""
    rng = np.random.default_rng(8)
    junk = rng.integers(0, 256, 900, np.uint8).tobytes()
    junk += rng.choice(np.frombuffer(b"\n\r\0\t \x85\x0c\xff.a", np.uint8), 150).tobytes()
    junk += "\u2028ж\U0001f600漢\n".encode()[:-2] * 9 + b"\xed\xa0\x80\n\xf4\x90"
    done = _translate(made[0], text=junk)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.count(b"\n") == junk.count(b"\n") + 1 > 15
    assert done.stdout.endswith(b"\n") and done.stdout.decode()


@pytest.mark.slow
def test_int8_weights_are_a_quarter_of_the_file_and_of_the_memory(tmp_path):
    tokenizer = vocabularies.train(tmp_path / "made.model")
    params = registry.get_params("toy.MoE8E4L", ["decode.weights=INT8"])
    sizes = {"source_vocab_size": tokenizer.vocab_size, "target_vocab_size": tokenizer.vocab_size}
    params.task.Set(**sizes)
    params.decode.Set(batch_size=2, max_target_len=8)
    parts = functions.partitioning(2)

    # A separate program quantizes the weights once, on two devices.
    theta = building.random_theta(TaskModel(params, parts).task)
    keep = compile_program(Programs(TaskModel(params, parts), in_process=True).weight_converter())
    kept = keep(NestedMap(theta=theta)).state.theta
    spec = DecoderSpec("toy.MoE8E4L", ("de", "fr"), 2, (16,), 1, 2, weights="int8")
    program_for = Programs(TaskModel(params, parts), in_process=True).decoder
    decoder = bundle.Decoder(spec, kept, program_for)
    bundle.save(tmp_path / "b", decoder, (tmp_path / "made.model",) * 2)

    num_bytes = sum(array.nbytes for array in theta.Flatten())
    size = (tmp_path / "b/weights.safetensors").stat().st_size
    assert size < 0.27 * num_bytes

    # The loaded decoder gives the same results, and takes at most the file's size in memory.
    loaded, *_ = bundle.load(tmp_path / "b")
    assert loaded.spec.weights == "int8"
    features = NestedMap(
        source_ids=np.full((2, 16), 5, np.int32),
        source_segment_ids=np.ones((2, 16), np.int32),
        source_positions=np.tile(np.arange(16, dtype=np.int32), (2, 1)),
    )
    found, wanted = loaded(features), decoder(features)
    np.testing.assert_array_equal(found["ids"], wanted["ids"])
    np.testing.assert_array_equal(found["scores"], wanted["scores"])
    assert sum(array.nbytes for array in loaded.theta.Flatten()) < size
    assert loaded.theta.decoder.layers[1].feed_forward.wi.kept.dtype == np.int8  # An expert's.


@pytest.mark.slow
def test_the_modules_come_from_the_bundle(made):
    folder, _ = made
    code = "import lingvo_gshard.spmd.program as program; print(program.__file__)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=60)
    assert done.stdout == f"{folder}/lingvo_gshard/spmd/program.py\n"
    assert (folder / "lingvo_gshard/serving/page.html").exists()


def _imported(path):
    """Returns the library's files that one of its files imports, even inside functions."""
    names = []
    for node in ast.walk(ast.parse((_ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module)
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    paths = [name.replace(".", "/") + ".py" for name in names if name.startswith("lingvo_gshard")]
    return [path for path in paths if (_ROOT / path).is_file()]


@pytest.mark.slow
def test_a_bundle_holds_exactly_the_modules_that_translate_and_serve_import(made):
    remaining = [f"lingvo_gshard/{name}.py" for name in ("translate", "generate", "serve")]
    # The package's public names are imported when they are used; these programs don't use any.
    reached = {"lingvo_gshard/__init__.py"}
    while remaining:
        path = remaining.pop()
        # A run is opened, and an experiment looked up, only for --logdir.
        of_runs = path.startswith(("lingvo_gshard/runs/", "lingvo_gshard/registry.py"))
        if path not in reached and not of_runs:
            reached.add(path)
            remaining += _imported(path)
    # Programs that ran from the bundle may have left bytecode.
    held = {path.name for path in (made[0] / "lingvo_gshard").iterdir()} - {"__pycache__"}
    assert held == {pathlib.Path(path).parts[1] for path in reached}
    assert all((made[0] / path).is_file() for path in reached)


@pytest.mark.slow
def test_a_bundle_serves_with_its_own_modules(made):
    command = [sys.executable, "-m", "lingvo_gshard.serve", "--bundle=.", "--port=0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=made[0])
    try:
        address = process.stdout.readline().split()[-1]
        request = urllib.request.Request(
            f"{address}/translate",
            json.dumps({"lines": _LINES[:1]}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            (best, *_), *_ = json.load(answer)["translations"]
    finally:
        process.kill()
    assert best["text"] == next(iter(made[1].decode(_LINES[:1])))[0].text


@pytest.mark.slow
def test_unsupported_flags_are_refused_in_one_line(made):
    done = _translate(made[0], "--nbest=3")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert "gives 2 translations of a line; export it again" in done.stderr.decode()


def _damaged(made, tmp_path, name, content):
    folder = tmp_path / "copy"
    shutil.copytree(made[0], folder)
    (folder / name).write_bytes(content)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("weights.safetensors", b"no tensors", "weights.safetensors has 10 bytes, not the "),
        ("bundle.json", b'{"version": 9}', "bundle.json has version 9, expected 2"),
        ("programs/source_16.program", b"", "source_16.program has 0 bytes, not the "),
    ],
)
def test_a_damaged_bundle_is_refused(made, tmp_path, name, content, message):
    with pytest.raises(ValueError, match=message):
        bundle.load(_damaged(made, tmp_path, name, content))


@pytest.mark.slow
def test_weights_that_are_not_finite_are_refused_by_name(made, tmp_path):
    """A run whose training failed may export such weights."""
    decoder = made[1].decoder
    weights = dict(decoder.theta.FlattenItems())
    bad = np.array(weights["softmax"])
    bad[3, 1:3] = np.nan
    theta = decoder.theta.Pack([*({**weights, "softmax": bad}.values())])
    broken = dataclasses.replace(decoder, theta=theta)
    folder = tmp_path / "broken"
    bundle.save(folder, broken, vocabulary_files(made[0], None))
    with pytest.raises(ValueError, match=f"^{folder}: softmax has 2 numbers that are not finite"):
        bundle.load(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("weights.safetensors", lambda data: data[:-4000] + bytes(4000), "has SHA-256"),
        ("vocab/target.model", lambda data: data[:-1] + bytes([data[-1] ^ 1]), "has SHA-256"),
        ("bundle.json", lambda data: data.replace(b'size": 2', b'size": 0'), "not match its dig"),
    ],
)
def test_a_change_that_keeps_the_size_is_found(made, tmp_path, name, change, message):
    data = (made[0] / name).read_bytes()
    assert change(data) != data
    with pytest.raises(ValueError, match=f"{name} .*{message}"):
        bundle.load(_damaged(made, tmp_path, name, change(data)))


@pytest.mark.slow
def test_an_interrupted_export_leaves_the_bundle_before(made, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(made[0], folder)
    spec = bundle_spec.load_spec(folder)

    def cut_short(source_len):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bundle.save(folder, bundle.Decoder(spec, NestedMap(), cut_short), (folder, folder))
    assert bundle.load(folder)[0].spec == spec and list(tmp_path.iterdir()) == [folder]


@pytest.mark.slow
def test_an_export_replaces_a_bundle_and_refuses_a_folder_of_anything_else(made, tmp_path):
    folder, decoder = tmp_path / "copy", made[1].decoder
    shutil.copytree(made[0], folder)
    (folder / "programs/old").touch()
    bundle.save(folder, decoder, vocabulary_files(made[0], "parallel"))
    assert not (folder / "programs/old").exists()
    modes = {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()}
    assert modes == {0o644}
    (folder / "mine.txt").touch()
    with pytest.raises(ValueError, match="copy holds mine.txt, which is not part of a bundle"):
        bundle.save(folder, decoder, vocabulary_files(made[0], "parallel"))


def test_a_bundle_that_calls_its_lengths_otherwise_is_refused_in_one_line(tmp_path):
    spec = dataclasses.asdict(DecoderSpec("toy.MoE8E4L", ("de",), 2, (16,), 2, 2))
    contents = {"spec": spec, "files": [], "origin": {}}
    path = tmp_path / bundle_spec.FILE_NAME
    digests.write_json(path, 2, contents)
    assert bundle_spec.load_spec(tmp_path).input_lengths == (16,)

    # An unreleased version wrote this name.
    spec["source_lengths"] = spec.pop("input_lengths")
    digests.write_json(path, 2, contents)
    message = f"^{path} has no 'input_lengths': another version wrote it; use that version, or make"
    with pytest.raises(ValueError, match=message):
        bundle_spec.load_spec(tmp_path)


def test_other_folders_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no bundle.json; give a folder that"):
        bundle_spec.load_spec(tmp_path)
