"""The page in a headless Chromium: it sends the form and shows the answer."""

import asyncio
import dataclasses
import re
import shutil
import urllib.parse

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from lingvo_gshard.decoding.bundle_spec import DecoderSpec
from lingvo_gshard.decoding.text_decoder import Attention, Hypothesis, Part
from lingvo_gshard.decoding.translator import Translator
from lingvo_gshard.serving import app
from lingvo_gshard.serving.app import Server

_SPEC = DecoderSpec("toy", ("de", "fr"), 4, (16,), 3, 1)


class _Echo(Translator):
    num_rows, spec = 4, _SPEC

    def __init__(self):
        pass

    def num_tokens(self, lines):
        return [1] * len(lines)

    @property
    def decoder(self):
        return self

    def compile(self):
        pass

    def parts(self, line, number=1, seed=0):
        return [Part(np.array([*map(ord, line)]), 16)] if line.strip() else []

    def decode_parts(self, parts):
        return list(self._translate(["".join(map(chr, part.ids)) for part in parts]))

    def _translate(self, lines):
        drawn = Attention(("▁gu", "ten"), ("▁good", "</s>"), ((0.75, 0.25), (0.0, 1.0)))
        for line in lines:
            yield tuple(Hypothesis(f"{line} {i}", -0.5 * i, 2, drawn) for i in range(3))


def _chromium():
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    assert found, "no chromium on PATH: `make setup-chromium` installs it"
    return found


def _dom(profile, spec=_SPEC, **query):
    """Returns the HTML after the page's scripts have run; a query fills in and sends the form.

    `profile` is an empty folder for the browser.
    """

    async def run():
        echo = _Echo()
        echo.spec = spec
        async with TestServer(Server(echo).app()) as server:
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


def _translations(tag, dom):
    """Returns the texts and scores in elements with a tag."""
    score = r'<span class="score" title="[^"]*">(.*?)</span>'
    return re.findall(rf"<{tag}><bdi>(.*?)</bdi>{score}</{tag}>", dom)


def _sources(dom):
    return re.findall(r'<p class="source" dir="auto">(.*?)</p>', dom)


@pytest.mark.slow
def test_it_shows_the_n_best_of_each_line_and_draws_attention(tmp_path):
    dom = _dom(tmp_path, text="guten\n<b>tag</b>", nbest=2, source_lang="fr")
    lines = dom.split("<article>")[1:]
    assert len(lines) == 2 and all(line.count("<ol>") == 1 for line in lines)
    items = _translations("li", dom)
    escaped = "&lt;b&gt;tag&lt;/b&gt;"
    assert items == [
        ("guten 0", "0.000"),
        ("guten 1", "-0.500"),
        (f"{escaped} 0", "0.000"),
        (f"{escaped} 1", "-0.500"),
    ]
    assert [_sources(line) for line in lines] == [["guten"], [escaped]]
    assert dom.count('title="Score: log-probability, normalized by length; 0 is best."') == 4
    assert dom.count("<table>") == 2 and dom.count("▁good") == 2
    assert re.findall(r'<td title="([\d.]+)"', dom)[:4] == ["0.750", "0.250", "0.000", "1.000"]


@pytest.mark.slow
def test_a_single_translation_has_no_number(tmp_path):
    dom = _dom(tmp_path, text="guten\n\n \ntag")
    assert _translations("p", dom) == [("guten 0", "0.000"), ("tag 0", "0.000")]
    assert _sources(dom) == ["guten", "tag"]  # Blank lines are left out.
    assert "<ol>" not in dom and "<li>" not in dom


@pytest.mark.slow
def test_it_asks_for_prompts_of_a_language_model(tmp_path):
    spec = dataclasses.replace(_SPEC, kind="text")
    dom = _dom(tmp_path, spec, text="once", nbest=2)
    assert _translations("li", dom) == [("once 0", "0.000"), ("once 1", "-0.500")]
    assert "<h1>Generate</h1>" in dom and ">Generate</button>" in dom
    assert '<label hidden="">From' in dom and "Continuations of each prompt<input" in dom


@pytest.mark.slow
def test_it_lists_the_languages_and_sends_nothing_on_its_own(tmp_path):
    dom = _dom(tmp_path)
    assert re.findall(r'<option value="(\w*)">', dom) == ["", "de", "fr"]
    assert 'max="3"' in dom and "<article>" not in dom
    assert '<span id="model">toy</span>' in dom and '<label hidden="">Into' in dom


@pytest.mark.slow
def test_it_is_busy_until_the_answer_arrives(tmp_path, monkeypatch):
    """An observer records each state of the button and of the results."""
    note = """
        new MutationObserver(() => {
          const state = `${button.textContent} ${button.disabled} ${results.ariaBusy}`;
          document.body.dataset.states = [document.body.dataset.states, state].join(";");
        }).observe(button, {childList: true, attributes: true});
    """
    page = tmp_path / "page.html"
    text = app._PAGE.read_text().replace("start().catch", f"{note}\n  start().catch")
    page.write_text(text)
    monkeypatch.setattr(app, "_PAGE", page)
    dom = _dom(tmp_path / "profile", text="guten")
    states = re.search('data-states=";(.*?)"', dom)[1]
    assert states == "Translating true true;Translate false false"
    assert "<article>" in dom


def test_it_shows_errors(tmp_path):
    dom = _dom(tmp_path, text="guten", nbest=9)
    assert "nbest: expected 1 to 3, got 9." in dom and "<article>" not in dom


@pytest.mark.slow
def test_it_shows_the_status_of_an_answer_that_is_not_json(tmp_path, monkeypatch):
    """A proxy may answer like this."""

    async def unavailable(self, route, request):
        return web.Response(status=502, text="<h1>Bad gateway</h1>")

    monkeypatch.setattr(Server, "_decode", unavailable)
    assert "The server answers 502." in _dom(tmp_path, text="guten")


@pytest.mark.slow
def test_it_says_that_the_server_is_gone(tmp_path, monkeypatch):
    async def hang_up(self, route, request):
        request.transport.abort()
        raise ConnectionResetError

    monkeypatch.setattr(Server, "_decode", hang_up)
    dom = _dom(tmp_path, text="guten")
    assert "The server does not answer." in dom and ">Translate</button>" in dom
    assert "disabled" not in dom.split("<script>")[0].split("</style>")[1]


@pytest.mark.slow
def test_it_says_that_the_server_was_gone_when_it_began(tmp_path, monkeypatch):
    async def hang_up(request):
        request.transport.abort()
        raise ConnectionResetError

    monkeypatch.setattr(Server, "_facts", lambda self, facts_of: hang_up)
    assert "The server does not answer." in _dom(tmp_path)
