from lingvo_gshard.input.normalization import normalize, normalize_written


def test_one_form_of_text():
    assert normalize("e\u200b\u0301") == "é"
    assert normalize("\u00a0ﬁne \t１２\u200bx\u202e\u2028y\x07 ") == "fine 12x y"
    assert normalize("e\u0301") == "é"
    # The zero width non-joiner is part of Persian spelling.
    assert normalize("می\u200cخواهم") == "می\u200cخواهم"


def test_written_text_keeps_its_meaning():
    for text in ("，；（）", "x² ½ ¹⁄₂", "น้ำ", "ﬁne", "１２", "می\u200cخواهم"):
        assert normalize_written(text) == text
    assert normalize_written("▁a▁▁ b▂") == "a b▂"
    assert normalize_written("\u00a0e\u0301 \tx\u2028y\x07\u200b ") == "é x y"
    # Reading the written form gives the same as reading the text itself.
    for text in ("\u3000x\u0301 ½\u00a0\u200b，", "ﬁ\u00b4n", "▁a▁▁ b▂"):
        assert normalize(normalize_written(text)) == normalize(text)
