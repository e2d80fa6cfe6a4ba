"""The flags that name a trained model, for the programs that decode with it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from absl import flags

from lingvo_gshard import cli

if TYPE_CHECKING:
    from lingvo_gshard.decoding.bundle_spec import DecoderSpec
    from lingvo_gshard.decoding.text_decoder import TextDecoder
    from lingvo_gshard.runs.opening import Check
    from lingvo_gshard.runs.run import Run

LOGDIR = flags.DEFINE_string("logdir", None, "The folder of a trained run.")
BUNDLE = flags.DEFINE_string("bundle", None, "A folder that `gshard export` wrote.")
NBEST = flags.DEFINE_integer("nbest", 1, "Translations, or continuations, of each line.", 1)
SOURCE_LANG = flags.DEFINE_string("source_lang", None, "The lines' language; most only check it.")
_BEAM_SIZE = flags.DEFINE_integer("beam_size", None, "Active hypotheses of each line.", 1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", None, "Lines to decode together.", 1)
_MAX_PROMPT_LEN = flags.DEFINE_integer("max_prompt_len", None, "The longest prompt, in tokens.", 1)
_MAX_TARGET_LEN = flags.DEFINE_integer("max_target_len", None, "The longest result, in tokens.", 1)
_TEMPERATURE = flags.DEFINE_float("temperature", None, "Draw samples, at this temperature.", 0.0)
_TOP_K = flags.DEFINE_integer("top_k", None, "Draw among this many likeliest tokens.", 1)
_TOP_P = flags.DEFINE_float("top_p", None, "Draw among the likeliest tokens of this mass.", 0, 1)
_AVERAGE = flags.DEFINE_integer("average_checkpoints", None, "Average the last N checkpoints.", 1)
_WEIGHTS = flags.DEFINE_enum(
    "weights",
    None,
    ["FLOAT32", "FLOAT32_LAID_OUT", "BFLOAT16", "INT8"],
    "The format of large weights; BFLOAT16 has half and INT8 a quarter of the size.",
    case_sensitive=False,
)
ATTENTION = flags.DEFINE_bool("attention", False, "Record attention, which a server can draw.")
cli.define_imports()

# Settings of decoding by these names, which a bundle has fixed.
_SETTINGS = (
    _BEAM_SIZE,
    _BATCH_SIZE,
    _AVERAGE,
    _MAX_PROMPT_LEN,
    _MAX_TARGET_LEN,
    _TEMPERATURE,
    _TOP_K,
    _TOP_P,
    _WEIGHTS,
)


def check() -> None:
    """Raises ValueError for flags that do not name one model, or do not go with it."""
    if (LOGDIR.value is None) == (BUNDLE.value is None):
        raise ValueError("give either --logdir or --bundle; see --help.")
    if BUNDLE.value is None:
        return

    if flags.FLAGS["import"].value:
        raise ValueError("--import needs --logdir; a bundle imports no experiment.")

    # A bundle's programs and weights are fixed; only a run leaves the choice.
    check_needs_run(*(flag for flag in _SETTINGS if flag is not _BEAM_SIZE))
    if ATTENTION.value:
        raise ValueError("--attention needs --logdir; a bundle has it if it was exported with it.")


def check_needs_run(*settings: flags.FlagHolder[Any]) -> None:
    """Raises ValueError for the first of these flags that is given; by default, of all settings."""
    for flag in settings or _SETTINGS:
        if flag.value is not None:
            raise ValueError(f"--{flag.name} needs --logdir.")


@contextlib.contextmanager
def text_decoder(
    command: str | None = None, check_languages: Check | None = None
) -> Iterator[TextDecoder]:
    """Starts the devices and yields the decoder of lines for the model of --bundle or --logdir.

    Raises ValueError for flags that do not go together, for a missing or damaged bundle or run, and
    for a model that `command` does not serve; None serves all models. `check_languages` raises it
    before the devices start.
    """
    check()
    if BUNDLE.value is None:
        with cli.joined(), opened_run(command, check_languages) as run:
            yield run.text_decoder()
        return

    from lingvo_gshard.decoding import bundle_spec, reading

    # The spec has the number of devices to start; weights and programs are read after that.
    spec = bundle_spec.load_spec(BUNDLE.value)
    if command is not None:
        reading.check_command(spec.model, spec.kind, command)
    if check_languages is not None:
        check_languages(spec.spoken)
    with cli.joined(spec.num_partitions):
        yield from_bundle(spec)


def from_bundle(spec: DecoderSpec) -> TextDecoder:
    """Starts the devices and returns what decodes lines with the model of --bundle."""
    from lingvo_gshard.decoding import reading

    if _BEAM_SIZE.value is not None or NBEST.value > spec.num_best:
        raise ValueError(
            f"{BUNDLE.value}: its beam is fixed and gives {spec.num_best} {spec.reading.noun}s of "
            "a line; export it again with another --beam_size or --nbest."
        )
    reading.check_language(SOURCE_LANG.value, spec.source_languages, spec.kind)

    # A mistake has been reported by now, before JAX is imported.
    from lingvo_gshard.spmd import processes

    _start_devices(spec.model, spec.num_partitions)
    processes.check_alike({"bundle": str(spec)})
    _tell_weights(spec.weights)
    return reloaded()


def reloaded() -> TextDecoder:
    """Returns what decodes lines with the model that --bundle holds by now, on the same devices."""
    from lingvo_gshard.decoding import bundle, kinds

    assert BUNDLE.value is not None
    return kinds.text_decoder(*bundle.load(BUNDLE.value))


@contextlib.contextmanager
def opened_run(command: str | None = None, check_languages: Check | None = None) -> Iterator[Run]:
    """Starts the devices and yields the run of --logdir, with the settings that the flags change.

    Raises ValueError if there is no run, it does not fit the devices, or another program than
    `command` is for it; None is for all. `check_languages` raises it before the devices start.
    """
    from lingvo_gshard.runs import opening

    assert LOGDIR.value is not None
    with opening.to_decode(
        LOGDIR.value, _start_devices, command, SOURCE_LANG.value, _settings(), check_languages
    ) as run:
        _tell_weights(run.params.decode.weights.value)
        yield run


def _settings() -> list[str]:
    """Returns the settings of the experiment that the flags change."""
    # What is not given is as it was in training.
    settings: dict[str, object] = {
        "num_best": NBEST.value,
        "tell_attention": ATTENTION.value,
    }
    if _TEMPERATURE.value is not None:
        settings["beam_size"] = 1  # Samples must not compete in one beam.
    for flag in _SETTINGS:
        if flag.value is not None:
            settings[flag.name] = flag.value
    return [f"decode.{name}={value}" for name, value in settings.items()]


def _start_devices(model: str, partitions: int | None = None) -> tuple[int, str]:
    """Starts and prints the devices; returns the number of partitions, and the printed line."""
    started = cli.start_devices(model, partitions)
    _, devices = started
    print(devices, file=sys.stderr)
    return started


def _tell_weights(numbers: str) -> None:
    """Prints the format of large weights, unless it is float32, in which they were trained."""
    if numbers.lower() != "float32":
        print(f"weights: {numbers.lower()}", file=sys.stderr)
