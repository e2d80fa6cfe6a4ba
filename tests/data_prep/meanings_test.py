import pytest

from data_prep import meanings
from data_prep.meanings import Clause, Noun, Sentence


@pytest.mark.parametrize(
    ("sentence", "english"),
    [
        (Sentence(Clause(Noun("I"), "rest", "present"), is_question=True), "Do I rest?"),
        (
            Sentence(
                Clause(Noun("witch", "this", True), "claim", "past", True),
                "that",
                Clause(
                    Noun("artist", owner=Noun("cousin", "my", True, ("young",))),
                    "leave",
                    "future",
                    time="soon",
                ),
            ),
            "These witches did not claim that my young cousins' artist will leave soon.",
        ),
        (
            Sentence(
                Clause(
                    Noun("Nils"),
                    "touch",
                    "present",
                    object=Noun("anchor", "a", False, ("ugly",)),
                    preposition="through",
                    place=Noun("forest", "a", True),
                    time="often",
                )
            ),
            "Nils touches an ugly anchor through forests often.",
        ),
        (
            Sentence(Clause(Noun("lizard", "every"), "chase", "past", object=Noun("they"))),
            "Every lizard chased them.",
        ),
    ],
)
def test_english_agreement(sentence, english):
    assert meanings.english(sentence) == english


def test_meanings_differ_and_have_4_to_16_words():
    drawn = meanings.draw(seed=2, count=200)
    texts = list(map(meanings.english, drawn))
    assert len(set(texts)) == 200
    assert all(4 <= len(text.split()) <= 16 for text in texts)
    assert all(text[0].isupper() and text[-1] in ".?" for text in texts)
    assert meanings.draw(seed=2, count=50) == drawn[:50]
