"""The flags that name a trained model, for the programs that translate with it."""

from __future__ import annotations

import contextlib
import difflib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from absl import flags

from lingvo_gshard import cli
from lingvo_gshard.files import storage
from lingvo_gshard.input import example_codec

if TYPE_CHECKING:
    from lingvo_gshard.runs.run import Run
    from lingvo_gshard.translation.bundle import DecoderSpec
    from lingvo_gshard.translation.translator import Translator

LOGDIR = flags.DEFINE_string("logdir", None, "The folder of a trained run.")
BUNDLE = flags.DEFINE_string("bundle", None, "A folder that lingvo_gshard.export_bundle wrote.")
NBEST = flags.DEFINE_integer("nbest", 1, "Translations of each line.", lower_bound=1)
_SOURCE_LANG = flags.DEFINE_string("source_lang", None, "The lines' language; checked, not used.")
_BEAM_SIZE = flags.DEFINE_integer("beam_size", None, "Active hypotheses of each line.", 1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", None, "Lines to translate together.", 1)
_AVERAGE = flags.DEFINE_integer("average_checkpoints", None, "Average the last N checkpoints.", 1)
ATTENTION = flags.DEFINE_bool("attention", False, "Record attention, which a server can draw.")


def check() -> None:
    """Raises ValueError for flags that do not name one model, or do not go with it."""
    if (LOGDIR.value is None) == (BUNDLE.value is None):
        raise ValueError("give either --logdir or --bundle; see --help.")
    if BUNDLE.value is None:
        return

    # A bundle's batch size and weights are fixed; only a run leaves the choice.
    for flag in (_BATCH_SIZE, _AVERAGE):
        if flag.value is not None:
            raise ValueError(f"--{flag.name} needs --logdir.")
    if ATTENTION.value:
        raise ValueError("--attention needs --logdir; a bundle has it if it was exported with it.")


@contextlib.contextmanager
def translator() -> Iterator[Translator]:
    """Starts the devices and yields a translator with the model of --bundle or --logdir.

    Raises ValueError as `check`, and for a bundle or run that is missing or damaged.
    """
    check()
    if BUNDLE.value is None:
        with cli.joined(), opened_run() as run:
            from lingvo_gshard.translation.translator import Translator

            decoder, source, target = run.decoder()
            yield Translator(decoder, source, target)
        return

    from lingvo_gshard.translation import bundle

    # The spec alone tells how many devices to start; weights and programs are read after that.
    spec = bundle.load_spec(BUNDLE.value)
    with cli.joined(spec.num_partitions):
        yield from_bundle(spec)


def from_bundle(spec: DecoderSpec) -> Translator:
    """Starts the devices and returns a translator with the model of --bundle."""
    if _BEAM_SIZE.value is not None or NBEST.value > spec.num_best:
        raise ValueError(
            f"{BUNDLE.value}: its beam is fixed and gives {spec.num_best} translations of a "
            "line; export it again with another --beam_size or --nbest."
        )
    _check_language(spec.languages)
    _start_devices(spec.model, spec.num_partitions)
    return reloaded()


def reloaded() -> Translator:
    """Returns a translator with the model that --bundle holds by now, on the same devices."""
    from lingvo_gshard.translation import bundle
    from lingvo_gshard.translation.translator import Translator

    assert BUNDLE.value is not None
    decoder, source, target = bundle.load(BUNDLE.value)
    return Translator(decoder, source, target)


@contextlib.contextmanager
def opened_run() -> Iterator[Run]:
    """Starts the devices and yields the run of --logdir, with the settings that the flags change.

    Raises ValueError if there is no run, or it does not fit the devices.
    """
    from lingvo_gshard.runs import launch as launches

    assert LOGDIR.value is not None
    with storage.working(LOGDIR.value) as logdir:
        launch = launches.recorded(str(logdir))
        params = launches.experiment_params(launch)
        launches.check_decoded(launch.model, params)
        _check_language(launches.trained_on(launch, params))

        # Flags are settings of the experiment; what is not given is as it was in training.
        settings = {"num_best": NBEST.value, "tell_attention": ATTENTION.value}
        for flag in (_BEAM_SIZE, _BATCH_SIZE, _AVERAGE):
            if flag.value is not None:
                settings[flag.name] = flag.value
        launch = launch.changed(f"decode.{name}={value}" for name, value in settings.items())
        num_partitions = _start_devices(launch.model)

        # A mistake has been reported by now, without waiting for what this imports.
        from lingvo_gshard.runs.run import open_run

        yield open_run(launch, str(logdir), num_partitions)


def _start_devices(model: str, partitions: int | None = None) -> int:
    """Starts the devices and prints what they are; returns the number of partitions."""
    partitions, devices = cli.start_devices(model, partitions)
    print(devices, file=sys.stderr)
    return partitions


def _check_language(trained_on: Sequence[str]) -> None:
    """Raises ValueError if --source_lang is none of the model's languages."""
    code = _SOURCE_LANG.value
    languages = example_codec.source_languages(trained_on)
    if code is None or code in languages:
        return

    # Codes such as `dee` are mostly slips.
    near = difflib.get_close_matches(code, languages, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ValueError(
        f"--source_lang={code}: the model was trained on {', '.join(languages)}.{hint}"
    )
