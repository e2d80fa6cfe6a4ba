"""The published training steps in records.toml, each with everything that a rebuild needs.

[sources.NAME]    the publication, and the differences of a rebuild
[models.NAME]     the sizes of dense_decoder's Model
[[records]]       a step: its model, machine, batch, partitioning and rate
"""

import dataclasses
import functools
import pathlib
import tomllib
from collections.abc import Mapping
from typing import Any

from repro.published.dense_decoder.sizes import Model, Run
from xla_plan.machines import topology_names

RECORDS = pathlib.Path(__file__).with_name("records.toml")

_TEXTS = ("id", "source", "model", "topology", "published")
_RUN_FIELDS = (
    "rows",
    "length",
    "data",
    "fsdp",
    "tensor",
    "microbatches",
    "remat",
    "weight_dtype",
    "experts",
)
_OPTIONAL = ("kept", "weights", "tokens_per_sec", "fits", "differs", "no_bound")


@dataclasses.dataclass(frozen=True)
class Record:
    """A measured and published step, and the settings of its rebuild."""

    id: str
    source: str  # The project, and the location in it.
    model_name: str
    model: Model
    run: Run
    topology: str
    published: str  # The published rate, or a note on whether it ran.
    tokens_per_sec: float | None  # None if the source states only whether it ran.
    fits: bool  # False for a step that ran out of memory.
    differs: tuple[str, ...]  # The differences between the rebuild and the source.
    weights: int | None  # The number of weights by the source's own formula.
    no_bound: str | None  # Why its plan is known not to be a bound, or None.

    @property
    def machine(self) -> str:
        """The generation of TPUs or GPUs, such as `v5e`."""
        return self.topology.partition(":")[0]

    @property
    def label(self) -> str:
        """The name of the planned step, for messages."""
        return f"{self.id} on {self.topology}"

    @property
    def measured_secs(self) -> float | None:
        """The published time of a step."""
        if self.tokens_per_sec is None:
            return None
        return self.run.rows * self.run.length / self.tokens_per_sec


@functools.cache
def load(path: pathlib.Path = RECORDS) -> tuple[Record, ...]:
    """Returns all records of a file, in its order.

    Raises ValueError, which names the record, for a missing or unknown field, a wrong size, an
    unknown source or model, a repeated id, or a topology with a different number of devices.
    """
    with path.open("rb") as file:
        try:
            content = tomllib.load(file)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path}: {error}.") from error

    records: dict[str, Record] = {}
    for number, fields in enumerate(content.get("records", ()), start=1):
        what = f"{path.name}: record {fields.get('id', number)}"
        try:
            record = _record(fields, content.get("sources", {}), content.get("models", {}))
        except (KeyError, TypeError, ValueError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"{what}: {reason}") from error
        if record.id in records:
            raise ValueError(f"{what}: another record has this id.")
        records[record.id] = record
    return tuple(records.values())


def _check_fields(fields: Mapping[str, Any]) -> None:
    """Raises KeyError or ValueError for a TOML table whose fields do not make a record."""
    known = {*_TEXTS, *_RUN_FIELDS, *_OPTIONAL}
    for name in fields:
        if name not in known:
            raise ValueError(f"unknown field {name!r}.")
    for name in ("rows", "length"):
        fields[name]  # Raises KeyError if it is missing.
    for name in _TEXTS:
        if not isinstance(fields[name], str):
            raise ValueError(f"{name}={fields[name]!r}: expected a text.")

    rate = fields.get("tokens_per_sec")
    if rate is None and "fits" not in fields:
        raise ValueError("it has neither 'tokens_per_sec' nor 'fits'.")
    if rate is not None and (rate <= 0 or not fields.get("fits", True)):
        raise ValueError(f"tokens_per_sec={rate:g}: expected more than 0, of a step that fits.")


def _record(
    fields: Mapping[str, Any], sources: Mapping[str, Any], models: Mapping[str, Any]
) -> Record:
    """Reads a record from a TOML table; raises KeyError, TypeError or ValueError."""
    _check_fields(fields)
    for kind, entries in (("source", sources), ("model", models)):
        if fields[kind] not in entries:
            raise ValueError(f"{kind} {fields[kind]!r} is not one of {', '.join(entries)}.")
    source = sources[fields["source"]]
    sizes = dict(models[fields["model"]])
    # Sources with learned positions have one for each token of a row.
    if sizes.get("positions") == "learned":
        sizes["max_length"] = fields["length"]

    is_gpu = topology_names.is_gpu(fields["topology"])
    options = {name: fields[name] for name in _RUN_FIELDS if name in fields}
    run = Run(
        **options,
        kept=tuple(fields.get("kept", ())),
        attention="flash" if is_gpu else "splash",
    )
    num_devices = _num_devices(fields["topology"])
    if run.devices != num_devices:
        raise ValueError(
            f"data * fsdp * tensor is {run.devices}, but {fields['topology']} has {num_devices} "
            "devices."
        )

    differs = tuple(source.get("differs", ()))
    if "differs" in fields:
        differs += (fields["differs"],)
    return Record(
        id=fields["id"],
        source=source["where"],
        model_name=fields["model"],
        model=Model(**sizes),
        run=run,
        topology=fields["topology"],
        published=fields["published"],
        tokens_per_sec=fields.get("tokens_per_sec"),
        fits=fields.get("fits", True),
        differs=differs,
        weights=fields.get("weights"),
        no_bound=fields.get("no_bound"),
    )


def _num_devices(name: str) -> int:
    """Returns the number of devices that a topology's name requests, without its compiler."""
    kind, _, sizes = name.partition(":")
    count = topology_names.CORES_PER_CHIP.get(kind, 1)
    for size in sizes.removesuffix("slices").split("x"):
        count *= int(size)
    return count
