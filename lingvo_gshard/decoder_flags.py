"""The flags that name a trained model, for the programs that decode with it."""

from __future__ import annotations

import contextlib
import difflib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from lingvo_gshard import cli
from lingvo_gshard.files import storage
from lingvo_gshard.input import example_codec, manifest

if TYPE_CHECKING:
    from lingvo_gshard.decoding.bundle import DecoderSpec
    from lingvo_gshard.decoding.text_decoder import TextDecoder
    from lingvo_gshard.runs.run import Run

LOGDIR = flags.DEFINE_string("logdir", None, "The folder of a trained run.")
BUNDLE = flags.DEFINE_string("bundle", None, "A folder that lingvo_gshard.export_bundle wrote.")
NBEST = flags.DEFINE_integer("nbest", 1, "Translations, or continuations, of each line.", 1)
SOURCE_LANG = flags.DEFINE_string("source_lang", None, "The lines' language; most only check it.")
_BEAM_SIZE = flags.DEFINE_integer("beam_size", None, "Active hypotheses of each line.", 1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", None, "Lines to decode together.", 1)
_MAX_PROMPT_LEN = flags.DEFINE_integer("max_prompt_len", None, "The longest prompt, in tokens.", 1)
_MAX_TARGET_LEN = flags.DEFINE_integer("max_target_len", None, "The longest result, in tokens.", 1)
_TEMPERATURE = flags.DEFINE_float("temperature", None, "Draw samples, at this temperature.", 0.0)
_TOP_K = flags.DEFINE_integer("top_k", None, "Draw among so many of the likeliest tokens.", 1)
_TOP_P = flags.DEFINE_float("top_p", None, "Draw among the likeliest tokens of this mass.", 0, 1)
_AVERAGE = flags.DEFINE_integer("average_checkpoints", None, "Average the last N checkpoints.", 1)
_WEIGHTS = flags.DEFINE_enum(
    "weights",
    None,
    ["FLOAT32", "FLOAT32_LAID_OUT", "BFLOAT16", "INT8"],
    "What large weights are kept in; BFLOAT16 is half and INT8 a quarter of the size.",
    case_sensitive=False,
)
ATTENTION = flags.DEFINE_bool("attention", False, "Record attention, which a server can draw.")


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
def text_decoder(command: str | None = None) -> Iterator[TextDecoder]:
    """Starts the devices and yields what decodes lines with the model of --bundle or --logdir.

    Raises ValueError as `check`, for a bundle or run that is missing or damaged, and for a model
    that another program than `command` is for; None is for all.
    """
    check()
    if BUNDLE.value is None:
        with cli.joined(), opened_run(command) as run:
            yield run.text_decoder()
        return

    from lingvo_gshard.decoding import bundle

    # The spec alone tells how many devices to start; weights and programs are read after that.
    spec = bundle.load_spec(BUNDLE.value)
    _check_command(spec.model, spec.kind, command)
    with cli.joined(spec.num_partitions):
        yield from_bundle(spec)


def from_bundle(spec: DecoderSpec) -> TextDecoder:
    """Starts the devices and returns what decodes lines with the model of --bundle."""
    if _BEAM_SIZE.value is not None or NBEST.value > spec.num_best:
        raise ValueError(
            f"{BUNDLE.value}: its beam is fixed and gives {spec.num_best} {spec.noun}s of a line;"
            " export it again with another --beam_size or --nbest."
        )
    _check_language(spec.source_languages, spec.kind)
    _start_devices(spec.model, spec.num_partitions)
    _tell_weights(spec.weights)
    return reloaded()


def reloaded() -> TextDecoder:
    """Returns what decodes lines with the model that --bundle holds by now, on the same devices."""
    from lingvo_gshard.decoding import bundle, kinds

    assert BUNDLE.value is not None
    return kinds.text_decoder(*bundle.load(BUNDLE.value))


@contextlib.contextmanager
def opened_run(command: str | None = None) -> Iterator[Run]:
    """Starts the devices and yields the run of --logdir, with the settings that the flags change.

    Raises ValueError if there is no run, it does not fit the devices, or another program than
    `command` is for it; None is for all.
    """
    from lingvo_gshard.runs import launch as launches

    assert LOGDIR.value is not None
    with storage.working(LOGDIR.value) as logdir:
        launch = launches.recorded(str(logdir))
        params = launches.experiment_params(launch)
        launches.check_decoded(launch.model, params)
        kind = launch.facts.kind
        assert kind is not None, "check_decoded"
        _check_command(launch.model, kind, command)
        of_data = example_codec.source_languages(launches.trained_on(launch, params))
        _check_language(launch.facts.language_tokens or of_data, kind)

        # Flags are settings of the experiment; what is not given is as it was in training.
        settings: dict[str, object] = {
            "num_best": NBEST.value,
            "tell_attention": ATTENTION.value,
        }
        if _TEMPERATURE.value is not None:
            settings["beam_size"] = 1  # Samples that share a beam would be no samples.
        for flag in _SETTINGS:
            if flag.value is not None:
                settings[flag.name] = flag.value
        launch = launch.changed(f"decode.{name}={value}" for name, value in settings.items())
        num_partitions = _start_devices(launch.model)

        _tell_weights(params.decode.weights.value if _WEIGHTS.value is None else _WEIGHTS.value)

        # A mistake has been reported by now, without waiting for what this imports.
        from lingvo_gshard.runs.run import open_run

        yield open_run(launch, str(logdir), num_partitions)


def _check_command(model: str, kind: str, command: str | None) -> None:
    from lingvo_gshard.decoding import reading

    if command is not None:
        reading.check_command(model, kind, command)


def _start_devices(model: str, partitions: int | None = None) -> int:
    """Starts the devices and prints what they are; returns the number of partitions."""
    partitions, devices = cli.start_devices(model, partitions)
    print(devices, file=sys.stderr)
    return partitions


def _tell_weights(numbers: str) -> None:
    """Prints what large weights are kept in, unless it is what they were trained in."""
    if numbers.lower() != "float32":
        print(f"weights: {numbers.lower()}", file=sys.stderr)


def _check_language(languages: Sequence[str], kind: str) -> None:
    """Raises ValueError if --source_lang is none of the model's languages."""
    code = SOURCE_LANG.value
    if code is not None and kind == manifest.Kind.TEXT:
        raise ValueError(f"--source_lang={code}: the model does not translate.")
    if code is None or code in languages:
        return

    if not languages:  # An imported model without a tokenizer.
        raise ValueError(f"--source_lang={code}: the model names no languages.")

    # Codes such as `dee` are mostly slips.
    near = difflib.get_close_matches(code, languages, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    trained_on = example_codec.listed(languages)
    raise ValueError(f"--source_lang={code}: the model was trained on {trained_on}.{hint}")
