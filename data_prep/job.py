"""The common data of a build's steps: sources, settings, folders, and the cleaned text."""

import dataclasses
import math
import pathlib
from collections.abc import Sequence

from data_prep import directions, languages
from data_prep.config import BuildConfig
from data_prep.deduplication import Runner
from data_prep.directions import Direction
from data_prep.given_vocabulary import GivenVocabulary
from data_prep.rules import Counts
from data_prep.sources import Source
from data_prep.text_chunks import Chunk
from lingvo_gshard.input.manifest import Kind
from lingvo_gshard.input.normalization import Normalization

SplitKey = tuple[str, str]  # A split, and a language or the code of a direction.


@dataclasses.dataclass(frozen=True)
class Corpus(Counts):
    """The cleaned text: its chunks, and counts by language."""

    # By split and language, in the order of the sources.
    chunks: dict[SplitKey, list[Chunk]] = dataclasses.field(default_factory=dict)

    def num_examples(self, language: str) -> int:
        """Returns the number of a language's examples in all splits."""
        num_examples = 0
        for (_, of_chunks), chunks in self.chunks.items():
            if of_chunks == language:
                num_examples += sum(chunk.num_examples for chunk in chunks)
        return num_examples

    @property
    def train(self) -> dict[str, list[Chunk]]:
        """The chunks of each language's training text."""
        return {
            language: chunks
            for (split, language), chunks in self.chunks.items()
            if split == "train"
        }

    @property
    def held_out(self) -> list[Chunk]:
        """The chunks of every other split."""
        held_out: list[Chunk] = []
        for (split, _), chunks in self.chunks.items():
            if split != "train":
                held_out += chunks
        return held_out


@dataclasses.dataclass(frozen=True)
class Job:
    """The data that all steps of a build share: sources, settings, folders, and the runner.

    An example is a pair or a document, depending on the kind of the data. A document's language is
    its corpus, which has one direction.
    """

    sources: Sequence[Source]
    out_dir: pathlib.Path
    work_dir: pathlib.Path  # Deleted at the end.
    config: BuildConfig
    run: Runner
    given: GivenVocabulary | None = None  # If set, no vocabularies are learned.

    @property
    def kind(self) -> Kind:
        """The kind of the examples."""
        return Kind(self.config.kind)

    @property
    def normalization(self) -> Normalization:
        """The normalization of written training text."""
        return Normalization.NFC if self.given is None else self.given.normalization

    @property
    def given_languages(self) -> GivenVocabulary | None:
        """The given vocabulary of pairs, whose sides begin with its tokens of languages."""
        return self.given if self.kind is Kind.PARALLEL else None

    @property
    def max_pieces(self) -> float:
        """The most pieces of a training example; unlimited for documents, which span rows."""
        return self.config.max_pieces if self.kind is Kind.PARALLEL else math.inf

    def directions_of(self, language: str, corpus: Corpus) -> list[Direction]:
        """Returns the directions of a pair. Only languages with training text are targets."""
        if corpus.num_examples(language) == 0:
            return []
        if language in corpus.train:
            return directions.of(language, self.config.directions, self.given_languages)

        # Other languages are translated only into targets that occur in training.
        targets = set()
        for of_train in corpus.train:
            for direction in directions.of(of_train, self.config.directions, self.given_languages):
                targets.add(direction.target)
        of_language = directions.of(language, self.config.directions, self.given_languages)
        taught = [direction for direction in of_language if direction.target in targets]
        # Without the reverse direction, de-fr would be read as a language: see example_codec.sides.
        if languages.is_without_english(language) and len(taught) < len(of_language):
            return []
        return taught
