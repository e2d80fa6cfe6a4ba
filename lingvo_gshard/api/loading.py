"""`load`: the model of a bundle or of a run."""

import pathlib
from collections.abc import Mapping
from typing import Any

from lingvo_gshard.api.devices import Devices
from lingvo_gshard.api.text_model import TextModel
from lingvo_gshard.core import settings as core_settings
from lingvo_gshard.runs import opening
from xla_spmd.files import storage

# The file that each kind of folder has.
_OF_BUNDLE = "bundle.json"
_OF_RUN = "experiment.json"


def load(
    folder: str | pathlib.Path,
    *,
    settings: Mapping[str, Any] | None = None,
    platform: str = "auto",
    num_partitions: int | None = None,
) -> TextModel:
    """Returns the model of a bundle's folder or a run's, ready to decode lines.

    Args:
      folder: a folder that `gshard export` or `gshard train` wrote.
      settings: changes to a run's settings by dotted path, such as {"decode.beam_size": 1}.
      platform: auto, cpu, cuda or tpu.
      num_partitions: the number of devices that share a run's model; a bundle has its own number.

    Raises ValueError if the folder is not a bundle or a run, if it is damaged, or if settings are
    given for a bundle.
    """
    folder = storage.expanded(folder, "folder")
    changes = core_settings.as_texts(settings)
    devices = Devices(platform, num_partitions)
    path = storage.path(folder)
    with storage.errors(path, "read"):
        is_bundle = (path / _OF_BUNDLE).exists()
        is_run = (path / _OF_RUN).exists()

    if is_bundle:
        return _of_bundle(folder, changes, devices)
    if not is_run:
        raise ValueError(
            f"{folder}: expected a bundle, with {_OF_BUNDLE}, or a run, with {_OF_RUN}; neither is "
            "there."
        )
    return of_run(folder, changes, devices)


def of_run(
    folder: str | pathlib.Path,
    changes: tuple[str, ...],
    devices: Devices,
    command: str | None = None,
    check: opening.Check | None = None,
) -> TextModel:
    """Returns the model of a run; `changes` are settings, `path=value`.

    Raises ValueError if there is no run, if it was never trained, if the devices do not fit it, if
    `command` is not the program for it, or if `check` refuses its languages.
    """
    opened = opening.to_decode(folder, devices.start, command, settings=changes, check=check)
    with opened as run:
        return TextModel(run.text_decoder(), str(folder))


def _of_bundle(folder: str | pathlib.Path, changes: tuple[str, ...], devices: Devices) -> TextModel:
    if changes or devices.num_partitions is not None:
        given = changes[0] if changes else f"num_partitions={devices.num_partitions}"
        raise ValueError(f"{folder} is a bundle, whose programs are fixed: {given} needs a run.")

    # The devices must start before the weights are loaded.
    from lingvo_gshard.decoding import bundle, bundle_spec, kinds

    spec = bundle_spec.load_spec(folder)
    devices.start(spec.model, spec.num_partitions)
    return TextModel(kinds.text_decoder(*bundle.load(folder)), str(folder))
