"""What makes an experiment's batches, as other rooms see it: they ask an input, never its class.

A new input is a subclass, which an experiment names as `input`. It yields batches, and its position
is saved and restored, as train/loop.Input has it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

from lingvo_gshard.core import hyperparams
from lingvo_gshard.core.hyperparams import REQUIRED, InstantiableParams
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.files.digests import File
from lingvo_gshard.input.manifest import Kind

DATA_DIR = "data_dir"  # The setting of inputs that read a folder: the launch fills it in.


@dataclasses.dataclass(frozen=True)
class DataFacts:
    """What a model must know about its data: vocabulary sizes in pieces, and language codes.

    A size is 0 without such a vocabulary. Text has one vocabulary, of both sizes, and its languages
    are corpora. Different data has different fingerprints; the oldest runs recorded none.
    """

    source_vocab_size: int = 0
    target_vocab_size: int = 0
    languages: tuple[str, ...] = ()
    kind: str | None = Kind.PARALLEL  # None if it is no prepared text.
    fingerprint: str = ""
    # The codes of the languages that the vocabulary has tokens of: see Tokenizer.languages.
    language_tokens: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a split that is evaluated by itself, such as a language."""

    settings: hyperparams.Params  # Of the input that reads this part alone.
    num_examples: int  # In the split; there may be none.


class BaseInput:
    """Batches NestedMap(features, labels) of NumPy arrays, each process its rows of them.

    The class methods are asked before there is an input: of Params, by `params.input.cls`.
    """

    KIND: ClassVar[Kind | None] = None  # Of the prepared folders that it reads, if it reads such.

    @classmethod
    def Params(cls) -> InstantiableParams:
        """Returns the settings that all inputs have; a subclass adds its own."""
        p = InstantiableParams(cls)
        p.Define("batch_size", REQUIRED, "B, rows per batch, over all processes.")
        p.Define("split", "train", "train, dev or test.")
        p.Define("repeat", True, "Endless, or one pass over the split.")
        p.Define("shuffle", True, "Shuffle the examples and the rows.")
        p.Define("seed", 1, "Seed of all that is drawn.")
        return p

    @classmethod
    def Nouns(cls) -> tuple[str, str]:
        """Returns what a part of the data and an example are called."""
        return "part", "example"

    @staticmethod
    def batch_specs(p: hyperparams.Params) -> NestedMap:
        """Returns the TensorSpecs of a batch by the settings alone, without any data."""
        raise NotImplementedError(f"{p.cls.__name__} defines no batch_specs.")

    @classmethod
    def Facts(cls, data_dir: str) -> DataFacts:
        """Returns the facts of the data in a folder; ValueError if this input cannot read it."""
        del data_dir
        return DataFacts(kind=cls.KIND)

    @classmethod
    def VocabularyFiles(cls, data_dir: str) -> Sequence[File]:
        """Returns the vocabularies in a folder that a run keeps copies of."""
        del data_dir
        return ()

    @classmethod
    def Files(cls, data_dir: str) -> Sequence[File]:
        """Returns all files of the data in a folder, with their digests."""
        del data_dir
        return ()

    @classmethod
    def Parts(cls, p: hyperparams.Params) -> Mapping[str, Part]:
        """Returns the parts of the split of settings `p` by name, if it has such parts."""
        del p
        return {}

    @classmethod
    def TooLong(cls, p: hyperparams.Params) -> Mapping[str, float]:
        """Returns the share of each part's examples that no row holds, if there are such."""
        del p
        return {}

    def close(self) -> None:
        """Ends what reads in the background, if anything does."""
