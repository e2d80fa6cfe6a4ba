"""The fields of a JSON object that another program wrote, with a record of the ones we read."""

import pathlib
import reprlib
import sys
from collections.abc import Collection, Mapping
from typing import Any

from lingvo_gshard.files import git_lfs
from xla_spmd.files import json_records

MAX_BYTES = 256 * 2**20
_SOME = 3  # The most names that a message lists.


class Fields:
    """The fields of an object in a file. `unread` lists the fields that were never requested."""

    def __init__(self, path: pathlib.Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self._values = dict(values)
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        """Returns whether there is such a field; this does not count as reading it."""
        return name in self._values

    def __bool__(self) -> bool:
        """Returns whether there are any fields."""
        return bool(self._values)

    @property
    def values(self) -> dict[str, Any]:
        """A copy of all fields; this does not count as reading them."""
        return dict(self._values)

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a field's value, or `default` if the field is missing."""
        self._read.add(name)
        return self._values.get(name, default)

    def unread(self) -> list[str]:
        """Returns the names of all fields that were never requested, sorted."""
        return sorted(self._values.keys() - self._read)


def read(path: pathlib.Path, max_bytes: int = MAX_BYTES) -> Fields:
    """Returns the fields of the JSON object in a file; no fields if the file does not exist.

    Raises ValueError if the file is larger than `max_bytes`, is a git-lfs pointer, or is not a JSON
    object.
    """
    if not path.is_file():
        return Fields(path, {})
    git_lfs.check(path)
    try:
        num_bytes = path.stat().st_size
        if num_bytes > max_bytes:
            raise ValueError(f"it has {num_bytes} bytes")
        values = json_records.parse(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a JSON object.")
    return Fields(path, values)


def not_used(fields: Fields) -> list[str]:
    """Returns a line that names a file's unread fields; no lines if all were read."""
    names = fields.unread()
    if not names:
        return []
    return [f"{fields.path.name}: {', '.join(map(shown, names))}"]


def refused(fields: Fields, name: str, expected: str) -> ValueError:
    """Returns the error for a field's value."""
    value = reprlib.repr(fields.get(name))
    return ValueError(f"{fields.path}: {name} is {value}; expected {expected}.")


def is_number(value: Any) -> bool:
    """Returns whether a value is a number that a float can hold; an int in JSON has any size."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # Not NaN.


def some(names: Collection[str]) -> str:
    """Returns the first few names as a message shows them, and the number of the others."""
    listed = sorted(names)
    first = ", ".join(map(shown, listed[:_SOME]))
    return first if len(listed) <= _SOME else f"{first} and {len(listed) - _SOME} more"


def shown(name: str) -> str:
    """Returns a name as a message shows it: on one line, whatever characters it has."""
    return name if name.isprintable() else repr(name)
