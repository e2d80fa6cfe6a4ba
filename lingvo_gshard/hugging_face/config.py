"""config.json of a model of transformers, of any family, and the questions of an import.

A family is a subclass of Config: encoder_decoder.py and, for decoders, decoder.py. It knows which
fields are which settings, and which tensors are which weights. families.py lists them.

Our ids of padding, BOS and EOS are 0, 1 and 2. Where theirs differ, rows of the tables change
places: see Config.order.
"""

import abc
import dataclasses
import pathlib
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Self

import numpy as np

from lingvo_gshard import registry
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.settings import differences, values_by_path
from lingvo_gshard.files import json_fields
from lingvo_gshard.files.json_fields import Fields
from lingvo_gshard.input.bpe_tokenizer import their_ids
from lingvo_gshard.input.manifest import Kind
from lingvo_gshard.layers.activations import Activation

CONFIG = "config.json"

# Far above any model's sizes, but small enough that a damaged number does not exhaust the memory.
MAX_DIM = 2**18
MAX_VOCAB = 2**24
MAX_LAYERS = 512
MAX_EXPERTS = 8192
MAX_ALL_EXPERTS = 2**17  # In all layers together.

ACTIVATIONS = {
    "relu": Activation.RELU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
}


@dataclasses.dataclass(frozen=True)
class Config(abc.ABC):
    """A config.json: its values, and their meaning here."""

    path: pathlib.Path
    values: Fields

    # The defaults of transformers' classes, for fields that a file lacks.
    DEFAULTS: ClassVar[dict[str, Any]] = {}
    # Fields that change a model, and their values with which ours computes the same.
    FIXED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "pruned_heads": ({}, None),
        "quantization_config": (None,),
    }
    # The names of tables, of which a file may have copies; and of numbers that we compute.
    TABLES: ClassVar[re.Pattern[str]]
    COMPUTED: ClassVar[re.Pattern[str]]
    # Whether their layers have biases that ours lack.
    HAS_BIASES: ClassVar[bool] = False
    # The settings of tasks that do not change what a trained model computes.
    WITHOUT_EFFECT: ClassVar[str] = (
        r"task\.(input_dropout\..*|label_smoothing|aux_loss_weight|activation_dtype|product_dtype"
        r"|(encoder|decoder)\.(layers_as|remat|kept_hidden_dtype|stages|microbatches|.*dropout\..*"
        r"|moe\.(dispatch|group_size|train_capacity\..*|gating\.(z_loss_weight|bias_rate))))"
    )
    # The kind of the data that such a model learns from.
    KIND: ClassVar[Kind]

    def __getitem__(self, name: str) -> Any:
        """Returns a value; raises ValueError if it is missing and lacks a default."""
        if name in self.values:
            return self.values.get(name)
        if name in self.DEFAULTS:
            return self.DEFAULTS[name]
        raise ValueError(f"{self.path} has no {name}.")

    @property
    @abc.abstractmethod
    def rows(self) -> tuple[int, int, int]:
        """Returns their ids of our ids 0, 1 and 2, padding, BOS and EOS."""

    def order(self) -> np.ndarray:
        """Returns their id of each of our ids, int64 [vocab_size]: a row's number in their table.

        The special ids change places with the ids that are there; all other ids are equal.
        """
        return their_ids(self["vocab_size"], self.rows)

    @property
    def expert_scale(self) -> float:
        """Returns the factor of experts' outputs, which transformers applies in evaluation, too."""
        return 1.0

    def is_left_out(self, name: str) -> bool:
        """Returns whether a tensor is not among the weights that transformers loads."""
        return self.COMPUTED.fullmatch(name) is not None

    @abc.abstractmethod
    def check(self) -> None:
        """Raises ValueError, which names the value, for a model that we do not support."""

    def ending_with(self, eos_id: int | None, given: Fields) -> Self:
        """Returns the config with a tokenizer's EOS, if it is one of the ids that end a text.

        `given` are the options of generate. None, or another id, changes nothing.
        """
        return self

    @abc.abstractmethod
    def check_generated(self, given: Fields) -> None:
        """Raises ValueError if generate, with these options, would use other special tokens."""

    @property
    @abc.abstractmethod
    def base(self) -> str:
        """The registered model whose settings a config.json changes."""

    @abc.abstractmethod
    def on(self, params: Params) -> Params:
        """Returns an experiment's settings, changed by this config.json."""

    @abc.abstractmethod
    def fields_of(self, params: Params, rows: tuple[int, int, int]) -> dict[str, Any]:
        """Returns the fields of the config.json of an experiment; see families.written."""

    def inexpressible(self, params: Params) -> list[str]:
        """Returns the settings of an experiment that its config.json would not give back."""
        try:
            got = self.on(registry.get_params(self.base))
        except ValueError as error:
            return [str(error)]

        lost = []
        for line in differences(params.task.ToText(), got.task.ToText()):
            path, _, _ = line.partition(": ")
            if not re.fullmatch(self.WITHOUT_EFFECT, f"task.{path}"):
                lost.append(f"task.{line}")
        return lost

    def launched_model(self) -> tuple[str, tuple[str, ...]]:
        """Returns the registered model, and `path=value` settings in which this one differs."""
        base = registry.get_params(self.base)
        return self.base, settings(base, self.on(base))

    @abc.abstractmethod
    def table_candidates(self, path: str) -> tuple[str, ...]:
        """Returns the possible names of a table at `path`, best first; none for other weights."""

    @abc.abstractmethod
    def written_tables(self, path: str) -> list[str]:
        """Returns the names under which an exported folder has the table at `path`."""

    @abc.abstractmethod
    def name(self, path: str, layer: int | None, expert: int | None) -> str:
        """Returns the name, without `model.`, of the tensor of one layer and expert of a weight.

        Raises ValueError for a weight that the family lacks.
        """

    def refused(self, name: str, expected: str) -> ValueError:
        """Returns the error for a field's value."""
        value = reprlib.repr(self[name])
        return ValueError(f"{self.path}: {name} is {value}; expected {expected}.")

    def check_fixed(self, fixed: Mapping[str, tuple[Any, ...]]) -> None:
        """Raises ValueError if the file has a field with none of its values in `fixed`."""
        for name, allowed in fixed.items():
            if name in self.values and self[name] not in allowed:
                raise self.refused(name, " or ".join(map(repr, allowed)))

    def check_integer(self, name: str, least: int, most: int | None = None) -> None:
        """Raises ValueError unless a field is an integer from `least` to `most`."""
        value = self[name]
        if type(value) is not int or value < least or (most is not None and value > most):
            raise self.refused(name, f"{least} or more" if most is None else f"{least} to {most}")

    def check_number(self, name: str, is_right: Callable[[float], bool], expected: str) -> None:
        """Raises ValueError unless a field is a finite number for which `is_right` holds."""
        value = self[name]
        if not json_fields.is_number(value) or not is_right(value):
            raise self.refused(name, expected)

    def check_rate(self, name: str) -> None:
        """Raises ValueError unless a field is a rate of dropout."""
        self.check_number(name, lambda rate: 0 <= rate < 1, "0 or more, below 1")

    def check_switches(self, names: Iterable[str]) -> None:
        """Raises ValueError unless the fields are true or false."""
        for name in names:
            if type(self[name]) is not bool:
                raise self.refused(name, "true or false")

    def check_activation(self, name: str) -> None:
        """Raises ValueError unless a field names one of ACTIVATIONS."""
        if self[name] not in list(ACTIVATIONS):
            raise self.refused(name, f"one of {', '.join(ACTIVATIONS)}")

    def check_divisor(self, name: str, of: str) -> None:
        """Raises ValueError unless a field is a divisor of another one."""
        value = self[name]
        if type(value) is not int or value < 1 or self[of] % value:
            raise self.refused(name, f"a divisor of {of} {self[of]}")

    def check_experts(self, name: str, num_layers: int) -> None:
        """Raises ValueError if a field cannot be the number of experts in each layer."""
        self.check_integer(name, 1, MAX_EXPERTS)
        if num_layers * self[name] > MAX_ALL_EXPERTS:
            raise self.refused(name, f"at most {MAX_ALL_EXPERTS} experts in all layers together")


def activation_name(activation: Activation) -> str:
    """Returns the name of an activation in transformers."""
    return next(name for name, ours in ACTIVATIONS.items() if ours is activation)


def settings(base: Params, wanted: Params) -> tuple[str, ...]:
    """Returns the settings in which `wanted` differs from `base`, in the form of --set."""
    of_base = values_by_path(base.ToText()).items()
    wanted_values = values_by_path(wanted.ToText()).items()
    return tuple(f"{path}={value}" for path, value in wanted_values if (path, value) not in of_base)
