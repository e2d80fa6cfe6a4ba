"""The table, the JSON and the picture of translation quality."""

import json

from lingvo_gshard.analysis import quality
from lingvo_gshard.analysis.quality import LanguageQuality, Quality

_QUALITY = Quality(
    (
        LanguageQuality("qa", 300, 100, 12.5, "nrefs:1"),
        LanguageQuality("qb", 32000, 100, 45.0, "nrefs:1"),
        LanguageQuality("qc", 300, 90, 30.0, "nrefs:1"),
    )
)


def test_table():
    assert _QUALITY.table() == (
        "language   train pairs  sentences    BLEU\n"
        "qb               32000        100   45.00\n"
        "qa                 300        100   12.50\n"
        "qc                 300         90   30.00\n"
        "average                             29.17\n"
        "sacreBLEU nrefs:1"
    )


def test_json_has_every_number():
    fields = json.loads(json.dumps(_QUALITY.as_json()))
    assert fields["average_bleu"] == _QUALITY.average_bleu == (12.5 + 45 + 30) / 3
    assert [row["code"] for row in fields["languages"]] == ["qb", "qa", "qc"]
    assert fields["languages"][1] == {
        "code": "qa",
        "train_pairs": 300,
        "sentences": 100,
        "bleu": 12.5,
        "signature": "nrefs:1",
    }


def test_picture(tmp_path):
    quality.draw(_QUALITY, tmp_path / "bleu.png")
    data = (tmp_path / "bleu.png").read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 5000
