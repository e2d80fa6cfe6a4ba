"""Labels by patterns."""

import pytest

from xla_plan.program import patterns


def test_names_have_the_label_of_the_matching_pattern():
    parsed = patterns.parse("--role", ["weights=^params", "weights=^batch_stats", "opt=mu|nu"])
    names = ["params['w']", "batch_stats['m']", "opt.mu", "opt.nu", "step"]
    assert patterns.assign("--role", parsed, names) == {
        "params['w']": "weights",
        "batch_stats['m']": "weights",
        "opt.mu": "opt",
        "opt.nu": "opt",
    }
    assert patterns.assign("--role", (), names) == {}


def test_two_patterns_of_one_label_may_be_found_in_one_name():
    parsed = patterns.parse("--role", ["weights=a", "weights=b"])
    assert patterns.assign("--role", parsed, ["ab"]) == {"ab": "weights"}


def test_an_expression_may_have_an_equals_sign():
    (pattern,) = patterns.parse("--role", ["weights=(?=w)"])
    assert pattern.label == "weights" and pattern.expression.pattern == "(?=w)"


@pytest.mark.parametrize("text", ["weights", "=w", "weights="])
def test_another_form_is_refused(text):
    with pytest.raises(ValueError, match=f"--role={text}: expected LABEL=REGEX"):
        patterns.parse("--role", [text])
