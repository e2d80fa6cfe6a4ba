"""Writes chats.json: chats as transformers renders them, by the tokenizers of write_bpe.py.

Run it where transformers is installed, in the root of the checkout:

    python -m tests.hugging_face.write_chats

Each case has the name of a model, the contents of `files` of its tokenizer by name, and chats:
their `messages`, and the text and ids of apply_chat_template. transformers 5.24.0 and Jinja 3.1.6
made the file in this folder.
"""

import json
import pathlib
import shutil
import tempfile

from transformers import PreTrainedTokenizerFast

_FOLDER = pathlib.Path(__file__).parent
_CHATS = (
    [("user", "der hund")],
    [("user", "  sah den\n\ndog </s><|end|> "), ("assistant", "a cat"), ("user", "und")],
    [("system", "a cat and"), ("user", "\u00e4 {{ bos_token }}")],
)
_INSTRUCTIONS = """{{ bos_token }}{% for message in messages %}
    {%- if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]
    {%- else %} {{ message.content | trim }}{{ eos_token }}{% endif %}
    {% endfor %}
\r
"""
_TURNS = """{%- set ns = namespace(count=0) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
{{ '<|pad|>' + message.role }}
    {%- if message.role == 'assistant' %}
{% generation %}
        {{- message.content }}
{%- endgeneration %}
    {%- else %}
{{ message | tojson }}
    {%- endif %}
{{ eos_token }}
{% endfor %}
{%- if ns.count > 9 %}{{ raise_exception('too long') }}{% endif %}
{%- if tools or documents or bos_token %}never{% endif %}
{%- if add_generation_prompt %}{{ '<|pad|>assistant\\n' }}{% endif %}
"""
_CASES = {
    "mixtral": (
        {
            "bos_token": {"__type": "AddedToken", "content": "<s>", "special": True},
            "eos_token": "</s>",
            "chat_template": "another",
        },
        _INSTRUCTIONS,
    ),
    "qwen3_moe": (
        {
            "bos_token": None,
            "eos_token": "<|end|>",
            "pad_token": "<|pad|>",
            "chat_template": [
                {"name": "default", "template": _TURNS},
                {"name": "rag", "template": "another"},
            ],
        },
        None,
    ),
}


def main() -> None:
    """Writes the file."""
    cases = [_case(name, config, template) for name, (config, template) in _CASES.items()]
    text = json.dumps(cases, ensure_ascii=False, indent=1) + "\n"
    (_FOLDER / "chats.json").write_text(text, encoding="utf-8")


def _case(name, config, template):
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | config
    files = {"tokenizer_config.json": json.dumps(config)}
    if template is not None:
        files["chat_template.jinja"] = template
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(_FOLDER / "models" / name / "tokenizer.json", folder)
        for file, content in files.items():
            pathlib.Path(folder, file).write_bytes(content.encode())
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)

    chats = []
    for turns in _CHATS:
        messages = [{"role": role, "content": content} for role, content in turns]
        options = {"add_generation_prompt": True}
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        ids = tokenizer.apply_chat_template(messages, return_dict=False, **options)
        chats.append({"messages": messages, "text": text, "ids": ids})
        print(name, repr(text), ids)
    return {"name": name, "files": files, "chats": chats}


if __name__ == "__main__":
    main()
