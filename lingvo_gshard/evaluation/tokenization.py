"""BLEU's tokens, which depend on the target language.

sacreBLEU's 13a splits text at spaces and punctuation. In a script without spaces, a sentence is
therefore one token, and BLEU is 0 even for an almost perfect translation. sacreBLEU has other
tokenizers for Chinese, Japanese and Korean. Other scripts without spaces between words are scored
by characters, and so are Japanese and Korean if MeCab is not installed. The signature of a score
names its tokens.
"""

import collections
import functools
import re
from collections.abc import Iterable

from sacrebleu.metrics import BLEU

_WORDS = "13a"
_CHARACTERS = "char"
# By ISO 15924 codes.
_TOKENIZER_OF_SCRIPT = {
    **dict.fromkeys(("Hanb", "Hani", "Hans", "Hant"), "zh"),
    **dict.fromkeys(("Hira", "Hrkt", "Jpan", "Kana"), "ja-mecab"),
    **dict.fromkeys(("Hang", "Kore"), "ko-mecab"),
    **dict.fromkeys(("Khmr", "Lana", "Laoo", "Mymr", "Thai", "Tibt"), _CHARACTERS),
    **dict.fromkeys(("Bali", "Java", "Tale", "Talu", "Tavt"), _CHARACTERS),
}
_CHINESE = "zh chi cdo cjy cmn cpx czh czo gan hak hsn lzh mnp nan wuu yue zho"
# The scripts of languages, by their ISO 639 codes of two and of three letters.
_SCRIPT_OF_LANGUAGE = {
    **dict.fromkeys(_CHINESE.split(), "Hani"),
    **dict.fromkeys(("ja", "jpn"), "Jpan"),
    **dict.fromkeys(("ko", "kor"), "Kore"),
    **dict.fromkeys(("th", "tha"), "Thai"),
    **dict.fromkeys(("lo", "lao"), "Laoo"),
    **dict.fromkeys(("km", "khm"), "Khmr"),
    **dict.fromkeys("bur ksw mnw my mya rki shn".split(), "Mymr"),
    **dict.fromkeys(("bo", "bod", "dz", "dzo", "tib"), "Tibt"),
    "nod": "Lana",
}
# The packages that sacreBLEU needs for a tokenizer.
EXTRAS = {"ja-mecab": "sacrebleu[ja]", "ko-mecab": "sacrebleu[ko]"}


def of_target(language: str) -> str:
    """Returns sacreBLEU's tokenizer for a language, by its code or its name in a corpus."""
    wanted = wanted_for(language)
    return wanted if _is_installed(wanted) else _CHARACTERS


def wanted_for(language: str) -> str:
    """Returns the best tokenizer for a language, whether it is installed or not."""
    first, *others = re.split("[-_]", language)
    # A script in the code decides how the language is written here: zh-Latn, jpn_Jpan.
    scripts = [subtag.title() for subtag in others if re.fullmatch("[A-Za-z]{4}", subtag)]
    script = scripts[0] if scripts else _SCRIPT_OF_LANGUAGE.get(first.lower(), "")
    return _TOKENIZER_OF_SCRIPT.get(script, _WORDS)


def advice(targets: Iterable[str]) -> list[str]:
    """Returns advice for languages that are scored by characters because a package is missing."""
    codes: dict[str, list[str]] = collections.defaultdict(list)
    for target in targets:
        wanted = wanted_for(target)
        if not _is_installed(wanted):
            codes[EXTRAS[wanted]].append(target)

    return [
        f"BLEU of {', '.join(of_extra)} counts characters; pip install '{extra}' to count words."
        for extra, of_extra in codes.items()
    ]


def of_signature(signature: str) -> str:
    """Returns the tokens that a sacreBLEU signature names; only scores with equal ones compare."""
    match = re.search(r"\btok:([^|]+)", signature)
    return match[1] if match else ""


@functools.cache
def _is_installed(tokenizer: str) -> bool:
    """Returns whether the packages of a tokenizer are installed."""
    if tokenizer not in EXTRAS:
        return True
    try:
        BLEU(tokenize=tokenizer)
    except RuntimeError:  # sacreBLEU advises to install a package.
        return False
    return True
