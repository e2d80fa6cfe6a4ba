"""The rules by which rows of the sources are dropped. What no rule names is kept.

So of each language, the rows that are read are those that are kept and those dropped by each rule.
"""

import collections
import enum


class Rule(enum.StrEnum):
    """Why an example is dropped; the manifest counts them under these names.

    A row breaks the first of them that applies. Rules of pairs alone are marked so.
    """

    # Of reading, by the source itself.
    UNKNOWN_LANGUAGE = "unknown_language"  # Pairs: the source's name of its language is no code.
    UNPAIRED = "unpaired"  # Pairs: text without English beside it, or English alone.
    UNTRANSLATED = "untranslated"  # Pairs: a message without a translation.
    FUZZY = "fuzzy"  # Pairs: a message whose translation nobody has checked.
    OBSOLETE = "obsolete"  # Pairs: a message that its program has no more.
    MALFORMED = "malformed"  # The line holds no pair or document.
    LOW_SCORE = "low_score"  # The source gives the pair a score below the threshold.

    # Of the text by itself.
    UNDECODABLE = "undecodable"  # A replacement character: the text was damaged before.
    EMPTY = "empty"  # Nothing is left of a side.
    TOO_LONG = "too_long"  # Pairs: a side has too many characters.
    RATIO = "ratio"  # Pairs: one side is many times longer than the other.
    IDENTICAL = "identical"  # Pairs: the source equals the English.
    REPEATED = "repeated"  # One character is repeated many times, as in a ruler.
    WRONG_SCRIPT = "wrong_script"  # A side is mostly in scripts that are not its language's.
    WRONG_LANGUAGE = "wrong_language"  # A side is surely in another language, if that is checked.

    # Of the whole corpus, and of the vocabularies.
    HELD_OUT = "held_out"  # The English, or the source, or the document is also in dev or test.
    DUPLICATE = "duplicate"  # The same example occurs earlier in this language or corpus.
    NO_TARGET = "no_target"  # Pairs: the language that they lead into has no training text.
    TOO_MANY_PIECES = "too_many_pieces"  # Pairs: a side has too many pieces of its vocabulary.


Dropped = collections.Counter[tuple[str, Rule]]  # Numbers of examples by language and rule.
