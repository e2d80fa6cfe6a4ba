"""Is a sentence in the language it is said to be in? py3langid and the model in its package."""

import functools

from py3langid.langid import MODEL_FILE, LanguageIdentifier

from data_prep import languages
from data_prep.tsv import Pair

# Shorter sentences, and closer decisions, prove nothing.
_MIN_CHARS = 20
_MIN_PROBABILITY = 0.95


def is_surely_another(pair: Pair, language: str) -> bool:
    """Whether a side is surely not in its language; False for languages that the model lacks."""
    sides = ((pair.source, language), (pair.english, languages.ENGLISH))
    return any(_is_foreign(text, languages.primary(code)) for text, code in sides)


def _is_foreign(text: str, code: str) -> bool:
    if len(text) < _MIN_CHARS or code not in _identifier().labels:
        return False
    found, probability = _identifier().classify(text)
    return found != code and probability >= _MIN_PROBABILITY


@functools.lru_cache(maxsize=1)
def _identifier() -> LanguageIdentifier:
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
