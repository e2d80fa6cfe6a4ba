"""Language codes: BCP-47 tags in their canonical form, such as de, zh-Hant or pt-BR."""

import functools

import langcodes

ENGLISH = "en"


@functools.cache
def is_valid(tag: str) -> bool:
    """Whether a tag is well-formed, names a language, and all its parts are registered."""
    is_private = tag.lower().startswith("x-")
    return bool(langcodes.tag_is_valid(tag)) and not is_private


@functools.cache
def code(tag: str) -> str:
    """Returns the canonical form of a tag. Raises ValueError unless `is_valid`."""
    if not is_valid(tag):
        raise ValueError(f"{tag!r} is no language: expected a BCP-47 code, such as de or zh-Hant")
    return langcodes.standardize_tag(tag)


@functools.cache
def primary(tag: str) -> str:
    """The language of a tag without script and region: pt of pt-BR. Raises ValueError as `code`."""
    return str(langcodes.Language.get(code(tag)).language)


def script(tag: str) -> str | None:
    """The ISO 15924 script that a tag names: Hant of zh-Hant, None of zh."""
    return langcodes.Language.get(code(tag)).script
