"""The routes that OpenAI's clients use."""

import dataclasses
import json
import re

import pytest

from tests.serving.shouter import SPEC, Shouter, post, with_client

_PATH = "/v1/completions"
_CHATS = "/v1/chat/completions"
_TEXT = dataclasses.replace(SPEC, kind="text", languages=("books",))
_SAMPLED = dataclasses.replace(_TEXT, is_sampled=True)


def _answer(body, status=200, spec=_TEXT, path=_PATH):
    async def act(client):
        return await post(client, body, status, path)

    return with_client(act, Shouter(spec=spec))


def _texts(answer):
    return [(choice["index"], choice["text"]) for choice in answer["choices"]]


def test_prompts_get_choices_and_their_tokens_are_counted():
    answer = _answer({"model": "toy", "prompt": ["ab", "c"], "n": 2, "temperature": 0})
    assert _texts(answer) == [(0, "AB"), (1, "?"), (2, "C"), (3, "?")]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop"] * 4
    # A letter is a token, and so is the end; the fake's results have two tokens and zero tokens.
    usage = {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}
    assert answer["usage"] == usage
    assert answer["object"] == "text_completion" and answer["model"] == "toy"
    assert re.fullmatch(r"cmpl-[0-9a-f]{32}", answer["id"])


def test_max_tokens_and_stop_cut_a_result():
    (choice,) = _answer({"prompt": "xyz", "max_tokens": 1})["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("A", "length")
    (choice,) = _answer({"prompt": "xyz", "max_tokens": 2})["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("XYZ", "stop")
    (choice,) = _answer({"prompt": "xyz", "stop": ["Z", "Y"], "echo": True})["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("xyzX", "stop")


def test_logprobs_are_the_tokens():
    (choice,) = _answer({"prompt": "x", "logprobs": 0})["choices"]
    expected = {"tokens": ["A", "</s>"], "token_logprobs": [-0.75, -0.25], "top_logprobs": None}
    assert choice["logprobs"] == expected
    assert _answer({"prompt": "x"})["choices"][0]["logprobs"] is None


def test_a_stream_has_one_event_with_everything():
    async def act(client):
        async with client.post(_PATH, json={"prompt": "x", "stream": True}) as answer:
            assert answer.content_type == "text/event-stream"
            return await answer.text()

    first, last, end = with_client(act, Shouter(spec=_TEXT)).split("\n\n")
    assert _texts(json.loads(first.removeprefix("data: "))) == [(0, "X")]
    assert (last, end) == ("data: [DONE]", "")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "Expected a JSON object"),
        ({}, 'Expected {"prompt": ...}'),
        ({"prompt": [1, 2]}, 'Expected {"prompt": ...}'),
        ({"prompt": "a", "model": "gpt"}, "model: this server has toy, not 'gpt'"),
        ({"prompt": "a", "n": 3}, "n: expected 1 to 2, got 3"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens: expected 1 or more, got 0"),
        ({"prompt": "a", "temperature": 0.7}, "temperature: 0.7; toy searches"),
        ({"prompt": "a", "presence_penalty": 1}, "presence_penalty: 1 is not supported"),
        ({"prompt": "a", "logprobs": 5}, "logprobs: expected 0"),
        ({"prompt": "a", "stop": [""]}, "stop: expected a text"),
        ({"prompt": "a", "seed": -1}, "seed: expected 0 to"),
        ({"prompt": "a", "stream": 1}, "stream: expected true or false"),
    ],
)
def test_unsupported_fields_are_refused_in_the_form_of_openai(body, message):
    error = _answer(body, 400)["error"]
    assert error["message"].startswith(message) and error["type"] == "invalid_request_error"


def test_samples_have_the_temperature_of_their_export():
    error = _answer({"prompt": "a", "temperature": 0}, 400, _SAMPLED)["error"]
    assert "samples at the temperature of its export" in error["message"]


def test_a_translation_model_has_no_completions_and_both_are_listed():
    error = _answer({"prompt": "a"}, 404, SPEC)["error"]
    assert "translates lines; POST to /translate" in error["message"]

    async def act(client):
        async with client.get("/v1/models") as answer:
            return await answer.json()

    listed = with_client(act)
    assert listed["object"] == "list" and [model["id"] for model in listed["data"]] == ["toy"]


def _messages(*contents):
    return [{"role": "user", "content": content} for content in contents]


def test_a_chat_is_answered():
    body = {"messages": _messages("ab", "c"), "n": 2, "max_completion_tokens": 2}
    answer = _answer(body, path=_CHATS)
    texts = [(choice["index"], choice["message"]) for choice in answer["choices"]]
    assert texts == [
        (0, {"role": "assistant", "content": "AB|C"}),
        (1, {"role": "assistant", "content": "?"}),
    ]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["object"] == "chat.completion" and answer["usage"]["prompt_tokens"] == 5
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", answer["id"])


def test_a_stream_of_a_chat_has_one_event_with_everything():
    async def act(client):
        body = {"messages": _messages("x"), "stream": True}
        async with client.post(_CHATS, json=body) as answer:
            return await answer.text()

    first, last, end = with_client(act, Shouter(spec=_TEXT)).split("\n\n")
    fields = json.loads(first.removeprefix("data: "))
    assert fields["object"] == "chat.completion.chunk"
    assert fields["choices"][0]["delta"] == {"role": "assistant", "content": "X"}
    assert (last, end) == ("data: [DONE]", "")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "Expected a JSON object"),
        ({}, 'Expected {"messages": ['),
        ({"messages": []}, 'Expected {"messages": ['),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, 'Expected {"messages": ['),
        ({"messages": _messages("a"), "tools": [{"type": "function"}]}, "tools: "),
        ({"messages": [{"role": "system", "content": "a"}]}, "the chat template fails: only users"),
    ],
)
def test_chats_that_cannot_be_answered_are_refused(body, message):
    assert _answer(body, 400, path=_CHATS)["error"]["message"].startswith(message)
