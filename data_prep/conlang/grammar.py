"""What a grammar fixes: the order of words and how each category is marked."""

import dataclasses
import enum


class Attach(enum.Enum):
    """Where a marker stands: on the word, or as a word of its own around the phrase."""

    NONE = "none"
    PREFIX = "prefix"
    SUFFIX = "suffix"
    BEFORE = "before"
    AFTER = "after"


class Side(enum.Enum):
    """The side of its head on which a part stands."""

    BEFORE = "before"
    AFTER = "after"


class Order(enum.Enum):
    """The order of subject, object and verb."""

    SVO = "SVO"
    SOV = "SOV"
    VSO = "VSO"
    OVS = "OVS"


@dataclasses.dataclass(frozen=True)
class Marker:
    """A category's marker; `form` in sounds, "" with Attach.NONE."""

    attach: Attach
    form: str = ""

    @property
    def is_affix(self) -> bool:
        """Whether it is part of the word."""
        return self.attach in (Attach.PREFIX, Attach.SUFFIX)


UNMARKED = Marker(Attach.NONE)


@dataclasses.dataclass(frozen=True)
class Syntax:
    """The order of words.

    Attributes:
        adjective, genitive, determiner, manner: their side of the noun or of the verb.
        time: before or after the rest of the clause.
        subordinate: the side of the main clause on which a "that" or "because" clause stands.
        prefers_singular: a noun after a numeral or "many" is not marked as plural.
        adjective_agrees: adjectives take the noun's plural affix.
    """

    order: Order
    adjective: Side
    genitive: Side
    determiner: Side
    manner: Side
    time: Side
    subordinate: Side
    prefers_singular: bool = False
    adjective_agrees: bool = False


@dataclasses.dataclass(frozen=True)
class Morphology:
    """How categories are attached; the forms come from the family (see languages.py).

    `adposition` with BEFORE or AFTER is a word around the noun phrase, with SUFFIX a case.
    `agreement` is of the verb with its subject. An unmarked definite needs a marked indefinite.
    """

    plural: Attach
    accusative: Attach
    genitive: Attach
    adposition: Attach
    attributive: Attach
    definite: Attach
    indefinite: Attach
    present: Attach
    past: Attach
    future: Attach
    agreement: Attach
    negation: Attach
    question: Attach

    def __post_init__(self) -> None:
        if self.definite is Attach.NONE and self.indefinite is Attach.NONE:
            raise ValueError("Morphology: definite and indefinite are both unmarked")


# The categories whose forms a family gives, besides adpositions and agreement.
MARKED_CATEGORIES = tuple(
    field.name
    for field in dataclasses.fields(Morphology)
    if field.name not in ("adposition", "agreement")
)
