"""One table of sources for many files.

Placeholders in its pattern, the field `path` or `source`, represent the differences between the
files, and may also occur in other fields. docs/data.md lists them.
"""

import glob
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from absl import logging

from data_prep import characters, languages

_TOLD_FILES = 10  # The most files that a warning names.
_PLACEHOLDER = re.compile(r"\{\w+\}")
# The text that each placeholder may match.
_EXPRESSIONS = {
    "language": f"[{characters.NAME}]+",
    "corpus": f"[{characters.NAME}]+",
    "pair": f"[{characters.WORD}]+-[{characters.WORD}]+",
    "side": f"[{characters.WORD}]+",
    "split": "train|dev|test",
}


def expand(table: Mapping[str, Any], folder: pathlib.Path) -> list[dict[str, Any]]:
    """Returns a table for each file, or pair of files, that matches the pattern, in order.

    Raises ValueError if nothing matches, or if both sides of a pair are the same language.
    """
    field = "path" if "{" in str(table.get("path")) else "source"
    pattern = str(table[field])
    others = {name: value for name, value in table.items() if name != field}

    # The two files of a pair match with different sides, and become one table.
    expanded: dict[tuple[str, ...], dict[str, Any]] = {}
    for path, values in _matches(pattern, folder):
        side = values.pop("side", None)
        target_tag = table.get("target_language", languages.ENGLISH)
        if "pair" in values:
            values["language"], target_tag = _sides(path, values["pair"])
        elif _are_one(values.get("language", ""), target_tag):
            continue  # English, for example, is never the source.

        filled_in = {name: _filled(value, values) for name, value in others.items()}
        for name in ("language", "corpus", "split"):
            if name in values:
                filled_in[name] = values[name]

        if not languages.is_english(target_tag):
            filled_in["target_language"] = target_tag

        if side is None:
            filled_in[field] = path
            expanded[path,] = filled_in
        else:
            source_tag = filled_in.get("language", side)
            filled_in["source"] = _filled(pattern, values | {"side": source_tag})
            filled_in["english"] = _filled(pattern, values | {"side": target_tag})
            expanded[tuple(values.values())] = filled_in

    if not expanded:
        raise ValueError(f"sources: no file in {folder} matches path {pattern!r}")
    return list(expanded.values())


def _sides(path: str, pair: str) -> tuple[str, str]:
    """Returns a pair's two tags, English last. Raises ValueError if they are the same language."""
    first, second = pair.split("-")
    if _are_one(first, second):
        raise ValueError(f"{path}: expected a pair of two languages, got {pair}")
    return (second, first) if languages.is_english(first) else (first, second)


def _are_one(tag: str, other: str) -> bool:
    """Returns whether two tags are equal, or both mean English."""
    return tag == other or (languages.is_english(tag) and languages.is_english(other))


def _filled(value: Any, values: Mapping[str, str]) -> Any:
    """Returns a field's value with its placeholders replaced, if it is text."""
    if not isinstance(value, str):
        return value
    for name, text in values.items():
        value = value.replace(f"{{{name}}}", text)
    return value


def _matches(pattern: str, folder: pathlib.Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields the files that match a pattern, and the text of each placeholder."""
    expression = _expression(pattern)
    wildcards = _PLACEHOLDER.sub("*", pattern)
    unread: list[str] = []
    for path in matching(wildcards, folder):
        match = re.fullmatch(expression, path)
        if match is None:
            unread.append(path)
        else:
            yield path, match.groupdict()

    # For example, a split with an unknown name.
    if unread:
        names = ", ".join(unread[:_TOLD_FILES])
        logging.warning(
            "path %r: %d files in %s are not read: %s", pattern, len(unread), folder, names
        )


def matching(wildcards: str, folder: pathlib.Path) -> list[str]:
    """Returns the paths that match a pattern of `*`, `?` and `**`, in a folder or absolute.

    A `[` stands for itself, since it occurs in the names of folders.
    """
    literal = wildcards.replace("[", "[[]")
    return sorted(glob.glob(literal, root_dir=folder, recursive=True))


def _expression(pattern: str) -> str:
    """Returns a regular expression with a group for each placeholder of a pattern."""
    expression = re.escape(pattern).replace(r"\*", "[^/]*").replace(r"\?", "[^/]")
    for placeholder in dict.fromkeys(_PLACEHOLDER.findall(pattern)):
        name = placeholder[1:-1]
        if name not in _EXPRESSIONS:
            known = ", ".join(sorted(_EXPRESSIONS))
            raise ValueError(f"path {pattern!r}: {placeholder} is not one of {known}")

        # The first occurrence is a group; later ones must match the same text.
        escaped = re.escape(placeholder)
        expression = expression.replace(escaped, f"(?P<{name}>{_EXPRESSIONS[name]})", 1)
        expression = expression.replace(escaped, f"(?P={name})")
    return expression
