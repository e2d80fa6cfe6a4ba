"""Opens a run: checks the user's settings, starts the devices, and then imports JAX."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from lingvo_gshard.decoding import reading
from lingvo_gshard.decoding.languages import Languages
from lingvo_gshard.input import example_codec
from lingvo_gshard.input.bpe_tokenizer import loaded
from lingvo_gshard.model.decode_params import SearchParams
from lingvo_gshard.runs import launch as launches
from lingvo_gshard.spmd import executables_folder
from xla_spmd.files import storage

if TYPE_CHECKING:
    from lingvo_gshard.runs.run import Run

# Starts the devices for a model; returns the number of partitions and a description.
Start = Callable[[str], tuple[int, str]]
# Raises ValueError if a model does not know the languages that a user names.
Check = Callable[[Languages], object]
# Raises ValueError if a launch, or the run in a folder, lacks something that the user asks for.
CheckLaunch = Callable[[launches.Launch, str], None]


@contextlib.contextmanager
def to_train(
    model: str | None,
    settings: tuple[str, ...],
    data_dir: str | None,
    logdir: str | pathlib.Path,
    start: Start,
    *,
    check: CheckLaunch,
    trains: bool,
    executables: str | None = None,
) -> Iterator[tuple[Run, str]]:
    """Yields a run, to train or evaluate it, and a description of its devices.

    `settings` are `path=value`. Only a run that `trains` decides what remat=AUTO stands for.

    Raises ValueError if `logdir` cannot be written, if the model or the data is missing and the
    folder holds no run, if `executables` is a folder without any, for a wrong setting, for data of
    another task or vocabulary, or for sizes that do not fit the devices. `check` may raise it, too.
    """
    storage.check_writable(logdir)
    with storage.working(logdir) as folder:
        launch = launches.launch_of(model, settings, data_dir, str(folder))
        if executables is not None:
            executables_folder.check(pathlib.Path(executables))
        check(launch, str(folder))
        num_partitions, devices = start(launch.model)

        # A wrong model or setting has been reported by now, before the slow imports.
        from lingvo_gshard.runs.run import check_processes, open_run
        from lingvo_gshard.spmd import shared_folder

        check_processes(launch)
        shared_folder.check(folder)
        # Everything is checked once more, now against the devices.
        yield open_run(launch, str(folder), num_partitions, executables, trains), devices


@contextlib.contextmanager
def to_decode(
    logdir: str | pathlib.Path,
    start: Start,
    command: str | None = None,
    source_lang: str | None = None,
    settings: Iterable[str] = (),
    check: Check | None = None,
) -> Iterator[Run]:
    """Yields the run in a folder, to decode with it; `settings` change its recorded settings.

    Raises ValueError if the folder holds no run, if the run does not fit the devices, if its lines
    are decoded by another program than `command`, if it was not trained on `source_lang`, if
    `check` refuses its languages, if a setting of the search is out of its range, or if there are
    too few checkpoints.
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

        # A wrong setting is reported before JAX starts.
        launch = launch.changed(settings)
        changed = launches.experiment_params(launch).decode
        if isinstance(changed, SearchParams):
            changed.search().check_vocabulary(launch.facts.target_vocab_size)
        if check is not None:
            source, target = map(loaded, launches.vocabularies(str(folder)))
            check(launches.model_languages(launch, params, source, target))
        launches.check_weights(launch, str(folder))
        num_partitions, _ = start(launch.model)

        # A mistake has been reported by now, before the slow imports.
        from lingvo_gshard.runs.run import check_processes, open_run

        check_processes(launch)
        yield open_run(launch, str(folder), num_partitions)
