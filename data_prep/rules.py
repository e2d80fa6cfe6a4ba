"""The rules that drop rows of the sources. All other rows are kept.

So for each language, the rows read are the rows kept plus the rows dropped by each rule.
"""

import collections
import dataclasses
import enum


class Rule(enum.StrEnum):
    """The reasons for dropping an example, under the names by which the manifest counts them.

    The first rule that a row breaks counts. Rules marked "Pairs" apply only to pairs.
    """

    # Rules of reading, applied by the source itself.
    UNKNOWN_LANGUAGE = "unknown_language"  # Pairs: the source's name of a language is not a code.
    UNPAIRED = "unpaired"  # Pairs: text without English beside it, or only English.
    UNTRANSLATED = "untranslated"  # Pairs: a message without a translation.
    FUZZY = "fuzzy"  # Pairs: a message whose translation nobody has checked.
    OBSOLETE = "obsolete"  # Pairs: a message that its program does not use any longer.
    MALFORMED = "malformed"  # The line is not a pair or document.
    LOW_SCORE = "low_score"  # The source gives the pair a score below the threshold.

    # Rules for the text of a single example.
    UNDECODABLE = "undecodable"  # A replacement character: the text was damaged before.
    EMPTY = "empty"  # Nothing of a side is left.
    TOO_LONG = "too_long"  # Pairs: a side has too many characters.
    RATIO = "ratio"  # Pairs: one side is many times longer than the other.
    IDENTICAL = "identical"  # Pairs: the source equals the English.
    REPEATED = "repeated"  # One character is repeated many times, for example in a ruler.
    WRONG_SCRIPT = "wrong_script"  # A side is mostly in scripts that are not its language's.
    WRONG_LANGUAGE = "wrong_language"  # If checked: a side is surely in another language.

    # Rules that need the whole corpus or the vocabularies.
    HELD_OUT = "held_out"  # The English, or the source, or the document is also in dev or test.
    DUPLICATE = "duplicate"  # The same example occurs earlier in this language or corpus.
    NO_TARGET = "no_target"  # Pairs: their target language lacks training text.
    TOO_MANY_PIECES = "too_many_pieces"  # Pairs: a side has too many pieces of its vocabulary.


Dropped = collections.Counter[tuple[str, Rule]]  # The number of examples by language and rule.


@dataclasses.dataclass(frozen=True)
class Counts:
    """The numbers of rows that were read, and of examples, by language."""

    read: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    dropped: Dropped = dataclasses.field(default_factory=collections.Counter)
    # Training examples that were repaired, that have HTML entities or a tokenizer's marks, and that
    # were probably decoded wrongly (mojibake.py).
    repaired: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    escaped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    mojibake: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def add(self, other: "Counts") -> None:
        """Adds the counts of another part of the text."""
        for field in dataclasses.fields(Counts):
            getattr(self, field.name).update(getattr(other, field.name))
