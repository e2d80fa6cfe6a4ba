"""The needs of a TensorFlow SavedModel, which are checked before JAX is imported."""

import importlib.util
import pathlib

from lingvo_gshard.decoding.languages import Languages
from lingvo_gshard.input.manifest import Kind
from xla_spmd.files import atomic_file, storage

# The files and folders in a SavedModel's folder.
_ENTRIES = {"saved_model.pb", "fingerprint.pb", "variables", "assets", "assets.extra"}


def check_installed() -> None:
    """Raises ValueError without tensorflow-text."""
    if importlib.util.find_spec("tensorflow_text") is None:
        raise ValueError(
            "--export_saved_model needs tensorflow-text, which is not installed; "
            "`pip install 'lingvo_gshard[saved-model]'` installs it."
        )


def check_folder(folder: str | pathlib.Path) -> None:
    """Raises ValueError for a folder with other files, or one that TensorFlow could not load."""
    path = storage.absolute(folder)
    wildcards = sorted(set("*?[\\").intersection(path))
    if wildcards:
        raise ValueError(
            f"--export_saved_model={folder}: TensorFlow takes {' and '.join(wildcards)} in {path} "
            "for a pattern, and could not load it; choose another folder."
        )
    atomic_file.check_holds_only(folder, _ENTRIES, "a SavedModel")


def check_languages(known: Languages) -> None:
    """Raises ValueError for a model that does not translate, or has tokens of languages."""
    if known.kind != Kind.PARALLEL:
        raise ValueError(
            "--export_saved_model: the model does not translate, and only models that do can be "
            "SavedModels; export a bundle."
        )
    if known.sources:
        raise ValueError(
            "--export_saved_model: the model's vocabulary has tokens of languages, which "
            "SavedModels do not support; export a bundle."
        )
