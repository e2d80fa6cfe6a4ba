from lingvo_gshard.input.normalization import normalize


def test_one_form_of_text():
    assert normalize("e\u200b\u0301") == "é"
    assert normalize("\u00a0ﬁne \t１２\u200bx\u202e\u2028y\x07 ") == "fine 12x y"
    assert normalize("e\u0301") == "é"
    # The zero width non-joiner is spelling in Persian.
    assert normalize("می\u200cخواهم") == "می\u200cخواهم"
