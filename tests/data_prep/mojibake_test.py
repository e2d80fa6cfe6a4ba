import pytest

from data_prep import mojibake

_TEXTS = {
    "ru": "Привет, как у вас дела? Сегодня хорошая погода.",
    "uk": "Сім'я живе в Києві, їхній дім стоїть біля річки.",
    "pl": "Zażółć gęślą jaźń, proszę państwa.",
    "cs": "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "tr": "Şu çılgın ağaç köşede üşüyor.",
    "el": "Καλημέρα σας, τι κάνετε σήμερα;",
    "he": "שלום לכולם, מה שלומכם היום?",
    "ar": "مرحبا بكم، كيف حالكم اليوم؟",
    "fa": "سلام، حال شما چطور است؟ پدر و گل ژاله",
    "hi": "नमस्ते, आज मौसम अच्छा है।",
    "th": "สวัสดีครับ วันนี้อากาศดีมาก",
    "zh": "你好，今天天气很好，我们去公园吧。",
    "ja": "こんにちは、今日は良い天気ですね。",
    "ko": "안녕하세요, 오늘은 날씨가 좋습니다.",
    "vi": "Hôm nay trời đẹp, chúng ta đi dạo nhé.",
    "de": "Größere Bäume übertönen süße Vögel – „schön“, sagte er.",
    "fr": "« Où êtes-vous, cher élève ? » À l’été 1995…",
    "is": "Það er óæðri þjóð sem býr á Íslandi.",
}


def _read_as(text, encoding, written="utf-8"):
    """Returns a text's bytes decoded in another encoding, which may lack some of them."""
    data = text.encode(written)
    if encoding in ("gbk", "cp932", "big5", "cp949"):
        return data.decode(encoding, "replace").replace("\ufffd", "?")
    characters = []
    for byte in data:
        try:
            characters.append(bytes([byte]).decode(encoding))
        except UnicodeDecodeError:
            characters.append(chr(byte))
    return "".join(characters)


@pytest.mark.parametrize("language", _TEXTS)
def test_correct_text_is_not_counted(language):
    text = _TEXTS[language]
    for whole in (text, text.upper(), f"English, and {text}"):
        assert not mojibake.is_likely(whole)
    for word in text.split():
        assert not mojibake.is_likely(word)


@pytest.mark.parametrize("encoding", ["cp1251", "cp1250", "cp1253", "cp866", "koi8-r", "gbk"])
@pytest.mark.parametrize("language", ["ru", "uk", "pl", "cs", "tr", "el", "zh", "ja", "ko", "de"])
def test_utf_8_that_was_read_in_another_encoding_is_counted(language, encoding):
    damaged = _read_as(_TEXTS[language], encoding)
    assert mojibake.is_likely(damaged)
    # As in sources: white space is collapsed, including no-break spaces.
    assert mojibake.is_likely(" ".join(f"English, {damaged}".split()))


@pytest.mark.parametrize(
    ("language", "written", "encoding"),
    [
        ("he", "utf-8", "cp1255"),
        ("hi", "utf-8", "cp1251"),
        ("pl", "utf-8", "iso8859-2"),
        ("ru", "utf-8", "mac-cyrillic"),
        ("ja", "utf-8", "cp932"),
        ("ru", "cp1251", "cp1252"),
        ("el", "cp1253", "cp1252"),
        ("th", "cp874", "latin-1"),
        ("zh", "gbk", "latin-1"),
        ("ko", "cp949", "latin-1"),
        ("ru", "cp1251", "koi8-r"),
        ("ru", "iso8859-5", "cp1251"),
    ],
)
def test_text_that_was_read_in_a_wrong_encoding_is_counted(language, written, encoding):
    text = _TEXTS[language].encode(written, "replace").decode(written)
    assert mojibake.is_likely(_read_as(text, encoding, written))


@pytest.mark.parametrize(
    "text",
    [
        "100 кВт и 5 мВ",
        "мРНК вакцина",
        "«СССР» и «КПСС»",
        "jo̱ i̱ Yáˆ\u00a0do, íbˋ i̱ lɨ́ɨngˊ",
        "ÃO É NÃO",
        "联通",
    ],
)
def test_text_that_only_looks_wrong_is_not_counted(text):
    assert not mojibake.is_likely(text)
