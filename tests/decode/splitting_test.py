"""Long text in parts: nothing is lost, every part fits, sentences stay whole where they can."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lingvo_gshard.decode.splitting import split


def _of_words(most):
    return lambda text: len(text.split()) <= most


def test_text_that_fits_is_one_part():
    assert split("  one two three ", _of_words(3)) == ["one two three"]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("One two. Three four five. Six", ["One two.", "Three four five.", "Six"]),
        ("one two three, four five six", ["one two three,", "four five six"]),
        ("one two three four", ["one two", "three four"]),
        ('He said "stop!" and they all went', ['He said "stop!"', "and they all went"]),
    ],
)
def test_it_is_cut_at_the_best_place_near_the_middle(text, want):
    assert split(text, _of_words(4 if "said" in text else 3)) == want


def test_scripts_without_spaces():
    text = "我们去公园。他们在家里等我们回来。天气很好"
    assert split(text, lambda part: len(part) <= 12) == [
        "我们去公园。",
        "他们在家里等我们回来。",
        "天气很好",
    ]


def test_a_word_that_does_not_fit_is_cut():
    assert split("abcdefgh", lambda part: len(part) <= 3) == ["ab", "cd", "ef", "gh"]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(alphabet="ab.!? ,。\u3000é", min_size=1, max_size=80), st.integers(0, 9))
def test_nothing_but_space_is_lost_and_every_part_fits(text, most):
    def fits(part):
        return len(part) <= most

    parts = split(text, fits)
    assert "".join("".join(parts).split()) == "".join(text.split())
    assert all(fits(part) or len(part) <= 1 for part in parts)
