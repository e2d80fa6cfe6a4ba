"""Repairs of XLA's faults leave the programs of registered experiments as they are."""

from collections import Counter
from unittest import mock

import pytest

from lingvo_gshard.core import hyperparams
from lingvo_gshard.model import placement
from lingvo_gshard.model.spec import Mode
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.train.programs import Programs
from tests import exhaustive
from tests.params.write_goldens import params_with_vocabularies
from xla_spmd import stablehlo
from xla_spmd.repairs import uneven_parts

_TWO_DIMS = "sharding=BGE:x,M:y,weights.M:x,HNV:y"


def _params(name, *settings):
    params = params_with_vocabularies(name)
    for setting in settings:
        key, _, value = setting.partition("=")
        params.Set(**{key: value})
    if params.task.product_dtype == "auto":
        params.task.product_dtype = "bfloat16"
    return params


def _changes(export):
    """Returns how many operations repairs add to the programs that `export` makes, by name.

    It has an entry "changed" if a repair changes a program without adding an operation.
    """
    changes = Counter()
    repair = uneven_parts.repair

    def counted(what, module, num_devices):
        before = str(module)
        operations = _operations(module)
        repair(what, module, num_devices)
        added = _operations(module) - operations
        if str(module) != before and not added:
            added["changed"] = 1
        changes.update(added)

    with mock.patch.object(uneven_parts, "repair", counted):
        export()
    return changes


def _operations(module):
    return Counter(view.operation.name for view in stablehlo.walk(module.body))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_partitions", "settings"),
    [
        ("toy.MoE8E4L", 4, ()),
        ("toy.LmMoE8E4L", 8, ("mesh=x:4,y:2", _TWO_DIMS)),
        ("small.MoE8E6L", 8, ()),
        *(
            pytest.param(*case, marks=exhaustive.RARE)
            for case in (
                ("toy.MoE8E4L", 8, ("mesh=x:4,y:2", _TWO_DIMS)),
                ("toy.MoE8E4L", 8, ("sharding=BGEMHNV:d",)),
                ("toy.Dense4L", 4, ()),
                ("small.MoE8E6L", 2, ()),
            )
        ),
    ],
)
def test_repairs_leave_training_and_decoding_as_they_are(name, num_partitions, settings):
    params = _params(name, *settings)
    parts = placement.partitioning(params, num_partitions)

    def export():
        specs = params.input.cls.batch_specs(params.input)
        programs = Programs(TaskModel(params, parts), in_process=True)
        programs.exported(Mode.TRAIN, specs)
        programs.decoder(16)

    assert _changes(export) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "stages"),
    [("d:2,p:4", 4), pytest.param("d:1,p:8", 8, marks=pytest.mark.exhaustive)],
)
def test_repairs_keep_no_stage_of_a_pipeline_whole(mesh, stages):
    """A barrier behind a shift to the next stage moves nothing."""
    params = params_with_vocabularies("toy.Dense4L")
    settings = {"layers_as": "LOOP", "remat": "BLOCK", "num_layers": 8, "stages": stages}
    for name, value in (settings | {"microbatches": 4}).items():
        for stack in ("encoder", "decoder"):
            hyperparams.apply_setting(params, f"task.{stack}.{name}={value}")
    params.Set(mesh=mesh, sharding="R:p,B:d+p")
    parts = placement.partitioning(params, 8)

    def export():
        specs = params.input.cls.batch_specs(params.input)
        Programs(TaskModel(params, parts), in_process=True).exported(Mode.TRAIN, specs)

    assert set(_changes(export)) <= {"stablehlo.optimization_barrier"}
