"""The programs that repro/propagation.py compiles with both propagators, and their settings."""

import dataclasses
import pathlib
from unittest import mock

from lingvo_gshard import registry
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.model import placement
from lingvo_gshard.model.spec import Mode
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.plans.plan import DECODE, EVALUATE, TRAIN
from lingvo_gshard.spmd import program
from lingvo_gshard.spmd.program import Program
from lingvo_gshard.train.programs import Programs
from repro import families
from xla_plan.machines import topology
from xla_spmd.annotations import shardy
from xla_spmd.files import digests
from xla_spmd.runtime import versions

SHARDY = "Shardy"
GSPMD = "GSPMD"
PROPAGATORS = (SHARDY, GSPMD)

# Virtual devices of a CPU, in addition to the topologies of TPUs and GPUs.
CPU = "cpu:8"
_V3 = "v3:8x8"
_V5E = "v5e:4x4"
_H100 = "h100:1x8"

VOCABULARY = 1024
# Each stack has one layer, with experts, so that a hundred compilations do not take too long.
_ONE_LAYER = families.of_stacks("num_layers=1")
_EXPERTS = (*_ONE_LAYER, *families.of_stacks("moe_every=1", "moe.group_size=64"))
_ROWS = ("input.batch_size=32", "input.source_len=32", "input.target_len=32")
_VOCABULARIES = (
    f"task.source_vocab_size={VOCABULARY}",
    f"task.target_vocab_size={VOCABULARY}",
)
_SIZES = (
    *_VOCABULARIES,
    *_ROWS,
    *(setting.replace("input", "eval_input") for setting in _ROWS),
    "decode.batch_size=8",
    "decode.max_source_len=16",
    "decode.max_target_len=16",
)
_TOY = (*_SIZES, *_EXPERTS)
_DENSE = (*_SIZES, *_ONE_LAYER)
_LANGUAGE_MODEL = (
    f"task.vocab_size={VOCABULARY}",
    "task.decoder.num_layers=2",
    "input.batch_size=32",
    "input.row_len=64",
    "decode.batch_size=8",
    "decode.max_target_len=32",
    "decode.max_prompt_len=16",
)

_EINSUM = families.of_stacks("moe.dispatch=EINSUM")
_LOOP = families.of_stacks("layers_as=LOOP", "num_layers=2")
_STAGES = families.of_stacks("remat=BLOCK", "stages=2", "microbatches=2")
_DATA_AND_EXPERTS = ("mesh=data:*,experts:4", "sharding=BG:data+experts,E:experts")
_THREE_AXES = ("mesh=data:2,experts:2,model:*", "sharding=BG:data+experts,E:experts,HN:model")
_TWO_DIMS = ("mesh=x:*,y:4", "sharding=BGE:x,M:y,weights.M:x,HNV:y")
_BY_STACK = ("mesh=d:*,m:4", "sharding=BG:d,HNV:m,encoder.BG:d+m,encoder.HN:-")


@dataclasses.dataclass(frozen=True)
class Case:
    """A program of a registered experiment, and the machines for which it is compiled."""

    name: str
    model: str
    settings: tuple[str, ...]
    machines: tuple[str, ...] = (CPU,)
    kind: str = TRAIN  # TRAIN, EVALUATE or DECODE.

    def params(self) -> Params:
        """Returns the experiment's Params."""
        return registry.get_params(self.model, self.settings)

    def key(self, machine: str, propagator: str) -> str:
        """Returns a digest of the settings, and of the packages that trace and compile."""
        packages = versions.installed(("jax", "jaxlib", "libtpu", "tensorflow"))
        made_from = [self.model, self.settings, self.kind, packages]
        return digests.of_json(*made_from, machine, propagator)


def _toy(name: str, *settings: str, machines: tuple[str, ...] = (CPU,), kind: str = TRAIN) -> Case:
    """Returns a program of toy.MoE8E4L, or of its twin with GATHER unless its name has EINSUM."""
    model = "toy.MoE8E4L" if name.endswith("EINSUM") else "toy.MoE8E4LGather"
    return Case(name, model, (*_TOY, *settings), machines, kind)


CASES = (
    # The paper's table, by dispatch and form of the stacks.
    _toy("the paper's, EINSUM", *_EINSUM, machines=(CPU, _H100, _V5E)),
    _toy("the paper's", machines=(CPU, _V5E)),
    _toy("loop", *_LOOP),
    _toy("loop, EINSUM", *_LOOP, *_EINSUM),
    # GSPMD aborts on these.
    _toy("Megatron", "sharding=HN:d"),
    _toy("experts alone", "sharding=E:d"),
    _toy("vocabulary alone", "sharding=V:d"),
    # The devices do not divide these sizes; the registered model has 12 target groups on 8 devices.
    Case("as registered, EINSUM", "toy.MoE8E4L", (*_VOCABULARIES, *_EINSUM)),
    _toy("13 rows", "input.batch_size=13", *families.of_stacks("moe.group_size=52")),
    # Other models, and other programs of a run.
    Case("the paper's", "toy.LmMoE8E4L", _LANGUAGE_MODEL, (CPU, _V5E)),
    Case("the paper's, decoding", "toy.LmMoE8E4L", _LANGUAGE_MODEL, kind=DECODE),
    _toy("the paper's, evaluation", kind=EVALUATE),
    _toy("the paper's, decoding", kind=DECODE),
    Case("the paper's, EINSUM", "small.MoE8E6L", (*_VOCABULARIES, *_EINSUM), (_V5E,)),
    Case("the paper's", "m4.MoE128E12L", (), (_V3,)),
    Case("ZeRO-3", "m4.MoE128E12L", ("sharding=BGEM:d",), (_V3,)),
    # Other tables of docs/partitionings.md.
    _toy("experts x data, EINSUM", *_EINSUM, *_DATA_AND_EXPERTS),
    _toy("experts x data", *_DATA_AND_EXPERTS),
    _toy("experts x data x model", *_THREE_AXES),
    _toy("data parallel", "sharding=BG:d"),
    _toy("Megatron, EINSUM", *_EINSUM, "sharding=HN:d", machines=(CPU, _H100)),
    _toy("ZeRO-2", "sharding=BGE:d,m:d"),
    _toy("ZeRO-3", "sharding=BGEM:d", machines=(CPU, _V5E)),
    _toy("2-D products, EINSUM", *_EINSUM, *_TWO_DIMS, machines=(CPU, _V5E)),
    _toy("one weird trick", "sharding=BGEV:d,U:-"),
    _toy("one weird trick, by stack, EINSUM", *_EINSUM, *_BY_STACK),
    _toy("pipeline", *_EINSUM, *_LOOP, *_STAGES, "mesh=p:2,d:*", "sharding=R:p,B:d+p"),
    _toy("other devices", *_DATA_AND_EXPERTS, "device_assignment=[7,6,5,4,0,1,2,3]"),
    Case("Megatron", "toy.Dense4L", (*_DENSE, "sharding=HN:d"), (CPU, _H100)),
    Case("2-D products", "toy.Dense4L", (*_DENSE, *_TWO_DIMS)),
)


def num_partitions(machine: str) -> int:
    """Returns the number of a machine's devices."""
    if machine == CPU:
        return int(machine.partition(":")[2])
    return len(topology.devices(machine))


def make(case: Case, propagator: str, machine: str, folder: pathlib.Path) -> Program:
    """Returns a case's program with the annotations of one propagator.

    The program that TensorFlow traced is kept in `folder`, for both propagators and for all
    machines with this number of devices.
    """
    partitions = num_partitions(machine)
    made_from = case.key(f"{partitions} partitions", "traced")
    path = folder / f"{made_from[:16]}.program"
    if path.exists():
        traced = program.load(path, made_from)
    else:
        traced = _trace(case, partitions)
        traced.save(path, made_from)

    if propagator == GSPMD:
        return traced
    exported = shardy.annotated(traced.name, traced.exported, traced.partitioning.mesh)
    return dataclasses.replace(traced, exported=exported)


def _trace(case: Case, partitions: int) -> Program:
    """Returns a case's program with TensorFlow's own annotations, in GSPMD's form."""
    params = case.params()
    partitioning = placement.partitioning(params, partitions)

    with mock.patch.object(shardy, "annotated", _as_it_is):
        if case.kind == DECODE:
            length = params.task.cls.DecodeLength(params.decode)
            return Programs(TaskModel(params, partitioning), in_process=True).decoder(length)

        mode = Mode.TRAIN if case.kind == TRAIN else Mode.EVAL
        batch = params.input if case.kind == TRAIN else params.eval_input
        specs: NestedMap = batch.cls.batch_specs(batch)
        return Programs(TaskModel(params, partitioning), in_process=True).exported(mode, specs)


def _as_it_is(what: str, exported: bytes, mesh: object) -> bytes:
    """Replaces shardy.annotated, and returns the program unchanged."""
    del what, mesh
    return exported
