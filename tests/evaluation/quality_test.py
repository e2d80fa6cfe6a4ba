"""The table, the file and the picture of translation quality."""

import pytest

from lingvo_gshard.evaluation import quality
from lingvo_gshard.evaluation.quality import LanguageQuality, Quality
from lingvo_gshard.evaluation.scores import Score


def _row(code, train_pairs, sentences, bleu, chrf):
    return LanguageQuality(
        code, train_pairs, sentences, Score(bleu, 1.5, "nrefs:1"), Score(chrf, 0.25, "nc:6")
    )


_QUALITY = Quality(
    (
        _row("qa", 300, 100, 12.5, 30.0),
        _row("qb", 32000, 100, 45.0, 60.0),
        _row("qc", 300, 90, 30.0, 45.0),
    )
)


def test_table():
    assert _QUALITY.table() == (
        "language   train pairs  sentences    BLEU    +-    chrF    +-\n"
        "qb               32000        100   45.00  1.50   60.00  0.25\n"
        "qa                 300        100   12.50  1.50   30.00  0.25\n"
        "qc                 300         90   30.00  1.50   45.00  0.25\n"
        "average                             29.17         45.00\n"
        "sacreBLEU bleu nrefs:1\n"
        "sacreBLEU chrf nc:6"
    )


def test_what_is_saved_reads_back(tmp_path):
    _QUALITY.save(tmp_path / "scores.json")
    read = quality.load(tmp_path / "scores.json")
    assert read.by_size() == _QUALITY.by_size()
    assert read.average_bleu == pytest.approx((12.5 + 45 + 30) / 3)


@pytest.mark.parametrize("text", [None, "{", "{}", '{"languages": [{"code": "qa"}]}'])
def test_a_file_that_holds_no_scores_is_refused(tmp_path, text):
    if text is not None:
        (tmp_path / "scores.json").write_text(text)
    with pytest.raises(ValueError, match="scores.json: holds no scores by language"):
        quality.load(tmp_path / "scores.json")


def test_picture(tmp_path):
    quality.draw(_QUALITY, tmp_path / "bleu.png")
    data = (tmp_path / "bleu.png").read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 5000
