"""Tests for repro/quality/parallel.py."""

import sys

import pytest

from repro.quality import parallel


@pytest.mark.parametrize("jobs", [1, 2])
def test_results_keep_the_order_of_their_calls(jobs):
    assert parallel.results([lambda i=i: i for i in range(5)], jobs) == [0, 1, 2, 3, 4]


def test_after_an_error_no_further_call_begins():
    begun = []

    def call(i):
        begun.append(i)
        if i == 1:
            sys.exit("call 1 failed")

    with pytest.raises(SystemExit, match="call 1 failed"):
        parallel.results([lambda i=i: call(i) for i in range(50)], 1)
    assert begun == [0, 1]
