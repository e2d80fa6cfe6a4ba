"""`import lingvo_gshard`: quick, and the way to the library's public names."""

import re
import subprocess
import sys

import pytest

import lingvo_gshard


def _run(code, *args):
    command = [sys.executable, *args, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_import_alone_loads_nothing_else():
    code = """
import sys
import lingvo_gshard
print([name for name in ("jax", "numpy", "tensorflow", "absl") if name in sys.modules])
"""
    assert _run(code).stdout == "[]\n"


@pytest.mark.slow
def test_an_annotation_is_reachable_and_loads_tensorflow_when_it_is_used():
    code = """
import sys
from lingvo_gshard import Mesh, Partitioning, split
print("tensorflow" in sys.modules, Mesh.flat(2).num_partitions)
import tensorflow as tf
print(tf.function(lambda x: split(x, 0, 2)).get_concrete_function(tf.ones([4])).outputs[0].shape)
"""
    done = _run(code)
    assert done.stdout == "False 2\n(4,)\n", done.stderr


@pytest.mark.parametrize("name", lingvo_gshard.__all__)
def test_every_public_name_is_defined_in_its_module(name):
    assert getattr(lingvo_gshard, name).__module__ == lingvo_gshard._HOMES[name]
    assert name in dir(lingvo_gshard)


@pytest.mark.slow
def test_a_name_without_its_packages_says_how_to_install_them():
    code = "import sys; sys.modules['orbax'] = None; from lingvo_gshard import TPUEstimator"
    done = _run(code)
    expected = "ImportError: lingvo_gshard.TPUEstimator: orbax is not installed; `pip install ling"
    assert done.stderr.splitlines()[-1].startswith(expected)


def test_another_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'lingvo_gshard' has no attribute 'splitt'"):
        lingvo_gshard.splitt  # noqa: B018


@pytest.mark.parametrize("version", [(3, 10, 13), (3, 14, 0)])
def test_another_python_is_refused_in_one_line(version):
    code = f"import sys; sys.version_info = {version}; sys.argv = ['-m']; import lingvo_gshard"
    done = _run(code)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert re.match(r"lingvo_gshard needs Python 3.11 to 3.13 .* this is 3.1[04];", done.stderr)
    done = _run(code.replace("['-m']", "['x']"))
    assert "ImportError: lingvo_gshard needs Python 3.11 to 3.13" in done.stderr
