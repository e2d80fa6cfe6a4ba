"""What a search is asked for: its stages, and what makes no sense."""

import pytest

from lingvo_gshard.decode.beam import BeamSearch, Requests


@pytest.mark.parametrize(
    ("beam_size", "max_steps", "least", "want"),
    [
        (8, 128, 128, (32, 64, 96, 128)),
        (4, 48, 128, (48,)),
        (4, 65, 128, (33, 65)),
        (1, 3, 1, (1, 2, 3)),
        (3, 6, 6, (2, 4, 6)),
    ],
)
def test_stages_end_at_even_steps(beam_size, max_steps, least, want):
    config = BeamSearch(beam_size, max_steps, min_stage_places=least)
    assert config.stage_ends == want and config.first_places == beam_size * want[0]


@pytest.mark.parametrize("sizes", [(0, 5, 0.6), (4, 0, 0.6), (4, 5, -0.1)])
def test_a_search_that_makes_no_sense_is_refused(sizes):
    with pytest.raises(ValueError, match=f"BeamSearch: .* got {sizes[0]}, {sizes[1]}, {sizes[2]}"):
        BeamSearch(*sizes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_best": 5}, "num_best must be 1 to beam_size 4, got 5"),
        ({"num_best": 0}, "num_best must be 1 to beam_size 4, got 0"),
        ({"min_stage_places": 0}, "min_stage_places must be 1 or more, got 0"),
        ({"coverage_weight": -1.0}, "coverage_weight must be 0 or more, got -1.0"),
        ({"temperature": 0.5}, "a temperature .* goes with beam_size 1, got 0.5 and 4"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        BeamSearch(4, 9, **options)


def test_a_least_length_above_the_longest_is_refused():
    with pytest.raises(ValueError, match="min_steps must be 1 to max_steps 4, got 5"):
        Requests.alike(2, 4, min_steps=5)
