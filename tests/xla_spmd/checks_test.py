import functools
import re

import pytest

from xla_spmd import checks


def test_a_value_of_another_type_is_refused_in_one_line():
    checks.check_type("lines", ["a"], list, "a list")
    with pytest.raises(ValueError, match=r"^lines: expected a list, got str 'a\\nb'\.$"):
        checks.check_type("lines", "a\nb", list, "a list")


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        (print, "hooks: expected a list of hooks, got builtin_function"),
        ("a", "hooks: expected a list of hooks, got str 'a'."),
        ([3, 4, "a", print], "hooks[2]: expected int, got str 'a'."),
    ],
)
def test_each_value_of_a_list_has_the_type(hooks, message):
    checks.check_each("hooks", ["a"], str, "a list of hooks")
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        checks.check_each("hooks", hooks, int, "a list of hooks")


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "1 or more"),
        (-1, "1 or more"),
        (2.0, "a whole number, 1 or more"),
        ("2", "a whole number, 1 or more"),
        (None, "a whole number, 1 or more"),
        (True, "a whole number, 1 or more"),
    ],
)
def test_a_count_is_a_whole_number(count, expected):
    checks.check_count("rows", 1)
    with pytest.raises(ValueError, match=f"^rows must be {expected}, got {count!r}.$"):
        checks.check_count("rows", count)


def test_a_function_takes_the_arguments_that_it_will_get():
    checks.check_takes("fn", functools.partial(lambda a, b, c: None, 1), ("state", "batch"))
    checks.check_takes("fn", lambda *args: None, ("state", "batch"))
    checks.check_takes("fn", print, ("state",))
    expected = r"^fn: expected a function of \(state, batch\)"
    with pytest.raises(ValueError, match=expected + ": too many positional arguments"):
        checks.check_takes("fn", lambda batch: None, ("state", "batch"))
    with pytest.raises(ValueError, match=expected + ": missing a required argument: 'params'"):
        checks.check_takes("fn", lambda state, batch, params: None, ("state", "batch"))
    with pytest.raises(ValueError, match=expected + ", got NoneType"):
        checks.check_takes("fn", None, ("state", "batch"))
