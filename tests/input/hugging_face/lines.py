"""A thousand lines of made-up words in twenty scripts, with oddities that are hard to tokenize."""

import unicodedata

import numpy as np

# The first and last character of each script's letters and marks.
SCRIPTS = {
    "Latin": (0x0061, 0x017F),
    "Greek": (0x0391, 0x03CE),
    "Cyrillic": (0x0410, 0x044F),
    "Armenian": (0x0561, 0x0586),
    "Hebrew": (0x05D0, 0x05EA),
    "Arabic": (0x0620, 0x0652),
    "Devanagari": (0x0905, 0x094D),
    "Bengali": (0x0985, 0x09CD),
    "Gurmukhi": (0x0A05, 0x0A4D),
    "Gujarati": (0x0A85, 0x0ACD),
    "Tamil": (0x0B85, 0x0BCD),
    "Telugu": (0x0C05, 0x0C4D),
    "Thai": (0x0E01, 0x0E3A),
    "Tibetan": (0x0F40, 0x0F6C),
    "Georgian": (0x10D0, 0x10F0),
    "Ethiopic": (0x1200, 0x1248),
    "Khmer": (0x1780, 0x17B5),
    "Kana": (0x3041, 0x30FA),
    "Han": (0x4E00, 0x4E60),
    "Hangul": (0xAC00, 0xAC60),
}
LINES_OF_SCRIPT = 50
# White space, marks apart from their letters, compatibility forms, controls, and rare characters.
_ODDITIES = (
    "  ",
    "\u00a0",
    "\u3000",
    " e\u0301 ",
    "\ufb01",
    "\u2460",
    "\uff21\uff22",
    "\u00bd",
    "\u200b",
    "\u200d",
    "\u00ad",
    "\u2026",
    "\u2581",
    " \u2603\u2603 ",
    "\U0001f600",
    "\u0130",
    "2026",
    "3.14",
    ", ",
    "!? ",
    "<x>",
    "A_b@c",
)


def lines() -> list[str]:
    """Returns the lines, sorted by script."""
    rng = np.random.default_rng(20)
    lines: list[str] = []
    for first, last in SCRIPTS.values():
        letters = [
            chr(code)
            for code in range(first, last + 1)
            if unicodedata.category(chr(code))[0] in "LM"
        ]
        words = [_word(rng, letters) for _ in range(60)]
        lines += [_line(rng, words) for _ in range(LINES_OF_SCRIPT)]
    return lines


def _word(rng: np.random.Generator, letters: list[str]) -> str:
    return "".join(letters[i] for i in rng.integers(0, len(letters), rng.integers(1, 7)))


def _line(rng: np.random.Generator, words: list[str]) -> str:
    """Returns some words, the earlier ones more often, and perhaps an oddity."""
    ranks = np.minimum(rng.geometric(0.08, rng.integers(2, 9)) - 1, len(words) - 1)
    chosen = [words[rank] for rank in ranks]
    if rng.random() < 0.5:
        place = int(rng.integers(0, len(chosen) + 1))
        chosen.insert(place, _ODDITIES[rng.integers(0, len(_ODDITIES))])
    separator = "" if rng.random() < 0.2 else " "
    return separator.join(chosen)
