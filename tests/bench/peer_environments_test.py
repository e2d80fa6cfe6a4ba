"""The peers' environments have NumPy, but none of the packages of ours."""

import subprocess
import sys

import pytest

from bench import peer

# A package that is None in sys.modules cannot be found or imported.
_IMPORT = """
import sys
for name in ("absl", "jax", "tensorflow"):
    sys.modules[name] = None
import bench.call_cost, bench.torch_peer.sizes
"""


def test_what_peers_import_needs_none_of_our_packages():
    done = subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_a_peer_that_ends_is_reported():
    with (
        pytest.raises(
            ChildProcessError, match=r"^bench\.no_peer ended with status 1 before it answered\.$"
        ),
        peer.Peer("bench.no_peer", python=sys.executable) as ended,
    ):
        for _ in range(2):  # Whether or not the first question reached it.
            ended.ask("norms")
