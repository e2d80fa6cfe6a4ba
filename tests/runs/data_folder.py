"""A data folder with a manifest and two vocabularies of arbitrary bytes."""

import dataclasses

from lingvo_gshard.input import manifest
from xla_spmd.files import digests


def prepare_text(folder, content, launch):
    """Prepares a folder of text in one language, with one vocabulary; see `prepare`."""
    (folder / "vocab").mkdir(parents=True, exist_ok=True)
    (folder / "vocab/text.model").write_bytes(content)
    vocabulary = manifest.Vocabulary(digests.describe(folder, "vocab/text.model"), 8)
    data = manifest.Manifest((), vocabulary, vocabulary, {}, {}, kind="text")
    manifest.save(data, folder)
    return dataclasses.replace(launch, data_dir=str(folder))


def prepare(folder, source, target, launch):
    """Writes the files of a data folder that `record` reads; returns the launch with its path."""
    vocabularies = []
    for name, content in (("source", source), ("target", target)):
        (folder / "vocab").mkdir(parents=True, exist_ok=True)
        (folder / "vocab" / f"{name}.model").write_bytes(content)
        file = digests.describe(folder, f"vocab/{name}.model")
        vocabularies.append(manifest.Vocabulary(file, 8))
    manifest.save(manifest.Manifest((), *vocabularies, {}, {}), folder)
    return dataclasses.replace(launch, data_dir=str(folder))
