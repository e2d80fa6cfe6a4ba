"""Users' labels for names, by regular expressions: `weights=^params`.

They are checked before JAX is imported.
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence

_LETTER = re.compile(r"[A-Za-z]\w*|_")


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A label, and the regular expression of the names that have it."""

    label: str
    expression: re.Pattern[str]

    def __str__(self) -> str:
        return f"{self.label}={self.expression.pattern}"


def parse(what: str, texts: Sequence[str]) -> tuple[Pattern, ...]:
    """Returns the patterns of texts `LABEL=REGEX`; several may share a label.

    Raises ValueError, prefixed by `what`, for a text of a different form.
    """
    patterns = []
    for text in texts:
        label, equals, expression = text.partition("=")
        if not (label and equals and expression):
            raise ValueError(f"{what}={text}: expected LABEL=REGEX, such as weights=^params.")
        try:
            patterns.append(Pattern(label, re.compile(expression)))
        except re.error as error:
            raise ValueError(f"{what}={text}: not a regular expression ({error}).") from error
    return tuple(patterns)


def parse_letters(text: str) -> tuple[re.Pattern[str], tuple[str, ...]]:
    """Returns the expression and the letters of a text `REGEX=LETTERS` of --letters.

    Raises ValueError for a text of a different form.
    """
    # The last `=` separates them: an expression may contain `=`, and letters do not.
    expression, _, words = text.rpartition("=")
    letters = tuple(words.split())
    if not expression or not letters or not all(map(_LETTER.fullmatch, letters)):
        raise ValueError(
            f"--letters={text}: expected REGEX=LETTERS, with a letter or word for each dim and _ "
            "for one that is never split, such as '.*mlp/wi=M H'."
        )
    try:
        return re.compile(expression), letters
    except re.error as error:
        raise ValueError(f"--letters={text}: not a regular expression ({error}).") from error


def assign(what: str, patterns: Sequence[Pattern], names: Iterable[str]) -> dict[str, str]:
    """Returns the label of each name that a pattern matches.

    Raises ValueError, prefixed by `what`, if a pattern matches no name, or if patterns of two
    labels match the same name.
    """
    labels: dict[str, str] = {}
    unused = dict.fromkeys(patterns)
    names = tuple(dict.fromkeys(names))
    for name in names:
        matching = [pattern for pattern in patterns if pattern.expression.search(name)]
        for pattern in matching:
            unused.pop(pattern, None)
        if len({pattern.label for pattern in matching}) > 1:
            raise ValueError(
                f"{what}: {name!r} has two labels, by {matching[0]} and {matching[1]}."
            )
        if matching:
            labels[name] = matching[0].label

    if unused:
        examples = ", ".join(names[:3]) or "none"
        raise ValueError(
            f"{what}={next(iter(unused))}: found in none of {len(names)} names, such as {examples}."
        )
    return labels
