"""The page in a headless Chromium: it sends the form and shows the answer."""

import asyncio
import re
import shutil
import urllib.parse

import numpy as np
from aiohttp.test_utils import TestServer

from lingvo_gshard.serving.app import Server
from lingvo_gshard.translation.bundle import DecoderSpec
from lingvo_gshard.translation.translator import Attention, Part, Translation

_SPEC = DecoderSpec("toy", ("de", "fr"), 4, (16,), 3, 1)


class _Echo:
    num_rows, spec = 4, _SPEC

    def num_tokens(self, lines):
        return [1] * len(lines)

    @property
    def decoder(self):
        return self

    def compile(self):
        pass

    def parts(self, line):
        return [Part(np.array([*map(ord, line)]), 16)]

    def translate_parts(self, parts):
        return list(self._translate(["".join(map(chr, part.ids)) for part in parts]))

    def _translate(self, lines):
        drawn = Attention(("▁gu", "ten"), ("▁good", "</s>"), ((0.75, 0.25), (0.0, 1.0)))
        for line in lines:
            yield tuple(Translation(f"{line} {i}", -0.5 * i, 2, drawn) for i in range(3))


def _chromium():
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    assert found, "no chromium on PATH: `make setup-chromium` installs it"
    return found


def _dom(profile, **query):
    """Returns the HTML after the page's scripts have run; a query fills in and sends the form.

    `profile` is an empty folder for the browser.
    """

    async def run():
        async with TestServer(Server(_Echo()).app()) as server:
            url = f"{server.make_url('/')}?{urllib.parse.urlencode(query)}"
            browser = await asyncio.create_subprocess_exec(
                _chromium(),
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                f"--user-data-dir={profile}",
                "--virtual-time-budget=10000",
                "--dump-dom",
                url,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            out, err = await asyncio.wait_for(browser.communicate(), 120)
            assert out, err.decode()
            return out.decode()

    return asyncio.run(run())


def test_it_shows_the_n_best_of_each_line_and_draws_attention(tmp_path):
    dom = _dom(tmp_path, text="guten\n<b>tag</b>", nbest=2, source_lang="fr")
    items = re.findall(r"<li>(.*?)<span class=\"score\">(.*?)</span></li>", dom)
    escaped = "&lt;b&gt;tag&lt;/b&gt;"
    assert items == [
        ("guten 0", "0.000"),
        ("guten 1", "-0.500"),
        (f"{escaped} 0", "0.000"),
        (f"{escaped} 1", "-0.500"),
    ]
    assert re.findall(r'<p class="source">(.*?)</p>', dom) == ["guten", "&lt;b&gt;tag&lt;/b&gt;"]
    assert dom.count('<ol title="with the log-probability, normalized by length: 0 is best">') == 2
    assert dom.count("<table>") == 2 and dom.count("▁good") == 2
    assert re.findall(r'<td title="([\d.]+)"', dom)[:4] == ["0.750", "0.250", "0.000", "1.000"]


def test_it_lists_the_languages_and_sends_nothing_by_itself(tmp_path):
    dom = _dom(tmp_path)
    assert re.findall(r'<option value="(\w*)">', dom) == ["", "de", "fr"]
    assert 'max="3"' in dom and "<li>" not in dom


def test_it_shows_errors(tmp_path):
    dom = _dom(tmp_path, text="guten", nbest=9)
    assert "nbest: expected 1 to 3, got 9." in dom and "<li>" not in dom


def test_it_says_that_the_server_is_gone(tmp_path, monkeypatch):
    async def hang_up(self, request):
        request.transport.abort()
        raise ConnectionResetError

    monkeypatch.setattr(Server, "_translate", hang_up)
    dom = _dom(tmp_path, text="guten")
    assert "The server does not answer." in dom and "<button>Translate</button>" in dom
