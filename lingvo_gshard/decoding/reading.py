"""The inputs and results of each kind of model, in the words of the programs' messages."""

import dataclasses
import difflib
from collections.abc import Sequence

from lingvo_gshard.input import example_codec, packing
from lingvo_gshard.input.manifest import Kind


@dataclasses.dataclass(frozen=True)
class Reading:
    """The words for a kind of model, and its program."""

    input_name: str  # The name of a row's input.
    features: tuple[str, str, str]  # The ids, segments and positions of a batch's rows.
    command: str  # The program that decodes lines.
    does: str  # What the model does with lines.
    noun: str  # The name of a line's result.


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
        raise ValueError(f"{model} {reading.does}: use gshard {reading.command}, not {command}.")


def check_language(code: str | None, languages: Sequence[str], kind: str) -> None:
    """Raises ValueError if `code` is not one of the model's languages; None is always allowed."""
    if code is not None and kind == Kind.TEXT:
        raise ValueError(f"--source_lang={code}: the model does not translate.")
    if code is None or code in languages:
        return

    if not languages:  # An imported model without a tokenizer.
        raise ValueError(f"--source_lang={code}: the model names no languages.")

    # A code such as `dee` is most likely a typing error.
    near = difflib.get_close_matches(code, languages, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    trained_on = example_codec.listed(languages)
    raise ValueError(f"--source_lang={code}: the model was trained on {trained_on}.{hint}")
