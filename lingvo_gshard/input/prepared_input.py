"""The input from a folder that `gshard prepare` has written; the manifest describes the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from lingvo_gshard.core.hyperparams import REQUIRED, setting
from lingvo_gshard.input import manifest, mixture
from lingvo_gshard.input.base_input import DataFacts, Part
from lingvo_gshard.input.manifest import Kind
from lingvo_gshard.input.prefetched import PrefetchedInput, check_share
from xla_spmd.files import digests
from xla_spmd.files.digests import File


class PreparedInput(PrefetchedInput):
    """Batches from a prepared folder; its languages, or corpora, are parts of each split."""

    KIND: ClassVar[Kind]  # The kind of folders that it reads.

    class Params(PrefetchedInput.Params):
        data_dir: str = setting(REQUIRED, "A folder that `gshard prepare` wrote.")
        languages: tuple[str, ...] | None = setting(
            None, "Names of the parts to read; None reads all."
        )
        hash_records: bool = setting(
            True, "Check the hash of each file of records when a process first reads it."
        )

    p: Params

    @classmethod
    def Nouns(cls) -> tuple[str, str]:
        """Returns the words for a language and an example."""
        return cls.KIND.group, cls.KIND.noun

    @classmethod
    def Manifest(cls, data_dir: str) -> manifest.Manifest:
        """Returns a folder's manifest.

        Raises ValueError if it is missing or damaged, or if the data is of another kind.
        """
        data = manifest.load(data_dir)
        if data.kind != cls.KIND:
            raise ValueError(
                f"{data_dir} holds data of kind {data.kind}, but {cls.__name__} reads kind "
                f"{cls.KIND}: prepare it with gshard prepare --kind={cls.KIND}"
            )
        return data

    @classmethod
    def Facts(cls, data_dir: str) -> DataFacts:
        """Returns the manifest's facts; the languages are the ones with training text."""
        data = cls.Manifest(data_dir)
        codes = [language.code for language in data.languages if language.num_examples("train")]
        return DataFacts(
            source_vocab_size=data.source_vocabulary.size,
            target_vocab_size=data.target_vocabulary.size,
            languages=tuple(codes),
            kind=cls.KIND,
            fingerprint=data.fingerprint,
            language_tokens=data.source_vocabulary.languages,
        )

    @classmethod
    def VocabularyFiles(cls, data_dir: str) -> Sequence[File]:
        """Returns the files of the vocabularies of source and target."""
        return cls.Manifest(data_dir).vocabulary_files

    @classmethod
    def Files(cls, data_dir: str) -> Sequence[File]:
        """Returns every file that the manifest names."""
        return cls.Manifest(data_dir).files()

    @classmethod
    def CheckFiles(cls, p: Params) -> None:
        """Raises ValueError if one process could not read the parts; see `_checked_parts`."""
        check_share(p, num_processes=1)
        cls._checked_parts(p, process_index=0, num_processes=1)

    @classmethod
    def Parts(cls, p: Params) -> Mapping[str, Part]:
        """Returns all languages of the folder, with their examples in the split."""
        parts = {}
        for language in cls.Manifest(p.data_dir).languages:
            settings = p.Copy().Set(languages=(language.code,))
            parts[language.code] = Part(settings, language.num_examples(p.split))
        return parts

    @classmethod
    def _checked_parts(
        cls, p: Params, process_index: int, num_processes: int
    ) -> tuple[manifest.Manifest, Sequence[manifest.Language]]:
        """Returns the folder's manifest, and the parts to read, after checking their files' sizes.

        Raises ValueError if the folder is not a prepared one of this kind or is damaged, or if it
        lacks the split or a part.
        """
        data = cls.Manifest(p.data_dir)
        parts = mixture.languages_of(data, p.split, p.languages)
        digests.verify(p.data_dir, data.vocabulary_files)

        # Each of n processes checks an n-th of the sizes; contents are checked at the first read.
        files: list[File] = []
        for part in parts:
            files += [shard.file for shard in part.records[p.split].shards]
        digests.verify(p.data_dir, files[process_index::num_processes], contents=False)
        return data, parts
