"""Requests and answers of OpenAI's completions, for the programs that are written for them.

    POST /v1/completions         {"model": "toy.LmMoE8E4L", "prompt": "Once", "max_tokens": 20} ->
                                 {"choices": [{"text", "finish_reason", "logprobs"}, ...], "usage"}
    POST /v1/chat/completions    {"messages": [{"role": "user", "content": "Hello"}]} ->
                                 {"choices": [{"message", "finish_reason"}, ...], "usage"}
    GET  /v1/models              the one model that is served

A bundle has fixed how it searches or samples, so a request that asks for another temperature or
penalty is refused. Chats need a model whose tokenizer has a chat template.
"""

import dataclasses
import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from lingvo_gshard.decoding.bundle_spec import DecoderSpec
from lingvo_gshard.decoding.generator import Generator
from lingvo_gshard.decoding.outcomes import Finish
from lingvo_gshard.decoding.text_decoder import Hypothesis, NBest
from lingvo_gshard.serving import messages
from lingvo_gshard.serving.messages import refused

# Fields that change nothing at these values, and that no bundle can change.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tools": ([],),
    "top_p": (1,),
}
_MAX_STOPS = 4


@dataclasses.dataclass(frozen=True)
class Asked:
    """The contents of a request."""

    prompts: list[str]
    num_choices: int  # For each prompt.
    max_tokens: int | None
    stops: tuple[str, ...]
    seed: int
    has_logprobs: bool
    has_echo: bool
    is_streamed: bool


def asked(body: Any, spec: DecoderSpec) -> Asked:
    """Returns the contents of a request. Raises HTTPBadRequest if they are invalid."""
    if not isinstance(body, dict):
        raise refused("Expected a JSON object.")
    # A null is the same as no field.
    body = {name: value for name, value in body.items() if value is not None}
    if body.get("model", spec.model) != spec.model:
        raise refused(f"model: this server has {spec.model}, not {body['model']!r}.")
    for name, neutral in _NEUTRAL.items():
        if name in body and body[name] not in neutral:
            raise refused(f"{name}: {body[name]!r} is not supported; leave it out.")
    _check_temperature(body.get("temperature"), spec)

    max_tokens = body.get("max_tokens")
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise refused(f"max_tokens: expected 1 or more, got {max_tokens!r}.")
    # The program returns the tokens of a result, and no others.
    logprobs = body.get("logprobs", False)
    if logprobs not in (0, False):
        raise refused(f"logprobs: expected 0, for the tokens alone, got {logprobs!r}.")

    return Asked(
        prompts=_prompts(body.get("prompt")),
        num_choices=messages.nbest(body.get("n", 1), spec, "n"),
        max_tokens=max_tokens,
        stops=_stops(body.get("stop", [])),
        seed=messages.seed(body.get("seed")),
        has_logprobs=logprobs is not False,
        has_echo=_flag("echo", body),
        is_streamed=_flag("stream", body),
    )


def asked_chat(body: Any, generator: Generator) -> Asked:
    """Returns the contents of a request about a chat, whose prompt is for `generator.of_chats`.

    Raises HTTPBadRequest if they are invalid, or if the model has no chats.
    """
    if not isinstance(body, dict):
        raise refused("Expected a JSON object.")
    chat = body.get("messages")
    if not isinstance(chat, list) or not chat or not all(map(_is_message, chat)):
        raise refused('Expected {"messages": [{"role": ..., "content": ...}, ...]} with texts.')
    messages.check_is_text("messages", [message["content"] for message in chat])
    try:
        prompt = generator.chat(chat)
    except ValueError as error:
        raise refused(str(error)) from error

    max_tokens = body.get("max_completion_tokens")
    if max_tokens is None:
        max_tokens = body.get("max_tokens")
    of_prompt = {"prompt": prompt, "max_tokens": max_tokens, "echo": False}
    return asked(body | of_prompt, generator.spec)


def _is_message(message: Any) -> bool:
    fields = message if isinstance(message, dict) else {}
    return isinstance(fields.get("role"), str) and isinstance(fields.get("content"), str)


def _prompts(prompt: Any) -> list[str]:
    prompts = prompt if isinstance(prompt, list) else [prompt]
    if not all(isinstance(text, str) for text in prompts):
        raise refused('Expected {"prompt": ...}, a string or a list of strings.')
    messages.check_is_text("prompt", prompts)
    return prompts


def _check_temperature(temperature: Any, spec: DecoderSpec) -> None:
    # A beam finds the likeliest results, as the temperature 0 does.
    is_fixed = temperature is None or (temperature == 0 and not spec.is_sampled)
    if not is_fixed:
        how = "samples at the temperature of its export" if spec.is_sampled else "searches"
        raise refused(f"temperature: {temperature!r}; {spec.model} {how}; leave it out.")


def _stops(stop: Any) -> tuple[str, ...]:
    stops = stop if isinstance(stop, list) else [stop]
    if len(stops) > _MAX_STOPS or not all(isinstance(text, str) and text for text in stops):
        raise refused(f"stop: expected a text or a list of up to {_MAX_STOPS}, got {stop!r}.")
    return tuple(stops)


def _flag(name: str, body: dict[str, Any]) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise refused(f"{name}: expected true or false, got {value!r}.")
    return value


def answer(asked: Asked, results: Sequence[NBest], generator: Generator) -> dict[str, Any]:
    """Returns the answer to a request, given the results of its prompts."""
    choices: list[dict[str, Any]] = []
    num_tokens = 0
    for prompt, nbest in zip(asked.prompts, results, strict=True):
        for hypothesis in nbest[: asked.num_choices]:
            choice, count = _choice(asked, prompt, hypothesis, generator)
            choices.append({"index": len(choices), **choice})
            num_tokens += count

    num_prompt_tokens = sum(generator.num_tokens(asked.prompts))
    usage = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
    }
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": generator.spec.model,
        "choices": choices,
        "usage": usage,
    }


def chat_answer(asked: Asked, results: Sequence[NBest], generator: Generator) -> dict[str, Any]:
    """Returns the answer to a request about a chat, given its results."""
    fields = answer(asked, results, generator)
    fields["id"] = f"chat{fields['id']}"
    fields["object"] = "chat.completion.chunk" if asked.is_streamed else "chat.completion"
    for choice in fields["choices"]:
        message = {"role": "assistant", "content": choice.pop("text")}
        choice["delta" if asked.is_streamed else "message"] = message
    return fields


def _choice(
    asked: Asked, prompt: str, hypothesis: Hypothesis, generator: Generator
) -> tuple[dict[str, Any], int]:
    """Returns a choice, and its number of tokens."""
    text = hypothesis.text
    tokens = hypothesis.tokens
    finish = hypothesis.finish
    if asked.max_tokens is not None and len(tokens) > asked.max_tokens:
        tokens = tokens[: asked.max_tokens]
        text = generator.text_of(prompt, [token.id for token in tokens])
        finish = Finish.LENGTH

    places = [text.find(stop) for stop in asked.stops if stop in text]
    if places:
        text = text[: min(places)]
        finish = Finish.STOP

    logprobs = None
    if asked.has_logprobs:
        logprobs = {
            "tokens": [token.piece for token in tokens],
            "token_logprobs": [token.log_prob for token in tokens],
            "top_logprobs": None,
        }
    whole = prompt + text if asked.has_echo else text
    return {"text": whole, "finish_reason": finish.value, "logprobs": logprobs}, len(tokens)


def as_events(fields: dict[str, Any]) -> str:
    """Returns an answer as the events of a stream: one with everything, and the end."""
    return f"data: {json.dumps(fields)}\n\ndata: [DONE]\n\n"


def models(spec: DecoderSpec, created: int) -> dict[str, Any]:
    """Returns the list of the one model; `created` is when it was loaded, in Unix seconds."""
    model = {"id": spec.model, "object": "model", "created": created, "owned_by": "lingvo_gshard"}
    return {"object": "list", "data": [model]}
