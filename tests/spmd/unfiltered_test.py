"""Without any filter of log lines, no program makes XLA fall back to GSPMD."""

import os
import subprocess
import sys

import pytest

# A separate process, because XLA reads its level once. Each program is compiled, not only lowered.
_PROGRAMS = {
    "translation": """
from lingvo_gshard.model.spec import Mode
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.train.programs import Programs
from bench import synthetic

settings = [f"input.{name}=8" for name in ("batch_size", "source_len", "target_len")]
settings += ["decode.batch_size=8", "decode.max_source_len=8", "decode.max_target_len=4"]
for stack in ("encoder", "decoder"):
    settings += [f"task.{stack}.moe.group_size=8", f"task.{stack}.moe.dispatch=DISPATCH"]
params = synthetic.experiment("toy.MoE8E4L", settings)
parts = placement.partitioning(params, 4)
source = Programs(TaskModel(params, parts), in_process=True)
specs = synthetic.specs_of(synthetic.training_batch(params))
programs = [source.initializer(), source.decoder(8)]
programs += [source.exported(Mode.TRAIN, specs), source.exported(Mode.EVAL, specs)]
""",
    "language model": """
from lingvo_gshard import registry
from lingvo_gshard.model.spec import Mode
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.train.programs import Programs
from tests.model import small_language_model as small
from tests.spmd.functions import TensorSpec

params = registry.get_params("toy.LmMoE8E4L", ["decode.batch_size=8"])
params.task = small.task_params()
parts = placement.partitioning(params, 4)
batch = small.random_batch(0)
specs = batch.Transform(lambda x: TensorSpec(x.shape, x.dtype.name, "BL"))
source = Programs(TaskModel(params, parts), in_process=True)
programs = [source.exported(Mode.TRAIN, specs), source.exported(Mode.EVAL, specs)]
""",
    "functions": """
from lingvo_gshard.spmd import lowering
from tests.spmd import functions
import tensorflow as tf

def images(batch):
    with tf.GradientTape() as tape:
        tape.watch(batch.kernel)
        rows = gshard.convolution(gshard.split(batch.x, 1, 4), batch.kernel, (1, 1), "SAME")
        loss = tf.reduce_sum(gshard.max_pool(rows, (2, 2), (1, 1), "SAME") ** 2)
    return gshard.NestedMap(d=tape.gradient(loss, batch.kernel))

def terms(batch):
    total = gshard.Partial.from_einsum(parts, "BH,HM->BM", batch.x, batch.w, letter="H")
    return gshard.NestedMap(y=total.reduce())

parts = gshard.Partitioning.from_dict(gshard.Mesh.flat(4), {"G": "d", "H": "d"})
pixels = gshard.NestedMap(
    x=functions.f32((2, 8, 8, 3), "____"), kernel=functions.f32((3, 3, 3, 2), "____")
)
matrices = gshard.NestedMap(x=functions.f32((3, 8), "BH"), w=functions.f32((8, 5), "HM"))
annotated = [
    gshard.AnnotatedFn("images", images, ("batch",), (pixels,)),
    gshard.AnnotatedFn("terms", terms, ("batch",), (matrices,)),
]
programs = [lowering.export(fn, parts) for fn in annotated]
""",
}
_START = """
import lingvo_gshard as gshard
gshard.prepare(num_devices=4)
from lingvo_gshard.model import placement
from lingvo_gshard.spmd.executable import compile_program
"""
_END = """
for program in programs:
    print(program.name, compile_program(program).report().num_instructions)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dispatch", "count"),
    [
        ("translation", "EINSUM", 4),
        pytest.param("translation", "GATHER", 4, marks=pytest.mark.exhaustive),
        pytest.param("translation", "RAGGED", 4, marks=pytest.mark.exhaustive),
        pytest.param("language model", "", 2, marks=pytest.mark.exhaustive),
        ("functions", "", 2),
    ],
)
def test_no_program_falls_back_to_gspmd(kind, dispatch, count):
    code = _START + _PROGRAMS[kind].replace("DISPATCH", dispatch) + _END
    environment = os.environ | {
        "TF_CPP_MIN_LOG_LEVEL": "0",
        "LINGVO_GSHARD_COMPILATION_CACHE": "off",
    }
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.count("\n") == count
    # XLA's own words, at level 0: the log is there.
    assert "Module has GSPMD attrs or ops" not in run.stderr
    assert "GSPMD sharding propagation is going to be deprecated" not in run.stderr
