"""Tags of summaries, and lines that are whole or not there."""

import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.train.summaries import append_line, read_lines, scalars


def test_scalars_name_every_element():
    metrics = NestedMap(load=NestedMap(encoder_1=np.array([0.5, 1.5])), loss=np.float32(2))
    assert scalars(metrics) == {"load/encoder_1/0": 0.5, "load/encoder_1/1": 1.5, "loss": 2.0}


def test_a_line_takes_the_place_of_one_cut_short(tmp_path):
    """As a full disk or a power cut leaves it."""
    path = tmp_path / "lines"
    for cut in ("", '{"st', '{"step": 9}'):
        path.write_text('{"step": 1}\n' + cut)
        assert read_lines(path) == [{"step": 1}]
        append_line(path, {"step": 2})
        assert read_lines(path) == [{"step": 1}, {"step": 2}]
    path.write_text('{"cut in the fir')
    append_line(path, {"step": 3})
    assert read_lines(path) == [{"step": 3}]
