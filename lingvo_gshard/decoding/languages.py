"""The languages that a model translates between, and the beginning of a line that names them."""

import dataclasses
import difflib
from collections.abc import Sequence

from lingvo_gshard.input.example_codec import listed, source_languages, target_token
from lingvo_gshard.input.manifest import Kind


@dataclasses.dataclass(frozen=True)
class Languages:
    """The languages of a model, by their codes; DecoderSpec.spoken makes it."""

    kind: str  # The Kind of the data that the model learned from.
    trained_on: tuple[str, ...]  # For a language model, names of corpora.
    sources: tuple[str, ...]  # If the vocabulary has tokens of languages.
    targets: tuple[str, ...]  # Empty if the model translates only into English.

    @property
    def source_languages(self) -> tuple[str, ...]:
        """The codes of the languages to translate from; empty for a language model."""
        if self.kind == Kind.TEXT:
            return ()
        return self.sources or source_languages(self.trained_on)

    def beginning(self, target: str | None, source: str | None = None) -> str:
        """Returns the text that starts a line that is translated from `source` into `target`.

        None means the only target, or an unnamed source. Raises ValueError if the model does not
        translate in this direction, or if a language is None and must be chosen.
        """
        if self.sources:
            _check_named("source_lang", source, self.sources)
            _check_named("target_lang", target, self.targets)
            return f"{source} {target} "

        # The source's beginning names the target, or there is only one target.
        if self.targets:
            _check_named("target_lang", target, self.targets)
            assert target is not None
            return f"{target_token(target)} "
        if target is not None:
            targets = "no language" if self.kind == Kind.TEXT else "English alone"
            raise ValueError(f"target_lang {target}: the model translates into {targets}")
        return ""


def _check_named(option: str, code: str | None, codes: Sequence[str]) -> None:
    """Raises ValueError unless the option names one of the languages."""
    if code in codes:
        return

    given = "is missing" if code is None else code
    near = difflib.get_close_matches(code or "", codes, n=1, cutoff=0.5)
    hint = f". Did you mean {near[0]}?" if near else ""
    raise ValueError(f"{option} {given}: expected one of {listed(codes)}{hint}")
