"""A split of a TensorFlow Datasets translation set, such as ted_multi_translate or wmt14_translate.

Sets have one of two forms: a dictionary of languages (`Translation`: wmt*, opus, para_crawl,
flores), or a list of languages and a list of texts (`TranslationVariableLanguages`:
ted_multi_translate).
"""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

from data_prep import tsv
from data_prep.sources.source import Row, is_english, matching_code


@dataclasses.dataclass(frozen=True)
class TfdsSplit:
    """`name` and `tfds_split` as tfds.load takes them; `languages` None takes all of the set."""

    name: str
    tfds_split: str
    data_dir: pathlib.Path | None = None
    languages: tuple[str, ...] | None = None
    split: str | None = None

    @property
    def files(self) -> tuple[pathlib.Path, ...]:
        """None that are known: what TFDS prepared under this name and version does not change."""
        return ()

    def __str__(self) -> str:
        return f"tfds {self.name}, split {self.tfds_split}"

    def rows(self) -> Iterator[Row]:
        """See Source; ValueError also if there is no such set or split, or it holds no languages.

        A set that is not prepared is downloaded, as TFDS does.
        """
        # Loads TensorFlow, which the other sources do without.
        import tensorflow_datasets as tfds

        try:
            data = tfds.load(self.name, split=self.tfds_split, data_dir=self._data_dir)
        except (tfds.core.registered.DatasetNotFoundError, ValueError, AssertionError) as error:
            raise ValueError(f"{self}: {error}") from error
        for example in tfds.as_numpy(data):
            yield from self._example_rows(example)

    @property
    def _data_dir(self) -> str | None:
        return None if self.data_dir is None else str(self.data_dir)

    def _example_rows(self, example: dict[str, Any]) -> Iterator[Row]:
        texts = self._texts(example)
        english = next((text for tag, text in texts if is_english(tag)), None)
        if english is None:
            return
        for tag, text in texts:
            code = matching_code(tag, self.languages)
            if code is not None:
                yield Row(code, tsv.Pair.of(text, english))

    def _texts(self, example: dict[str, Any]) -> list[tuple[str, str]]:
        """The (language, text) of an example, in whichever of the two forms."""
        found = example.get("translations", example)
        if {"language", "translation"} <= set(found):
            both = zip(found["language"], found["translation"], strict=True)
            return [(tag.decode(), text.decode()) for tag, text in both]
        texts = [(tag, text.decode()) for tag, text in found.items() if isinstance(text, bytes)]
        if len(texts) < 2:
            raise ValueError(f"{self} has features {sorted(example)}: expected a translation set")
        return texts
