"""The examples run as they are."""

import re

import pytest

from tests.docs import scripts


@pytest.mark.slow
def test_images_that_are_split_train_as_on_one_device(tmp_path):
    printed = scripts.output((scripts.ROOT / "examples/split_images.py").read_text(), tmp_path)
    assert "collective-permute" in printed
    steps = re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+) +([\d.]+)$", printed, re.MULTILINE)
    assert [int(step) for step, *_ in steps] == [0, 10, 20, 30, 40, 50, 59]
    for _, split_loss, whole_loss, _ in steps:
        assert float(split_loss) == pytest.approx(float(whole_loss), rel=1e-2, abs=1e-3)
    assert float(steps[-1][3]) > 0.9


@pytest.mark.slow
def test_an_estimator_continues_and_learns(tmp_path):
    printed = scripts.output((scripts.ROOT / "examples/own_estimator.py").read_text(), tmp_path)
    assert re.match(r"step 500, accuracy 0\.9", printed)
