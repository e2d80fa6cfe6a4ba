"""The input of a folder that data_prep.build has prepared: its manifest answers for the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from lingvo_gshard.core import hyperparams
from lingvo_gshard.core.hyperparams import REQUIRED, InstantiableParams
from lingvo_gshard.files import digests
from lingvo_gshard.files.digests import File
from lingvo_gshard.input import manifest, mixture
from lingvo_gshard.input.base_input import DATA_DIR, DataFacts, Part
from lingvo_gshard.input.manifest import Kind
from lingvo_gshard.input.prefetched import PrefetchedInput
from lingvo_gshard.input.records import check_sizes


class PreparedInput(PrefetchedInput):
    """Batches of a prepared folder; its languages, or corpora, are parts of each split."""

    KIND: ClassVar[Kind]  # Of the folders that it reads.

    @classmethod
    def Params(cls) -> InstantiableParams:
        """Returns the input's hyperparameters."""
        p = super().Params()
        p.Define(DATA_DIR, REQUIRED, "A folder that data_prep.build prepared.")
        p.Define("languages", None, "Names of the parts to read; None for all.", optional=tuple)
        p.Define(
            "hash_records",
            True,
            "Check the hash of each file of records when it is first read, by each process.",
        )
        return p

    @classmethod
    def Nouns(cls) -> tuple[str, str]:
        """Returns what a language and an example are called."""
        return cls.KIND.group, cls.KIND.noun

    @classmethod
    def Manifest(cls, data_dir: str) -> manifest.Manifest:
        """Returns a folder's manifest; ValueError if it has none, or holds data of another kind."""
        return manifest.load_kind(data_dir, cls.KIND, cls.__name__)

    @classmethod
    def Facts(cls, data_dir: str) -> DataFacts:
        """Returns the manifest's facts; the languages are those with text to train on."""
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
        """Returns the SentencePiece models of source and target."""
        return cls.Manifest(data_dir).vocabulary_files

    @classmethod
    def Files(cls, data_dir: str) -> Sequence[File]:
        """Returns every file that the manifest names."""
        return cls.Manifest(data_dir).files()

    @classmethod
    def Parts(cls, p: hyperparams.Params) -> Mapping[str, Part]:
        """Returns all languages of the folder, with their examples in the split."""
        parts = {}
        for language in cls.Manifest(p.data_dir).languages:
            settings = p.Copy().Set(languages=(language.code,))
            parts[language.code] = Part(settings, language.num_examples(p.split))
        return parts

    @classmethod
    def _checked_parts(
        cls, p: hyperparams.Params, process_index: int, num_processes: int
    ) -> tuple[manifest.Manifest, Sequence[manifest.Language]]:
        """Returns the folder's manifest, and the parts to read, whose files have the right sizes.

        Raises ValueError if the folder is not a prepared one of this kind or is damaged, or lacks
        the split or a part.
        """
        data = cls.Manifest(p.data_dir)
        parts = mixture.languages_of(data, p.split, p.languages)
        digests.verify(p.data_dir, data.vocabulary_files)

        # Of n processes, each checks an n-th of the sizes; contents, when a file is first read.
        records = [part.records[p.split] for part in parts]
        check_sizes(p.data_dir, records, process_index, num_processes)
        return data, parts
