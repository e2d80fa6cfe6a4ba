from data_prep import meanings


def test_meanings_differ_and_have_4_to_16_words():
    drawn = meanings.draw(seed=2, count=200)
    texts = list(map(meanings.english, drawn))
    assert len(set(texts)) == 200
    assert all(4 <= len(text.split()) <= 16 for text in texts)
    assert all(text[0].isupper() and text[-1] in ".?" for text in texts)
    assert meanings.draw(seed=2, count=50) == drawn[:50]
