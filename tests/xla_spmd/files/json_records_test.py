import dataclasses
import typing

import pytest

from xla_spmd.files import json_records


@dataclasses.dataclass(frozen=True)
class _Leaf:
    name: str
    size: int = 3


@dataclasses.dataclass(frozen=True)
class _Tree:
    leaves: tuple[_Leaf, ...]
    by_name: dict[str, tuple[_Leaf, ...]]
    note: str | None = None


def test_round_trip():
    leaves = (_Leaf("a"), _Leaf("b", 5))
    tree = _Tree(leaves, {"x": leaves, "y": ()}, "note")
    assert json_records.read(_Tree, dataclasses.asdict(tree)) == tree
    plain = {"leaves": [{"name": "a", "other": 1}], "by_name": {}}
    assert json_records.read(_Tree, plain) == _Tree((_Leaf("a"),), {})
    assert json_records.read(int, 3) == 3


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({"leaves": []}, KeyError),
        ({"leaves": [{"size": 1}], "by_name": {}}, KeyError),
        ({"leaves": 3, "by_name": {}}, TypeError),
        ({"leaves": [3], "by_name": {}}, TypeError),
        ({"leaves": [], "by_name": []}, AttributeError),
        ([], TypeError),
    ],
)
def test_another_structure_is_refused(value, error):
    with pytest.raises(error):
        json_records.read(_Tree, value)


def test_a_type_is_looked_at_once_for_all_its_values(monkeypatch):
    calls, look = [], typing.get_type_hints
    monkeypatch.setattr(typing, "get_type_hints", lambda kind: calls.append(kind) or look(kind))

    @dataclasses.dataclass(frozen=True)
    class Seldom:
        number: int

    found = json_records.read(tuple[Seldom, ...], [{"number": i} for i in range(50)])
    assert found == tuple(map(Seldom, range(50)))
    assert calls == [Seldom]


@pytest.mark.parametrize("text", ['{"a": 1, "a": 1}', '[{"b": {"a": 1, "c": 2, "a": null}}]'])
def test_a_name_that_occurs_twice_is_refused(text):
    for given in (text, text.encode(), text.encode("utf-16")):
        with pytest.raises(ValueError, match="an object has the name 'a' twice"):
            json_records.parse(given)
