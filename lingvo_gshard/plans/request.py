"""A request for a plan: an experiment, the machine, and some of the run's programs."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Self

from lingvo_gshard import registry
from lingvo_gshard.core import hyperparams
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.model import placement
from lingvo_gshard.model.spec import Mode
from lingvo_gshard.plans import plan
from lingvo_gshard.sharding.layout import Partitioning
from xla_plan.machines import topology_names

# The Params of the batch that each program takes; initialization does not take a batch.
_BATCH_PARAMS = {plan.TRAIN: "input", plan.EVALUATE: "eval_input", plan.DECODE: "decode"}


@dataclasses.dataclass(frozen=True)
class Request:
    """A registered experiment on a topology such as `v3:32x32`, to be planned."""

    model: str
    settings: tuple[str, ...]  # Changes to the experiment, `path=value`.
    params: Params  # The experiment with those changes, vocabularies included.
    topology: str
    partitioning: Partitioning
    programs: tuple[str, ...] = plan.PROGRAMS

    @property
    def label(self) -> str:
        """The experiment and the machine, for messages."""
        return f"{self.model} on {self.topology}"

    @property
    def batches(self) -> list[str]:
        """The names of the Params of all batches that the requested programs take."""
        return [name for program, name in _BATCH_PARAMS.items() if program in self.programs]

    def step_only(self) -> Self:
        """Returns the same request for the training step alone."""
        return dataclasses.replace(self, programs=(plan.TRAIN,))

    def only(self, names: Sequence[str]) -> Self:
        """Returns the same request for these programs. Raises ValueError if it lacks one."""
        names = [names] if isinstance(names, str) else names
        for name in names:
            if name not in self.programs:
                known = ", ".join(self.programs)
                raise ValueError(f"{self.model} has no program {name!r}; expected some of {known}.")
        programs = tuple(name for name in self.programs if name in names)
        return dataclasses.replace(self, programs=programs)

    def changed(self, settings: Sequence[str]) -> Self:
        """Returns the same request with more settings."""
        params = self.params.Copy()  # Params are mutable, and this request keeps its own.
        for setting in settings:
            hyperparams.apply_setting(params, setting)

        # The mesh and the table may be among the settings.
        num_partitions = self.partitioning.mesh.num_partitions
        return dataclasses.replace(
            self,
            settings=(*self.settings, *settings),
            params=params,
            partitioning=placement.partitioning(params, num_partitions),
        )

    def check_sizes(self) -> None:
        """Raises ValueError if a split size is 0, or if groups do not divide a batch's tokens."""
        placement.check_sizes(self.params, self.partitioning, self.batches)

    def check_divisible(self) -> None:
        """Raises ValueError unless the mesh divides experts, groups and the programs' batches."""
        placement.check_divisible(self.params, self.partitioning, self.batches)


Ask = Callable[[str, str], Request]  # Returns the request for a model on a topology.


def make_request(
    model: str, topology_name: str, settings: Sequence[str], batch_tokens: int | None
) -> Request:
    """Returns a request for an experiment, partitioned over all cores as the trainer does it.

    `batch_tokens`, the target tokens of a batch, becomes a setting unless it is None. Raises
    ValueError for an unknown model, setting or topology, a vocabulary without a size, if no number
    of rows has the batch's tokens, or if the mesh does not fit the cores. Only a plan finds sizes
    that the topology's compiler does not know: this imports neither TensorFlow nor JAX.
    """
    topology_names.check(topology_name)

    # As a setting, the size of the batch appears in the plan and in the training flags.
    settings = tuple(settings)
    if batch_tokens is not None:
        settings += (_batch_setting(model, settings, batch_tokens),)

    # The trainer takes these sizes from the data, which a plan does not have.
    params = registry.get_params(model, settings)
    missing = [name for name in params.task.cls.VOCABULARIES if params.task.Get(name) is None]
    if missing:
        names = " and ".join(f"task.{name}" for name in missing)
        flags = " ".join(f"--set=task.{name}=SIZE" for name in missing)
        raise ValueError(f"A plan has no data to take {names} from; give {flags}.")

    partitioning = placement.partitioning(params, topology_names.num_devices(topology_name))
    return Request(model, settings, params, topology_name, partitioning, programs_of(params))


def programs_of(params: Params) -> tuple[str, ...]:
    """Returns the programs of an experiment's runs; decoding only for a task that decodes."""
    if Mode.PREDICT in params.task.cls.MODES:
        return plan.PROGRAMS
    return tuple(name for name in plan.PROGRAMS if name != plan.DECODE)


def _batch_setting(model: str, settings: tuple[str, ...], batch_tokens: int) -> str:
    """Returns the setting of the number of rows that have `batch_tokens` tokens."""
    if any(setting.startswith("input.batch_size=") for setting in settings):
        raise ValueError("give --batch_tokens or --set=input.batch_size, not both.")

    # A row has this many target tokens, padding included.
    params = registry.get_params(model, settings)
    _, length = params.task.cls.Lengths(params.input)
    if batch_tokens < 1 or batch_tokens % length:
        raise ValueError(
            f"--batch_tokens={batch_tokens}: expected a multiple of {length}, the tokens of a row."
        )
    return f"input.batch_size={batch_tokens // length}"
