"""Serving as a program: serving/ has the tests of the server itself."""

import sys

import pytest
from absl import flags
from absl.testing import flagsaver

from lingvo_gshard import cli, serve


def test_serving_without_its_packages_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("lingvo_gshard.serving")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    flags.FLAGS.mark_as_parsed()
    cli.processes.cache_clear()
    message = r"aiohttp: pip install 'lingvo_gshard\[serve\]'"
    with flagsaver.flagsaver(bundle="b"), pytest.raises(ValueError, match=message):
        serve.main()
