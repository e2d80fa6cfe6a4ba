"""Chat templates: programs in Jinja that write a chat as the text that a model continues.

An imported tokenizer may have one. It comes from others, so it runs in Jinja's sandbox, with the
functions and tags of transformers. Jinja is in the extra `bpe`.
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


def rendered(
    template: str, messages: Sequence[Mapping[str, str]], special_tokens: Mapping[str, str]
) -> str:
    """Returns the text of a chat, up to where the answer to its last message begins.

    A message has a `role`, such as user, and its `content`. `special_tokens` are tokens by their
    names in templates, such as bos_token. Raises ValueError, in one line, if the template is
    damaged or refuses the messages.
    """
    try:
        return _compiled(template).render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=True,
            **special_tokens,
        )
    except Exception as error:  # A template is a program, and can raise any error.
        raise ValueError(f"the chat template fails: {' '.join(str(error).split())}") from error


@functools.lru_cache(maxsize=4)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


class _Generation(Extension):
    """{% generation %}, which marks the texts of a model for training and changes nothing here."""

    tags: ClassVar[set[str]] = {"generation"}  # type: ignore[misc]

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Returns JSON as it is, unlike Jinja's own filter, which escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
