"""Opens a run: checks the user's settings, starts the devices, and then imports JAX."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from lingvo_gshard.decoding import reading
from lingvo_gshard.input import example_codec
from lingvo_gshard.runs import launch as launches
from xla_spmd.files import storage

if TYPE_CHECKING:
    from lingvo_gshard.runs.run import Run

# Starts the devices for a model; returns the number of partitions and a description.
Start = Callable[[str], tuple[int, str]]


@contextlib.contextmanager
def to_train(
    model: str | None,
    settings: tuple[str, ...],
    data_dir: str | None,
    logdir: str | pathlib.Path,
    start: Start,
    executables: str | None = None,
) -> Iterator[tuple[Run, str]]:
    """Yields a run, to train or evaluate it, and a description of its devices.

    `settings` are `path=value`. Raises ValueError if `logdir` cannot be written, if the model or
    the data is missing and the folder holds no run, for a wrong setting, for data of another task
    or vocabulary, or for sizes that do not fit the devices.
    """
    storage.check_writable(logdir)
    with storage.working(logdir) as folder:
        launch = launches.launch_of(model, settings, data_dir, str(folder))
        num_partitions, devices = start(launch.model)

        # A wrong model or setting has been reported by now, before the slow imports.
        from lingvo_gshard.runs.run import check_processes, open_run

        check_processes(launch)
        # Everything is checked once more, now against the devices.
        yield open_run(launch, str(folder), num_partitions, executables), devices


@contextlib.contextmanager
def to_decode(
    logdir: str | pathlib.Path,
    start: Start,
    command: str | None = None,
    source_lang: str | None = None,
    settings: Iterable[str] = (),
) -> Iterator[Run]:
    """Yields the run in a folder, to decode with it; `settings` change its recorded settings.

    Raises ValueError if the folder holds no run, if the run does not fit the devices, if its lines
    are decoded by another program than `command`, or if it was not trained on `source_lang`.
    """
    with storage.working(logdir) as folder:
        launch = launches.recorded(str(folder))
        params = launches.experiment_params(launch)
        launches.check_decoded(launch.model, params)
        kind = launch.facts.kind
        assert kind is not None, "check_decoded"
        if command is not None:
            reading.check_command(launch.model, kind, command)
        of_data = example_codec.source_languages(launches.trained_on(launch, params))
        reading.check_language(source_lang, launch.facts.language_tokens or of_data, kind)

        launch = launch.changed(settings)
        launches.experiment_params(launch)  # A wrong setting is reported before JAX starts.
        num_partitions, _ = start(launch.model)

        # A mistake has been reported by now, before the slow imports.
        from lingvo_gshard.runs.run import check_processes, open_run

        check_processes(launch)
        yield open_run(launch, str(folder), num_partitions)
