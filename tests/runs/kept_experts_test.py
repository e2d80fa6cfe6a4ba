"""The remaining experts, computed by hand and by a literal loop."""

import numpy as np
import pytest

from lingvo_gshard.runs import kept_experts


@pytest.mark.parametrize(
    ("num_experts", "keep", "num_choices", "multiple_of", "want"),
    [
        (128, 0.2, 2, 1, 26),  # 25.6
        (128, 0.2, 2, 8, 32),
        (100, 0.07, 1, 1, 7),  # 0.07 * 100 is 7.000000000000001.
        (8, 0.3, 1, 4, 4),
        (1, 0.5, 2, 1, 1),
    ],
)
def test_the_number_is_rounded_up(num_experts, keep, num_choices, multiple_of, want):
    assert kept_experts.num_kept(num_experts, keep, num_choices, multiple_of) == want


@pytest.mark.parametrize("keep", [0.0, -0.5, 1.01, float("nan")])
def test_other_shares_are_refused(keep):
    with pytest.raises(ValueError, match=rf"keep={keep}: expected a share above 0 and up to 1"):
        kept_experts.num_kept(8, keep, 2)


def test_other_multiples_are_refused():
    for multiple_of in (0, 3, 16):
        with pytest.raises(ValueError, match=f"multiple_of={multiple_of}: expected a divisor of"):
            kept_experts.num_kept(8, 0.5, 2, multiple_of)


def test_languages_count_alike_and_lower_experts_win_ties():
    share_E = kept_experts.shares({"de": [0.0, 4.0, 0.0, 0.0], "fr": [2.0, 0.0, 1.0, 1.0]})
    np.testing.assert_allclose(share_E, [0.25, 0.5, 0.125, 0.125])
    kept = kept_experts.busiest(share_E, 3)
    assert kept.ids == (0, 1, 2) and kept.share == pytest.approx(0.875)
    assert kept.members == (((0, 1.0),), ((1, 1.0),), ((2, 1.0),))


def test_dropped_experts_are_merged_by_the_similarity_of_gates():
    # Experts 1 and 3 remain. The gate of expert 0 is parallel to expert 3's, and the gate of expert
    # 2 is closer to expert 1's. Expert 4 was never chosen. Expert 5 is equally similar to both.
    wg_ME = np.array([[0.0, 1.0, 3.0, 0.0, 0.0, 1.0], [9.0, 0.0, 1.0, 0.5, 1.0, 1.0]], np.float32)
    share_E = np.array([0.1, 0.3, 0.1, 0.3, 0.0, 0.2])
    kept = kept_experts.merged(share_E, 2, wg_ME)
    assert kept.ids == (1, 3) and kept.share == pytest.approx(0.6)
    first, second = map(dict, kept.members)
    assert first == pytest.approx({1: 0.5, 2: 1 / 6, 5: 1 / 3})
    assert second == pytest.approx({3: 0.75, 0: 0.25})


def test_experts_without_choices_are_unchanged():
    kept = kept_experts.merged(np.zeros(4), 2, np.ones((3, 4), np.float32))
    assert kept.ids == (0, 1) and kept.members == (((0, 1.0),), ((1, 1.0),))
