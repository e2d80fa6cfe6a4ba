"""Tests for bench/multilingual.py."""

import sys

import pytest
from absl import flags
from absl.testing import flagsaver

from bench import multilingual


@pytest.fixture(autouse=True)
def _flags():
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["test"])


@pytest.mark.parametrize("jobs", [1, 2])
def test_results_keep_the_order_of_their_calls(jobs):
    with flagsaver.flagsaver(jobs=jobs):
        assert multilingual.in_parallel([lambda i=i: i for i in range(5)]) == [0, 1, 2, 3, 4]


def test_after_an_error_no_further_call_begins():
    begun = []

    def call(i):
        begun.append(i)
        if i == 1:
            sys.exit("call 1 failed")

    with pytest.raises(SystemExit, match="call 1 failed"):
        multilingual.in_parallel([lambda i=i: call(i) for i in range(50)])
    assert begun == [0, 1]
