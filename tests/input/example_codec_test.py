import numpy as np
import pytest

from lingvo_gshard.input import example_codec


def test_bytes_by_hand():
    assert example_codec.encode([5, 258, 2], [7, 2]) == bytes.fromhex(
        "02 03000000 0500 0201 0200 0700 0200".replace(" ", "")
    )
    assert example_codec.encode([65536], []) == bytes.fromhex(
        "04 01000000 00000100".replace(" ", "")
    )


@pytest.mark.parametrize("largest", [3, 65535, 65536, 2**31 - 1])
def test_round_trip(largest):
    example = example_codec.decode(example_codec.encode([1, largest, 0], [largest, 2]))
    np.testing.assert_array_equal(example.source_ids, [1, largest, 0])
    np.testing.assert_array_equal(example.target_ids, [largest, 2])
    assert example.source_ids.dtype == example.target_ids.dtype == np.int32


@pytest.mark.parametrize(
    ("codes", "sides"),
    [
        (("de", "en-de"), [("de", "en"), ("en", "de")]),
        (("en-GB", "en-001", "de"), [("en-GB", "en"), ("en-001", "en"), ("de", "en")]),
        (("en-pt-BR", "en-zh-Hant"), [("en", "pt-BR"), ("en", "zh-Hant")]),
        # British English from English, with a corpus's own names for languages.
        (("en-GB", "en-en-GB"), [("en-GB", "en"), ("en", "en-GB")]),
        (("GB", "en-GB"), [("GB", "en"), ("en", "GB")]),
        (("en-eng_Latn", "english"), [("en", "eng_Latn"), ("english", "en")]),
        # Without English, there are both directions; the name of a language may have a hyphen.
        (("de-fr", "fr-de"), [("de", "fr"), ("fr", "de")]),
        (("zh-Hant-pt-BR", "pt-BR-zh-Hant"), [("zh-Hant", "pt-BR"), ("pt-BR", "zh-Hant")]),
        (("pt-br", "en-pt-br"), [("pt-br", "en"), ("en", "pt-br")]),
    ],
)
def test_a_code_names_source_and_target(codes, sides):
    assert [example_codec.sides(code, codes) for code in codes] == sides
    assert example_codec.source_languages(codes) == tuple(dict.fromkeys(a for a, _ in sides))


@pytest.mark.parametrize(
    "record", [b"", b"\x02\x00", b"\x03" + bytes(8), b"\x02\x09\0\0\0\x01\0", b"\x04\0\0\0\0abc"]
)
def test_other_bytes_are_refused(record):
    with pytest.raises(ValueError, match=r"not a record"):
        example_codec.decode(record)


def test_ids_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"must be in \[0, 2\*\*31\), given -1 to 4"):
        example_codec.encode([4], [-1])
    with pytest.raises(ValueError, match=r"token ids must be in"):
        example_codec.encode([2**31], [])


def test_only_the_first_token_names_a_language():
    tokens = ("<2de>", "<2fr>")
    expected = {
        "<2de> a house": ["<2de> a house"],
        "a house": ["a house"],
        "<2de> a <2fr> house": ["<2de> a <", "2fr> house"],
        "<2de> <2de><2de> b": ["<2de> <", "2de><", "2de> b"],
        "<2fr><2de> <2fr>": ["<2fr><", "2de> <", "2fr>"],
        "the <2de>": ["the <", "2de>"],
    }
    for text, parts in expected.items():
        assert example_codec.literal_parts(text, tokens) == parts
        assert "".join(parts) == text
        assert example_codec.literal_parts(text, ()) == [text]
