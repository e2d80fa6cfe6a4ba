"""Published training steps, planned and compared with the measured times.

FOLDER/records/ID      decoders in plain JAX (rebuilt.py)
FOLDER/layers/SIZES    a layer of experts alone (mixture_layer.py)
FOLDER/lm/MODEL        Lingvo's language models and GLaM, experiments of this project
FOLDER/family/MODEL    the models of GShard's Table 3; FOLDER/family/half has plans of half of the
rows
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence

from lingvo_gshard.plans import kept_plans
from lingvo_gshard.plans.plan import Plan
from lingvo_gshard.plans.request import Ask
from repro.published import mixture_layer, rebuilt, records
from repro.published.mixture_layer import LayerRecord
from repro.published.records import Record
from repro.tables import as_printed, family, language_models
from repro.tables.as_printed import PaperRun
from repro.tables.language_models import PublishedRun
from xla_plan.cost.step_cost import StepCost
from xla_plan.expected import factors
from xla_plan.expected.factors import Bound, Shares
from xla_plan.machines import topology
from xla_plan.plans.program_plan import ProgramPlan
from xla_spmd.files import atomic_file

BOUNDS_JSON = "bounds.json"

_LM = "lm"
_FAMILY = "family"
_RECORDS = "records"
_LAYERS = "layers"
_PAPERS_MACHINE = "v3"

_LINGVO_SOURCE = "tensorflow/lingvo lingvo/tasks/lm/params/synthetic_packed_input.py@e0be5dc4"
_GLAM_SOURCE = "GLaM, arXiv:2112.06905"
_GSHARD_SOURCE = "GShard, arXiv:2006.16668, Table 3"

_PERMUTES = "products are loops of CollectivePermutes, and the plan adds up both"
_LAYER_ALONE = "a layer alone is not a step"
_MIXTURE = "the rates are fitted to dense decoders, and mixtures test them"
_ALL_ROWS = "the batch counts target tokens alone"
_HALF_ROWS = "the batch counts the tokens of both sides"


@dataclasses.dataclass(frozen=True)
class Step:
    """A published step beside its plan."""

    id: str
    topology: str
    model: str
    devices: int
    row_tokens: int  # The length of a row.
    measured_secs: float | None  # None if the source states only whether it ran.
    source: str
    cost: StepCost | None  # None if the step does not fit.
    gib: float  # The memory that the plan needs on a device.
    capacity_gib: float
    compile_secs: float
    ran: bool = True  # False if the source reports that it ran out of memory.
    differs: tuple[str, ...] = ()  # The differences between the plan and the source.
    no_bound: str | None = None  # Why the plan is known not to be a bound, or None.

    @property
    def machine(self) -> str:
        """The generation of TPUs or GPUs, such as `v5e`."""
        return self.topology.partition(":")[0]

    @property
    def share(self) -> float | None:
        """The plan's time over the measured time; None without both."""
        if self.cost is None or self.measured_secs is None:
            return None
        return self.cost.step_secs / self.measured_secs

    @property
    def shares(self) -> Shares | None:
        """The shares of the kinds of work in the plan's time; None if the step does not fit."""
        if self.cost is None:
            return None
        products_secs = self.cost.roofline_secs.compute
        return factors.shares_of(self.cost.step_secs, self.cost.attention_secs, products_secs)

    @property
    def bound(self) -> Bound | None:
        """The entry in bounds.json; None without a measured time or a plan that is a bound."""
        if self.cost is None or self.measured_secs is None or self.no_bound is not None:
            return None
        return Bound(
            id=self.id,
            machine=self.machine,
            topology=self.topology,
            model=self.model,
            devices=self.devices,
            row_tokens=self.row_tokens,
            bound_secs=round(self.cost.step_secs, 6),
            attention_secs=round(self.cost.attention_secs, 6),
            products_secs=round(self.cost.roofline_secs.compute, 6),
            measured_secs=round(self.measured_secs, 6),
            source=self.source,
        )


def plan_all(ask: Ask, folder: pathlib.Path, progress: Callable[[Step], None]) -> list[Step]:
    """Plans all published steps, and calls `progress` with each one once it is planned.

    Raises ValueError if XLA refuses a program, if its process died, or if a stored plan is damaged.
    """
    steps = []

    def add(step: Step) -> None:
        progress(step)
        steps.append(step)

    for record in records.load():
        add(_of_record(record, rebuilt.load_or_make(record, folder / _RECORDS)))

    for layer in mixture_layer.PUBLISHED:
        add(_of_layer(layer, mixture_layer.load_or_make(layer, folder / _LAYERS)))

    for run in language_models.PUBLISHED:
        if run.tokens_per_sec is not None:
            request = ask(run.model, run.topology).step_only()
            own_folder = family.model_folder(folder / _LM, run.model)
            add(_of_language_model(run, kept_plans.load_or_make(request, own_folder)))

    for paper_run in as_printed.FAMILY:
        if paper_run.steps_per_sec is not None:
            request = ask(
                paper_run.model, topology.tpu(_PAPERS_MACHINE, paper_run.cores)
            ).step_only()
            own_folder = family.model_folder(folder / _FAMILY, paper_run.model)
            add(_of_paper(paper_run, kept_plans.load_or_make(request, own_folder), _ALL_ROWS))
            half_folder = family.model_folder(folder / _FAMILY / family.HALF, paper_run.model)
            half = kept_plans.load_or_make(family.half_batch(request), half_folder)
            add(_of_paper(paper_run, half, _HALF_ROWS))
    return steps


def load_all(folder: pathlib.Path) -> list[Step]:
    """Returns the steps whose plans are stored in `folder`, even if older code made them.

    Raises ValueError if the folder contains no plan, or if one is damaged, outdated or of another
    model.
    """
    steps = list(_kept(folder))
    if not steps:
        raise ValueError(
            f"{folder}: no plan of a published step there; `plan_tables --table=published "
            f"--out={folder}` makes them."
        )
    return steps


def save_bounds(steps: Sequence[Step], path: pathlib.Path) -> None:
    """Writes the steps whose plans are bounds, by machine and name, in bounds.json's format."""
    bounds = [step.bound for step in steps]
    known = [bound for bound in bounds if bound is not None]
    known.sort(key=lambda bound: (bound.machine, bound.id))
    content = json.dumps([dataclasses.asdict(bound) for bound in known], indent=2)
    atomic_file.write(path, f"{content}\n")


def _kept(folder: pathlib.Path) -> Iterator[Step]:
    for record in records.load():
        made = rebuilt.load(record, folder / _RECORDS)
        if made is not None:
            yield _of_record(record, made)

    for layer in mixture_layer.PUBLISHED:
        made = mixture_layer.load(layer, folder / _LAYERS)
        if made is not None:
            yield _of_layer(layer, made)

    for run in language_models.PUBLISHED:
        kept = family.load(folder / _LM, run.model)
        if kept is not None and run.tokens_per_sec is not None:
            yield _of_language_model(run, kept)

    for paper_run in as_printed.FAMILY:
        readings = {_ALL_ROWS: folder / _FAMILY, _HALF_ROWS: folder / _FAMILY / family.HALF}
        for reading, own_folder in readings.items():
            kept = family.load(own_folder, paper_run.model)
            if kept is not None and paper_run.steps_per_sec is not None:
                yield _of_paper(paper_run, kept, reading)


def _of_record(record: Record, made: ProgramPlan) -> Step:
    no_bound = record.no_bound
    if record.model.E and no_bound is None:
        no_bound = _MIXTURE
    if made.cost is not None and made.cost.uncounted_kernels:
        no_bound = f"the flops are unknown of {', '.join(made.cost.uncounted_kernels)}"
    run = record.run
    model = f"{record.model.weights / 1e9:.3g} B weights, {run.rows} x {run.length} tokens"
    return _of_program(record, made, model, run.length, no_bound, record.fits)


def _of_layer(record: LayerRecord, made: ProgramPlan) -> Step:
    return _of_program(record, made, record.layer.label, record.layer.tokens, _LAYER_ALONE)


def _of_program(
    record: Record | LayerRecord,
    made: ProgramPlan,
    model: str,
    row_tokens: int,
    no_bound: str | None,
    ran: bool = True,
) -> Step:
    """Returns the step of a program in plain JAX."""
    return Step(
        id=record.id,
        topology=made.topology,
        model=model,
        devices=made.cores,
        row_tokens=row_tokens,
        measured_secs=record.measured_secs,
        source=record.source,
        cost=made.cost,
        gib=made.memory_gib.peak,
        capacity_gib=made.memory_gib.capacity,
        compile_secs=made.compile_secs,
        ran=ran,
        differs=record.differs,
        no_bound=no_bound,
    )


def _of_language_model(run: PublishedRun, made: Plan) -> Step:
    is_lingvos = run.name.startswith("Dense")
    batch = made.step.batch
    assert run.tokens_per_sec is not None and batch is not None
    return Step(
        id=f"{'lingvo' if is_lingvos else 'glam'}.{run.name}",
        topology=run.topology,
        model=_model(made),
        devices=made.cores,
        row_tokens=batch.target_len,
        measured_secs=batch.target_tokens / run.tokens_per_sec,
        source=_LINGVO_SOURCE if is_lingvos else _GLAM_SOURCE,
        cost=made.step.cost,
        gib=made.step.memory_gib.peak,
        capacity_gib=made.step.memory_gib.capacity,
        compile_secs=made.step.compile_secs,
        no_bound=None if is_lingvos else _PERMUTES,
    )


def _of_paper(run: PaperRun, made: Plan, reading: str) -> Step:
    batch = made.step.batch
    assert run.steps_per_sec is not None and batch is not None
    suffix = "" if reading == _ALL_ROWS else ".half"
    return Step(
        id=f"gshard.{run.model.partition('.')[2]}{suffix}",
        topology=made.topology,
        model=_model(made),
        devices=made.cores,
        row_tokens=batch.target_len,
        measured_secs=1 / run.steps_per_sec,
        source=_GSHARD_SOURCE,
        cost=made.step.cost,
        gib=made.step.memory_gib.peak,
        capacity_gib=made.step.memory_gib.capacity,
        compile_secs=made.step.compile_secs,
        no_bound=(
            "the paper does not state what its batches count; this plan assumes that " + reading
        ),
    )


def _model(made: Plan) -> str:
    batch = made.step.batch
    assert batch is not None
    return f"{made.weights / 1e9:.3g} B weights, {batch.rows} x {batch.target_len} tokens"
