"""Plans of language models beside published rates, from handmade plans."""

import pytest

from lingvo_gshard import registry
from lingvo_gshard.plans import kept_plans, plan
from lingvo_gshard.plans.request import Request
from lingvo_gshard.sharding.layout import Partitioning
from repro.tables import language_models, report
from repro.tables.language_models import PUBLISHED, PlannedRun
from tests.xla_plan import samples
from xla_plan.plans.program_plan import Batch
from xla_spmd.mesh import Mesh

_BY_NAME = {run.name: run for run in PUBLISHED}
_RUN = _BY_NAME["DenseLm128B8x8"]


def _plan(secs, model=_RUN.model):
    """Returns a plan of a step of 2^14 tokens, which does not fit if `secs` is None."""
    made = None if secs is None else samples.cost(secs)
    return samples.plan(made, model=model, batch=Batch(16, 0, 1024))


def test_training_steps_are_planned_in_separate_folders_and_read_again(monkeypatch, tmp_path):
    requests = []

    def ask(model, topology):
        parts = Partitioning(Mesh.flat(1), ())
        return Request(model, (), registry.get_params(model), topology, parts)

    def load_or_make(request, folder):
        requests.append(request)
        made = _plan(4.0, request.model)
        samples.save(made, folder)
        return made

    monkeypatch.setattr(kept_plans, "load_or_make", load_or_make)
    told = []
    planned = language_models.plan_all(ask, tmp_path, told.append)

    assert told == planned == language_models.load_all(tmp_path)
    assert [(each.model, each.topology) for each in requests] == [
        (run.model, run.topology) for run in PUBLISHED
    ]
    assert {request.programs for request in requests} == {(plan.TRAIN,)}
    assert (tmp_path / "DenseLm8B2x2" / "plan.json").is_file()


def test_the_table_has_rates_and_shares_and_names_models_that_do_not_fit(tmp_path):
    planned = [PlannedRun(_RUN, _plan(4.0)), PlannedRun(_BY_NAME["DenseLm1T16x16"], _plan(None))]
    text = report.language_models_table(planned)
    row, unfit = (line for line in text.splitlines() if line.startswith("| DenseLm"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == [
        "DenseLm128B8x8",
        "v3:8x8",
        "12.5",
        "9.00",
        "15.48",
        "4000",
        "4.096",
        "3.7",
        "0.90",
    ]
    assert unfit.count("does not fit") == 2 and unfit.endswith("| 1.4 | - |")
    assert "Lingvo's 1 rates: 0.90 to 0.90 of the bound, median 0.90." in text


def test_a_folder_without_plans_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no plan of lm.DenseLm8B2x2 or another published"):
        language_models.load_all(tmp_path)
