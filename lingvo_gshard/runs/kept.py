"""The bundles that `translate --logdir` keeps with a run, so that it starts without TensorFlow.

logdir/translate/STEP-DIGEST    a bundle, as `translate --export` writes it

DIGEST covers the experiment's settings, checkpoints, number of partitions, code and compilers.
"""

import dataclasses
import logging
import pathlib
import re
import shutil

from lingvo_gshard.checkpoints import checkpoints
from lingvo_gshard.files import digests
from lingvo_gshard.input.tokenizer import Tokenizer
from lingvo_gshard.runs.launch import Launch, experiment_params
from lingvo_gshard.spmd import environment, saved_executable
from lingvo_gshard.translation import bundle
from lingvo_gshard.translation.bundle import Decoder


def folder(launch: Launch, logdir: str, num_partitions: int) -> pathlib.Path:
    """Returns where the bundle of a run's newest checkpoint is kept, whether it is there or not."""
    saved = checkpoints.folder(logdir)
    found = {each: saved / f"{each}/about/metadata" for each in checkpoints.whole_steps(logdir)}
    described = {step: path.read_text() if path.exists() else "" for step, path in found.items()}
    versions = environment.versions([*saved_executable.PACKAGES, "tensorflow"])
    digest = digests.of_json(
        experiment_params(launch).ToText(),
        dataclasses.asdict(launch),
        described,
        num_partitions,
        digests.of_library(),
        versions,
    )
    return pathlib.Path(logdir, "translate", f"{max(described, default=0)}-{digest[:16]}")


def load(kept: pathlib.Path) -> tuple[Decoder, Tokenizer, Tokenizer] | None:
    """Returns what bundle.load does; None if there is no bundle or, with a warning, damage."""
    if not kept.is_dir():
        return None
    try:
        return bundle.load(kept)
    except ValueError as error:
        logging.warning("%s It is made again.", error)
        return None


def delete_older(kept: pathlib.Path) -> None:
    """Deletes the bundles of other checkpoints than that of `kept`."""
    step, _, _ = kept.name.partition("-")
    for other in kept.parent.iterdir():
        if re.fullmatch(rf"(?!{step}-)\d+-[0-9a-f]{{16}}(\.\w+)?", other.name):
            shutil.rmtree(other, ignore_errors=True)
