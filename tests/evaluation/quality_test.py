"""BLEU and chrF by hand; the table, the file and the picture of a run's quality."""

import dataclasses
import functools
import json

import pytest
import sentencepiece
from matplotlib.figure import Figure
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.tokenizers import tokenizer_spm

from lingvo_gshard.evaluation import quality, tokenization
from lingvo_gshard.evaluation.quality import LanguageQuality, Quality, Score

corpus_bleu = functools.partial(quality.score, "bleu")
corpus_chrf = functools.partial(quality.score, "chrf")


def _row(code, train_pairs, sentences, bleu, chrf):
    return LanguageQuality(
        code,
        train_pairs,
        sentences,
        bleu=Score(bleu, 1.5, "nrefs:1"),
        chrf=Score(chrf, 0.25, "nc:6"),
        chrfpp=Score(20.0, 0.5, "nw:2"),
    )


_QUALITY = Quality(
    (
        _row("qa", 300, 100, 12.5, 30.0),
        _row("qb", 32000, 100, 45.0, 60.0),
        _row("qc", 300, 90, 30.0, 45.0),
    )
)


def test_saved_scores_are_read_back(tmp_path):
    _QUALITY.save(tmp_path / "scores.json")
    read = quality.load(tmp_path / "scores.json")
    assert read.by_size() == _QUALITY.by_size()
    assert read.average("bleu") == pytest.approx((12.5 + 45 + 30) / 3)


def test_columns_are_the_metrics_that_all_languages_have(tmp_path):
    with_spbleu = [
        dataclasses.replace(row, spbleu=Score(1.0, 0.5, "tok:flores200"))
        for row in _QUALITY.languages
    ]
    some = Quality((with_spbleu[0], *_QUALITY.languages[1:]))
    assert some.metrics == ["bleu", "chrf", "chrfpp"] and some.table() == _QUALITY.table()

    all_of_them = Quality(tuple(with_spbleu))
    table = all_of_them.table().splitlines()
    assert table[0].split()[-4:] == ["chrF++", "+-", "spBLEU", "+-"]
    assert [line.split()[0] for line in table[1:4]] == ["qb", "qa", "qc"]  # By size.
    assert table[4].split() == ["average", "29.17", "45.00", "20.00", "1.00"]
    assert table[-1] == "sacreBLEU spbleu tok:flores200"


def test_a_score_that_some_languages_have_is_saved(tmp_path):
    row = dataclasses.replace(_QUALITY.languages[0], spbleu=Score(1.0, 0.5, "tok:flores200"))
    Quality((row, *_QUALITY.languages[1:])).save(tmp_path / "scores.json")
    fields = json.loads((tmp_path / "scores.json").read_text())
    assert fields["average_chrfpp"] == 20 and "average_spbleu" not in fields
    assert quality.load(tmp_path / "scores.json").by_size()[1] == row


@pytest.mark.parametrize("text", [None, "{", "{}", '{"languages": [{"code": "qa"}]}'])
def test_a_file_that_holds_no_scores_is_refused(tmp_path, text):
    if text is not None:
        (tmp_path / "scores.json").write_text(text)
    reason = "there is no such file" if text is None else ""
    with pytest.raises(ValueError, match=rf"scores.json is not a file of scores .*{reason}"):
        quality.load(tmp_path / "scores.json")


def test_picture(tmp_path):
    _QUALITY.draw(tmp_path / "bleu.png")
    data = (tmp_path / "bleu.png").read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 5000


# --- scores ---


def test_equal_text_scores_100_and_other_text_0():
    text = ["The cat sat on the mat .", "It rains all day long ."]
    for metric in (corpus_bleu, corpus_chrf):
        assert metric(text, text).value == pytest.approx(100)
        assert metric(text, text).margin == pytest.approx(0, abs=1e-9)
        assert metric(["x y z w v"], ["a b c d e"]).value == 0


def test_chrfpp_is_sacrebleus():
    ours, theirs = ["the cat sat on a mat", "rain"], ["the cat sits on the mat", "it rains"]
    want = CHRF(word_order=2).corpus_score(ours, [theirs]).score
    found = quality.score("chrfpp", ours, theirs)
    assert found.value == pytest.approx(want) and "nw:2" in found.signature


def test_spbleu_needs_its_tokenizers_model(tmp_path, monkeypatch):
    """Any SentencePiece model will do here."""
    text, theirs = ["the cat sat on a mat", "it rains"], ["the cat sits on the mat", "it rains"]
    monkeypatch.setattr(quality, "SPBLEU_MODEL", tmp_path / "models/flores200sacrebleuspm")
    monkeypatch.setattr(tokenizer_spm, "SACREBLEU_DIR", str(tmp_path))
    assert quality.available() == ["bleu", "chrf", "chrfpp"]
    quality.SPBLEU_MODEL.parent.mkdir()
    with quality.SPBLEU_MODEL.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(text), model_writer=file, vocab_size=16, minloglevel=2
        )
    assert quality.available() == ["bleu", "chrf", "chrfpp", "spbleu"]
    found = quality.score("spbleu", text, theirs)
    want = BLEU(tokenize="flores200").corpus_score(text, [theirs]).score
    assert found.value == pytest.approx(want) and "tok:flores200" in found.signature


def test_the_margin_shrinks_as_the_root_of_the_corpus():
    """Half of the sentences are right; with four times as many, the margin is halved."""
    right, wrong = "a b c d e f", "g h i j k l"
    margins = [corpus_bleu([right, right] * n, [right, wrong] * n).margin for n in (25, 100)]
    assert margins[0] / margins[1] == pytest.approx(2, rel=0.25)
    assert 5 < margins[1] < 15  # 1.96 * sqrt(0.5 * 0.5 / 200) is 7 % of right sentences.


@pytest.mark.parametrize(("metric", "own"), [(corpus_bleu, "tok:13a"), (corpus_chrf, "nc:6")])
def test_the_signature_names_the_settings(metric, own):
    signature = metric(["a b c d"], ["a b c d"]).signature
    for part in ("nrefs:1", "bs:1000", "seed:12345", own, "version:"):
        assert part in signature


# The same sentence in scripts without spaces between words, and in one with spaces.
_TEXTS = {
    "zh": "孩子们在花园里读一本旧书。",
    "ja": "子どもたちは庭で古い本を読んでいます。",
    "th": "เด็กๆอ่านหนังสือเก่าในสวน",
    "de": "Die Kinder lesen im Garten ein altes Buch.",
}


@pytest.mark.parametrize(("target", "text"), _TEXTS.items())
def test_a_perfect_translation_has_bleu_100_whatever_its_script(target, text):
    score = quality.score("bleu", [text, text], [text, text], target)
    assert score.value == pytest.approx(100)
    tokens = {"de": "13a", "zh": "zh"}.get(target, "char")
    assert f"|tok:{tokens}|" in score.signature  # MeCab is not installed here.


@pytest.mark.parametrize(
    ("language", "tokens"),
    [
        ("ja", "ja-mecab"),
        ("jpn_Jpan", "ja-mecab"),
        ("ko-KR", "ko-mecab"),
        ("zh-Latn-pinyin", "13a"),
        ("tha_Thai", "char"),
        ("jv_Java", "char"),
        ("qta", "13a"),
    ],
)
def test_tokens_follow_the_script(language, tokens):
    assert tokenization.wanted_for(language) == tokens


def test_mecab_is_used_if_installed(monkeypatch):
    assert tokenization.advice(["de", "ja", "th", "ko"]) == [
        "BLEU of ja counts characters; pip install 'sacrebleu[ja]' to count words.",
        "BLEU of ko counts characters; pip install 'sacrebleu[ko]' to count words.",
    ]
    monkeypatch.setattr(tokenization, "_is_installed", lambda tokenizer: True)
    assert tokenization.of_target("ja") == "ja-mecab"
    assert tokenization.advice(["ja", "ko"]) == []


_MIXED = Quality(
    tuple(
        LanguageQuality(
            code,
            300,
            10,
            bleu=Score(value, 1.0, f"nrefs:1|tok:{tokens}|smooth:exp"),
            chrf=Score(value, 1.0, "nc:6"),
            chrfpp=Score(value, 1.0, "nw:2"),
            spbleu=Score(value + 2, 1.0, "tok:flores200"),
        )
        for code, value, tokens in (("en-de", 20.0, "13a"), ("en-th", 40.0, "char"))
    )
)


def test_bleu_of_other_tokens_has_no_average_but_spbleu_has(tmp_path):
    *_, average = _MIXED.rows()
    assert average == ["average", "", "", "-", "", "30.00", "", "30.00", "", "32.00", ""]
    lines = _MIXED.table().splitlines()
    assert "sacreBLEU bleu nrefs:1|tok:13a|smooth:exp: en-de" in lines
    assert "sacreBLEU bleu nrefs:1|tok:char|smooth:exp: en-th" in lines
    assert lines[-1].startswith("BLEU is not averaged")
    assert lines[-1].endswith("use the average of spBLEU.")

    _MIXED.save(tmp_path / "scores.json")
    assert "average_bleu" not in json.loads((tmp_path / "scores.json").read_text())
    assert quality.load(tmp_path / "scores.json").by_size() == _MIXED.by_size()
    assert quality.main_metric([_MIXED]) == "spbleu" and quality.main_metric([_QUALITY]) == "bleu"
    _MIXED.draw(tmp_path / "bleu.png")


def test_one_sentence_has_no_interval(tmp_path):
    score = corpus_bleu(["a b c d e x"], ["a b c d e f"])
    assert score.value > 0 and score.margin is None
    row = LanguageQuality("qa", 30, 1, score, score, score)
    assert Quality((row,)).rows()[1][3:5] == [f"{score.value:.2f}", "-"]
    Quality((row,)).save(tmp_path / "scores.json")
    assert quality.load(tmp_path / "scores.json").languages == (row,)
    Quality((row,)).draw(tmp_path / "bleu.png")


def test_a_language_without_training_pairs_is_in_the_picture(monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, dpi: drawn.append(figure))
    score = corpus_bleu(["a b c d e x"], ["a b c d e f"])
    for numbers in ((300, 40), (300, 0)):
        rows = [LanguageQuality(f"q{n}", n, 1, score, score, score) for n in numbers]
        Quality(tuple(rows)).draw("x.png")
        (axes,) = drawn.pop().axes
        left, right = axes.get_xlim()
        assert left < min(numbers) < max(numbers) < right


@pytest.mark.parametrize(("ours", "theirs"), [([], []), (["a"], []), (["a", "b"], ["a"])])
def test_unequal_numbers_are_refused(ours, theirs):
    message = f"{len(ours)} hypotheses and {len(theirs)} references"
    with pytest.raises(ValueError, match=f"got {message} to score"):
        corpus_bleu(ours, theirs)
    with pytest.raises(ValueError, match=f"got {message} to score"):
        corpus_chrf(ours, theirs)
