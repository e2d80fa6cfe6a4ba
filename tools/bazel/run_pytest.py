"""Runs pytest on the given files with the options of `make test`; a file of slow tests passes."""

import sys

import pytest

if __name__ == "__main__":
    status = pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir=.", *sys.argv[1:]])
    sys.exit(0 if status is pytest.ExitCode.NO_TESTS_COLLECTED else status)
