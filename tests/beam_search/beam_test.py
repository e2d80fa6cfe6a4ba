"""The settings of a search: stages and refused values."""

import math

import pytest

from lingvo_gshard.beam_search.beam import BeamSearch

_SAMPLING = {"beam_size": 1, "temperature": 0.7}


@pytest.mark.parametrize(
    ("beam_size", "max_steps", "min_places", "want"),
    [(8, 128, 128, (32, 64, 96, 128)), (4, 65, 128, (33, 65)), (3, 6, 6, (2, 4, 6))],
)
def test_stages_are_evenly_long(beam_size, max_steps, min_places, want):
    config = BeamSearch(beam_size, max_steps, min_stage_places=min_places)
    assert config.stage_ends == want and config.first_places == beam_size * want[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_size": 0}, "beam_size must be at least 1, got 0"),
        ({"length_norm_alpha": -0.1}, "length_norm_alpha must be at least 0, got -0.1"),
        ({"num_best": 5}, "num_best must be 1 to beam_size 4, got 5"),
        ({"min_stage_places": 0}, "min_stage_places must be at least 1, got 0"),
        ({"coverage_weight": -1.0}, "coverage_weight must be at least 0, got -1.0"),
        ({"temperature": 0.5}, "temperature must be None for beam_size 4, got 0.5"),
        ({"temperature": 0.0, "beam_size": 1}, "temperature must be from 1.2e-38 to 1.7e"),
        ({"temperature": math.nan, "beam_size": 1}, "temperature must be from .*, got nan"),
        ({"top_k": 5}, "top_k must be None without a temperature, got 5"),
        ({**_SAMPLING, "top_k": 0}, "top_k must be at least 1, got 0"),
        ({**_SAMPLING, "top_p": math.nan}, "top_p must be above 0 and at most 1, got nan"),
    ],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        BeamSearch(**{"beam_size": 4, "max_steps": 9, **options})
