"""One table of sources for many files: placeholders in its pattern, the field `path` or `source`,
stand for what differs, here and in other fields. docs/data.md lists them.
"""

import glob
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from data_prep import languages

_MATCHES = {"language": r"[\w-]+", "pair": r"\w+-\w+", "side": r"\w+", "split": "train|dev|test"}


def expand(table: Mapping[str, Any], folder: pathlib.Path) -> list[dict[str, Any]]:
    """Returns a table for each file, or pair of files, that matches the pattern, in their order.

    Raises ValueError if there is none, or a pair is not one with English.
    """
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    field = "path" if "{" in str(table.get("path")) else "source"
    pattern, english = str(table[field]), languages.ENGLISH
    for path, values in _matches(pattern, folder):
        side = values.pop("side", None)
        if "pair" in values:
            sides = sorted(values["pair"].split("-"), key=languages.is_english)
            if list(map(languages.is_english, sides)) != [False, True]:
                raise ValueError(f"{path}: expected a pair with English, got {values['pair']}")
            values["language"], english = sides
        if languages.is_english(values.get("language", "")):
            continue
        filled = {name: _filled(value, values) for name, value in table.items() if name != field}
        made = filled | {name: values[name] for name in ("language", "split") if name in values}
        if side is None:
            found[path,] = made | {field: glob.escape(path) if field == "path" else path}
            continue
        for name, tag in {"source": made.get("language", side), "english": english}.items():
            made[name] = _filled(pattern, values | {"side": tag})
        found[tuple(values.values())] = made
    if not found:
        raise ValueError(f"sources: no file in {folder} matches path {pattern!r}")
    return list(found.values())


def _filled(value: Any, values: Mapping[str, str]) -> Any:
    for name, text in values.items() if isinstance(value, str) else ():
        value = value.replace(f"{{{name}}}", text)
    return value


def _matches(pattern: str, folder: pathlib.Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields the files that match a pattern, and what each placeholder stands for."""
    expression = re.escape(pattern).replace(r"\*", "[^/]*").replace(r"\?", "[^/]")
    for part in dict.fromkeys(re.findall(r"\{\w+\}", pattern)):
        name, escaped = part[1:-1], re.escape(part)
        if name not in _MATCHES:
            raise ValueError(f"path {pattern!r}: {part} is none of {', '.join(sorted(_MATCHES))}")
        expression = expression.replace(escaped, f"(?P<{name}>{_MATCHES[name]})", 1)
        expression = expression.replace(escaped, f"(?P={name})")
    for path in sorted(glob.glob(re.sub(r"\{\w+\}", "*", pattern), root_dir=folder)):
        if match := re.fullmatch(expression, path):
            yield path, match.groupdict()
