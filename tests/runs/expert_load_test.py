"""The picture of a run's expert load."""

import json

import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure

from lingvo_gshard.runs import expert_load
from lingvo_gshard.train.metrics_files import TRAIN_METRICS

_SCALARS = (
    "aux_loss",
    "overflow",
    "overflow_first",
    "overflow_second",
    "second_dispatched",
    "dropped_choices",
    "max_load",
    "idle_experts",
    "entropy",
    "router_loss",
)
# The numbers of experts by layer; the decoder has more.
_EXPERTS = {"decoder_1": 6, "encoder_1": 4, "encoder_11": 4, "encoder_3": 4}


def _metrics():
    metrics = {f"routing.load_E.{name}": [1.0] * size for name, size in _EXPERTS.items()}
    for place, field in enumerate(_SCALARS):
        metrics |= {f"routing.{field}.{name}": 0.1 * place for name in _EXPERTS}
    return metrics


def _write(folder, metrics):
    (folder / TRAIN_METRICS).write_text(
        "".join(json.dumps(line) + "\n" for line in _lines(metrics))
    )


def _lines(metrics):
    return [{"step": step, "metrics": metrics} for step in (10, 20)]


@pytest.mark.slow
def test_draws_stacks_of_different_numbers_of_experts(tmp_path):
    _write(tmp_path, {"loss": 3.0, **_metrics()})
    path = expert_load.draw(tmp_path)
    assert path == tmp_path / "expert_load.png"
    image = matplotlib.image.imread(path)
    assert len({tuple(pixel) for pixel in image.reshape(-1, image.shape[-1])}) > 50


def test_every_field_has_a_panel_with_a_curve_for_each_layer():
    figure = Figure()
    expert_load.draw_on(figure, _lines({**_metrics(), "routing.new_field.encoder_1": 7.0}))
    panels = {panel.get_title(): panel for panel in figure.axes if panel.get_title()}
    assert next(iter(panels)) == "load over its mean, step 20"
    assert len(panels) == 1 + len(_SCALARS) + 1 and "new_field" in panels
    overflow = panels["tokens dropped by all their experts, %"]
    assert [line.get_label() for line in overflow.get_lines()] == [
        "decoder_1",
        "encoder_1",
        "encoder_3",
        "encoder_11",
    ]
    np.testing.assert_allclose(overflow.get_lines()[0].get_ydata(), [10.0, 10.0])
    np.testing.assert_allclose(panels["new_field"].get_lines()[1].get_ydata(), [7.0, 7.0])


def test_nothing_to_draw_without_experts_or_training(tmp_path):
    assert expert_load.draw(tmp_path) is None
    _write(tmp_path, {"loss": 3.0})
    assert expert_load.draw(tmp_path) is None
    assert not (tmp_path / "expert_load.png").exists()


def test_each_layer_shows_its_latest_load_by_language():
    evaluations = [
        {"name": "dev", "load_E_encoder_1": [1.0, 1.0]},
        {"name": "dev_de", "load_E_encoder_1": [2.0, 0.0]},
        {"name": "dev_de", "load_E_encoder_1": [0.5, 1.5], "load_E_decoder_1": [1.0], "nll": 2.0},
        {"name": "dev_aa", "load_E_encoder_1": [0.0, 2.0]},
    ]
    layers = expert_load.by_language(evaluations, ["fr", "de", "aa"])
    assert layers == {"decoder_1": {"de": [1.0]}, "encoder_1": {"de": [0.5, 1.5], "aa": [0.0, 2.0]}}
    figure = Figure()
    expert_load.draw_by_language(figure, layers)
    panels = {panel.get_title(): panel for panel in figure.axes if panel.get_title()}
    assert list(panels) == ["decoder_1", "encoder_1"]
    (image,) = panels["encoder_1"].get_images()
    np.testing.assert_array_equal(image.get_array(), [[0.5, 1.5], [0.0, 2.0]])
    assert [each.get_text() for each in panels["encoder_1"].get_yticklabels()] == ["de", "aa"]
