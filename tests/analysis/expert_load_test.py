"""The picture of a run's expert load."""

import json

import matplotlib.image

from lingvo_gshard.analysis import expert_load
from lingvo_gshard.train.summaries import TRAIN_METRICS


def _write(folder, metrics):
    lines = [{"step": step, "metrics": metrics} for step in (10, 20)]
    (folder / TRAIN_METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_draws_every_layer(tmp_path):
    layers = {"encoder_1": 0.02, "decoder_1": 0.3}
    metrics = {f"routing.load_E.{name}": [1.5, 0.0, 1.0, 1.5] for name in layers}
    metrics |= {f"routing.overflow.{name}": share for name, share in layers.items()}
    _write(tmp_path, {"loss": 3.0, **metrics})
    path = expert_load.draw(tmp_path)
    assert path == tmp_path / "expert_load.png"
    image = matplotlib.image.imread(path)
    assert image.shape[:2] == (520, 1170)
    assert len({tuple(pixel) for pixel in image.reshape(-1, image.shape[-1])}) > 50


def test_nothing_to_draw_without_experts_or_training(tmp_path):
    assert expert_load.draw(tmp_path) is None
    _write(tmp_path, {"loss": 3.0})
    assert expert_load.draw(tmp_path) is None
    assert not (tmp_path / "expert_load.png").exists()
