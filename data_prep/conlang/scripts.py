"""Scripts: sounds to letters. Each is one-to-one on the words that lexicon.py lets through."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Script:
    """A way to write.

    Attributes:
        letters: what each sound is written as.
        vowel_signs: in an abugida, a vowel after a consonant; a consonant has an "a" of its own.
        virama: in an abugida, the sign of a consonant without a vowel.
        has_case: whether a sentence starts with a capital.
        full_stop, question_mark: the final marks.
    """

    letters: dict[str, str]
    vowel_signs: dict[str, str] = dataclasses.field(default_factory=dict)
    virama: str = ""
    has_case: bool = False
    full_stop: str = "."
    question_mark: str = "?"

    def write(self, sounds: str) -> str:
        """Returns a word in letters. Raises KeyError for a sound that the script lacks."""
        if not self.virama:
            return "".join(self.letters[sound] for sound in sounds)
        text = []
        for position, sound in enumerate(sounds):
            after_consonant = position > 0 and sounds[position - 1] not in self.vowel_signs
            if sound not in self.vowel_signs:
                text.append((self.virama if after_consonant else "") + self.letters[sound])
            else:
                text.append(self.vowel_signs[sound] if after_consonant else self.letters[sound])
        if sounds[-1] not in self.vowel_signs:
            text.append(self.virama)
        return "".join(text)

    def sentence(self, words: list[str], is_question: bool) -> str:
        """Joins written words."""
        text = " ".join(words) + (self.question_mark if is_question else self.full_stop)
        return text[0].upper() + text[1:] if self.has_case else text


_SOUNDS = tuple("aeioupbtdkgmnszSZCNXlrhwyfv")


def _script(letters: str, **options) -> Script:
    return Script(dict(zip(_SOUNDS, letters.split(), strict=True)), **options)


LATIN_DIGRAPHS = _script(
    "a e i o u p b t d k g m n s z sh zh ch ng kh l r h w y f v", has_case=True
)
LATIN_DIACRITICS = _script("a e i o u p b t d k g m n s z š ž č ñ x l r h w y f v", has_case=True)
LATIN_ACCENTED = _script("á é í ó ú p b t d c g m n ś z ş ź ć ņ q l ř h w j f v", has_case=True)
LATIN_PLAIN = _script("a e i o u p b t d k g m n s z c j q ng x l r h w y f v", has_case=True)
CYRILLIC = _script("а е и о у п б т д к г м н с з ш ж ч ң х л р һ ў й ф в", has_case=True)
CYRILLIC_SOUTHERN = _script("а е и о у п б т д к г м н с з ш ж ч њ х л р ћ ў ј ф в", has_case=True)
GREEK = _script(
    "α ε ι ο υ π β τ δ κ γ μ ν σ ζ ξ ψ τζ γγ χ λ ρ η ω ϊ φ θ", has_case=True, question_mark=";"
)
GEORGIAN = _script("ა ე ი ო უ პ ბ თ დ კ გ მ ნ ს ზ შ ჟ ჩ ჲ ხ ლ რ ჰ წ ყ ფ ვ")
ARMENIAN = _script(
    "ա ե ի ո ը պ բ տ դ կ գ մ ն ս զ շ ժ չ ղ խ լ ր հ ւ յ ֆ վ", has_case=True, full_stop="։"
)
TIFINAGH = _script("ⴰ ⴻ ⵉ ⵄ ⵓ ⵒ ⴱ ⵜ ⴷ ⴽ ⴳ ⵎ ⵏ ⵙ ⵣ ⵛ ⵊ ⵞ ⵖ ⵅ ⵍ ⵔ ⵀ ⵡ ⵢ ⴼ ⵠ")
DEVANAGARI = _script(
    "अ ए इ ओ उ प ब त द क ग म न स ज श झ च ङ ख ल र ह व य फ भ",
    vowel_signs={"a": "", "e": "े", "i": "ि", "o": "ो", "u": "ु"},
    virama="्",
    full_stop="।",
)
TELUGU = _script(
    "అ ఎ ఇ ఒ ఉ ప బ త ద క గ మ న స జ శ ఝ చ ఙ ఖ ల ర హ వ య ఫ భ",
    vowel_signs={"a": "", "e": "ె", "i": "ి", "o": "ొ", "u": "ు"},
    virama="్",
)
