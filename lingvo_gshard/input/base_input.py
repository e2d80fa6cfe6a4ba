"""The interface to an experiment's batches: other rooms ask an input, never its concrete class.

A new input is a subclass, which an experiment names as `input`. It yields batches, and its position
is saved and restored; see train/loop.Input.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

from lingvo_gshard.core.configured import Configured
from lingvo_gshard.core.hyperparams import REQUIRED, AnyParams, setting
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.input.manifest import Kind
from xla_spmd.files.digests import File

DATA_DIR = "data_dir"  # The setting of an input that reads a folder; the launch fills it in.


@dataclasses.dataclass(frozen=True)
class DataFacts:
    """The facts that a model needs about its data: vocabulary sizes in pieces, and language codes.

    A size is 0 if there is no such vocabulary. Text data has one vocabulary, so both sizes are
    equal, and its languages are corpora. Different data has different fingerprints; the oldest runs
    recorded none.
    """

    source_vocab_size: int = 0
    target_vocab_size: int = 0
    languages: tuple[str, ...] = ()
    kind: str | None = Kind.PARALLEL  # None if the data is not prepared text.
    fingerprint: str = ""
    # The languages with tokens in the vocabulary, by their codes: see Tokenizer.languages.
    language_tokens: tuple[str, ...] = ()
    # The ids that an imported model has for padding, BOS and EOS, which here are 0, 1 and 2.
    imported_ids: tuple[int, ...] = ()

    def vocabulary_sizes(self, names: Sequence[str]) -> dict[str, int]:
        """Returns the sizes by names of vocabularies, of which a single one is the targets'."""
        sizes = (self.source_vocab_size, self.target_vocab_size)
        return dict(zip(names, sizes[-len(names) :], strict=False))


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a split, such as a language, that is evaluated by itself."""

    settings: BaseInput.Params  # The settings of an input that reads only this part.
    num_examples: int  # The number of its examples in the split; may be 0.


class BaseInput(Configured):
    """Batches NestedMap(features, labels) of NumPy arrays; each process gets its share of the rows.

    The class methods work before there is an input: on Params, through `params.input.cls`.
    """

    KIND: ClassVar[Kind | None] = None  # The kind of prepared folders that it reads, if any.

    class Params(Configured.Params):
        """The settings of all inputs; a subclass adds its own."""

        batch_size: int = setting(REQUIRED, "B, rows per batch, over all processes.")
        split: str = setting("train", "train, dev or test.")
        repeat: bool = setting(True, "Whether the stream is endless, or one pass over the split.")
        shuffle: bool = setting(True, "Shuffle the examples and the rows.")
        seed: int = setting(1, "The seed of all random choices.")

    p: Params

    @classmethod
    def Nouns(cls) -> tuple[str, str]:
        """Returns the words for a part of the data and for an example."""
        return "part", "example"

    @staticmethod
    def batch_specs(p: AnyParams) -> NestedMap:
        """Returns the TensorSpecs of a batch, from the settings alone, without any data."""
        raise NotImplementedError(f"{p.cls.__name__} defines no batch_specs.")

    @classmethod
    def Facts(cls, data_dir: str) -> DataFacts:
        """Returns the facts of the data in a folder.

        Raises ValueError if this input cannot read the folder.
        """
        return DataFacts(kind=cls.KIND)

    @classmethod
    def VocabularyFiles(cls, data_dir: str) -> Sequence[File]:
        """Returns the vocabularies in a folder; a run keeps copies of them."""
        return ()

    @classmethod
    def Files(cls, data_dir: str) -> Sequence[File]:
        """Returns all files of the data in a folder, with their digests."""
        return ()

    @classmethod
    def CheckFiles(cls, p: AnyParams) -> None:
        """Raises ValueError if a file that settings `p` need is missing or has another size."""

    @classmethod
    def Parts(cls, p: AnyParams) -> Mapping[str, Part]:
        """Returns the parts of the split in settings `p` by name; empty if it is not divided."""
        return {}

    @classmethod
    def TooLong(cls, p: AnyParams) -> Mapping[str, float]:
        """Returns the share of each part's examples that are too long for a row, if any can be."""
        return {}

    def close(self) -> None:
        """Ends reading in the background."""
