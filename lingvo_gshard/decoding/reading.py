"""What models of each kind of data read, in their programs' words."""

import dataclasses

from lingvo_gshard.input import packing
from lingvo_gshard.input.manifest import Kind


@dataclasses.dataclass(frozen=True)
class Reading:
    """What decoders of a kind read, and the program that gives them lines."""

    input_name: str  # What a row holds.
    features: tuple[str, str, str]  # The ids, segments and positions of a batch's rows.
    command: str  # The program.
    does: str  # What the model does with a line.
    noun: str  # What a line gets.


READINGS: dict[str, Reading] = {
    Kind.PARALLEL: Reading(
        input_name="source",
        features=packing.SOURCE,
        command="translate",
        does="translates lines",
        noun="translation",
    ),
    Kind.TEXT: Reading(
        input_name="prompt",
        features=packing.TEXT,
        command="generate",
        does="continues prompts",
        noun="continuation",
    ),
}


def check_command(model: str, kind: str, command: str) -> None:
    """Raises ValueError, which names the right program, if `command` is not for such a model."""
    reading = READINGS[kind]
    if command != reading.command:
        raise ValueError(
            f"{model} {reading.does}, which lingvo_gshard.{reading.command} is for, not {command}."
        )
