"""The report of a run, which shows the run's results so far."""

import dataclasses
import html
import json
import re

import pytest

from lingvo_gshard.evaluation import quality, run_report
from lingvo_gshard.evaluation.quality import Score
from tests.repro.published.published_steps import record
from xla_plan.expected import factors, factors_text
from xla_plan.plans import plan_folder

_FACTS = run_report.RunFacts(
    model="toy.Model<4>",
    num_weights=1_234_567,
    max_steps=500,
    step_flops=4e9,
    train_pairs={"de": 70, "fr": 9000},
    nouns=("language", "pair"),
    unit="target token",
    shown=(),
    has_source=True,
    dispatch="GATHER",
)


def _line(step, **metrics):
    metrics = {"loss": 3.0, "nll": 2.5, "num_tokens": 100.0, "gradient_norm": 1.0, **metrics}
    return {
        "step": step,
        "num_steps": 10,
        "secs": 5.0,
        "input_wait_secs": 0.5,
        "wall_secs": 36.0 * step,
        "metrics": metrics,
    }


def _routing(overflow):
    return {
        "routing.overflow.encoder_1": overflow,
        "routing.load_E.encoder_1": [0.5, 1.5],
        "routing.load_E.decoder_1": [0.5, 1.5, 1.0],
        "routing.entropy.encoder_1": 0.625,
        "routing.entropy.decoder_1": 0.5,
        "routing.overflow.decoder_1": overflow,
    }


def _write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _page(folder, *lines):
    _write(folder / "train_metrics.jsonl", lines)
    return run_report.write(folder, _FACTS).read_text()


def _facts(page):
    """Returns the facts below the title, by name."""
    return dict(re.findall(r"<dt>(.*?)<dd>(.*?)</div>", page))


def _rows(page):
    """Returns the rows of all tables."""
    rows = [re.split("<t[hd]>", line)[1:] for line in page.splitlines() if line.startswith("<tr>")]
    return [[html.unescape(cell) for cell in row] for row in rows]


@pytest.mark.slow
def test_a_run_that_was_evaluated_and_decoded(tmp_path):
    evaluations = [
        {"name": "dev", "step": 10, "nll": 2.75},
        {"name": "dev_de", "step": 10, "nll": 9.0},
        {"name": "dev_de", "step": 20, "nll": 1.125, "load_E_encoder_1": [0.5, 1.5]},
    ]
    _write(tmp_path / "eval_metrics.jsonl", evaluations)
    scores = [Score(value, 1.0, "signature") for value in (31.25, 55.5, 52.0)]
    (tmp_path / "decode_test").mkdir()
    quality.Quality((quality.LanguageQuality("fr", 9000, 3, *scores),)).save(
        tmp_path / "decode_test/scores.json"
    )
    page = _page(tmp_path, _line(10, **_routing(0.5)), _line(20, skipped=0.2, **_routing(0.25)))
    assert "<h1>toy.Model&lt;4&gt; in " in page
    assert _facts(page) == {
        "weights": "1.23 M",
        "dispatch to experts": "GATHER",
        "steps": "20 of 500",
        "time": "0.20 hours",
        "loss": "3.0000",
        "steps skipped: gradient not finite": "2",
    }
    rows = _rows(page)
    assert ["language", "training pairs", "nll of dev, nats per target token"] in rows
    assert rows.index(["fr", "9,000", "-"]) < rows.index(["de", "70", "1.125"])  # By size.
    assert ["fr", "9,000", "3", "31.25", "1.00", "55.50", "1.00", "52.00", "1.00"] in rows
    dropped, entropy = "tokens dropped by all their experts, %", "entropy of a token's gates, nats"
    assert ["layer", dropped, entropy] in rows
    assert ["encoder_1", "25", "0.625"] in rows
    assert ["measured here", "0.5", "200", "8"] in rows
    assert page.count('<img src="data:image/png;base64,iVBOR') == 3


def test_a_run_that_has_only_begun(tmp_path):
    page = _page(tmp_path, _line(10))
    assert "--mode=eval adds" in page and "--mode=decode adds" in page and "adds a plan" in page
    assert "Routing" not in page and page.count("<img") == 1


def test_a_run_of_images_has_neither_languages_nor_translations(tmp_path):
    facts = dataclasses.replace(
        _FACTS, train_pairs={}, unit="image", shown=("accuracy",), has_source=False
    )
    _write(tmp_path / "train_metrics.jsonl", [_line(10, accuracy=0.5)])
    _write(tmp_path / "eval_metrics.jsonl", [{"name": "dev", "step": 10, "accuracy": 0.75}])
    page = run_report.write(tmp_path, facts).read_text()
    assert "Curves of loss, nats per image; accuracy; gradient norm" in page
    assert "padding of" not in page and "Translations" not in page and "By language" not in page
    assert ["", "seconds per step", "images per second", "model GFLOP per second"] in _rows(page)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is nothing to report yet"):
        run_report.write(tmp_path, _FACTS)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.5, None])
def test_planned_step_times_follow_the_measured_one(tmp_path, monkeypatch, share):
    known = factors.by_machine([record("a", share or 1.0)])

    class _Planned:
        topology = "v3:8x8"
        has_step = True
        factor = known["v3"] if share else None

        def steps_per_sec(self, share):
            return 4.0 * share

        def tokens_per_sec(self, share):
            return 4000.0 * share

    monkeypatch.setattr(plan_folder, "find", lambda kind, folder: _Planned())
    page = _page(tmp_path, _line(10))
    roofline, *expected = [row for row in _rows(page) if row[0].startswith("plan for v3:8x8")]
    assert roofline[1:] == ["0.25", "4,000", "16"]

    # Published steps show how near to the roofline others came, on some machines.
    name = "plan for v3:8x8, expected"
    assert [row[:2] for row in expected] == ([[name, "0.5"]] if share else [])
    assert factors_text.basis("v3:8x8") in page


@pytest.mark.slow
def test_the_report_divides_the_time_of_a_run(tmp_path):
    secs = {"START": 10.0, "STEPS": 60.0, "INPUT": 5.0, "EVALUATION": 25.0}
    line = {"began": 1.0, "from_step": 0, "step": 10, "secs": secs}
    _write(tmp_path / "run_times.jsonl", [line])
    page = _page(tmp_path, _line(10))
    assert "Goodput: 60.0% of the time went to steps that count" in page
    rows = _rows(page)
    assert ["training steps", "60.0", "60.0%"] in rows and ["evaluation", "25.0", "25.0%"] in rows
    assert ["all", "100.0", "100.0%"] in rows

    # Runs of earlier versions lack this file.
    (tmp_path / "run_times.jsonl").unlink()
    assert "Goodput" not in _page(tmp_path, _line(10))
