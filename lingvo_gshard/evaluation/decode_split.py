"""Decodes a split of every language with a trained run, and scores what has a translation."""

import dataclasses
import itertools
import pathlib
import shutil
from collections.abc import Iterator, Sequence
from typing import Protocol

from lingvo_gshard.decoding.chunks import Parts
from lingvo_gshard.decoding.generator import Generator
from lingvo_gshard.decoding.text_decoder import NBest, TextDecoder
from lingvo_gshard.decoding.translator import Translator
from lingvo_gshard.evaluation import quality, tokenization
from lingvo_gshard.evaluation.quality import LanguageQuality, Quality
from lingvo_gshard.files import atomic_file, digests, storage
from lingvo_gshard.input import example_codec, manifest, sentences
from lingvo_gshard.input.manifest import Kind, Language
from lingvo_gshard.runs.launch import check_data, check_decoded, recorded
from lingvo_gshard.runs.run import Run
from lingvo_gshard.spmd import processes


@dataclasses.dataclass(frozen=True)
class _Example:
    """A line that is decoded, what the model reads of it, and what the result should be."""

    line: str
    source: str
    reference: str


@dataclasses.dataclass(frozen=True)
class _Texts:
    """The lines of a language, equally many of each kind."""

    language: Language
    results: list[str]
    sources: list[str]
    references: list[str]


class _SplitDecoding(Protocol):
    """How a kind of data is decoded."""

    @property
    def text_decoder(self) -> TextDecoder:
        """Decodes lines."""
        ...

    def examples(self, path: pathlib.Path) -> Iterator[_Example]:
        """Yields the examples of a language's file."""
        ...

    def conclude(self, texts: Iterator[_Texts], folder: pathlib.Path) -> None:
        """Writes and prints what the texts of all languages give."""
        ...


def decode_split(run: Run, split: str) -> None:
    """Writes LOGDIR/decode_SPLIT and, of translations, prints the scores by language.

    The folder gets LANGUAGE.txt with one translation per line, LANGUAGE.source.txt and
    LANGUAGE.reference.txt beside it, scores.json and bleu.png. A language model continues the first
    decode.prompt_len tokens of each document: CORPUS.txt has its continuations, CORPUS.prompt.txt
    the prompts, and CORPUS.reference.txt what follows them in the documents.

    Until then, the folder's own folder `parts` holds what is done, and another call resumes there.
    All processes must call it; process 0 scores, one language at a time. Raises ValueError if the
    run was never trained, or on other data; if no language has the split or its text is damaged; or
    if decode.max_sentences or decode.prompt_len is out of its range.
    """
    check_decoded(run.launch.model, run.params)
    recorded(run.logdir)  # Refuses a folder that was never trained in.
    check_data(run.launch, run.logdir)
    languages = _languages(run, split)
    data = manifest.load(_data_dir(run))
    decoding = _KINDS[data.kind](run, [language.code for language in data.languages])
    folder = pathlib.Path(run.logdir, f"decode_{split}")
    with processes.locked(folder, "decodes to this folder"):
        folder.mkdir(exist_ok=True)
        _decode(run, split, languages, decoding, folder)


def _decode(
    run: Run,
    split: str,
    languages: list[Language],
    decoding: _SplitDecoding,
    folder: pathlib.Path,
) -> None:
    """Decodes the split of the languages into a folder that no other program writes."""
    # Batches mix languages, so that they are full and each length needs one program only.
    digests_of_texts = {language.code: language.text[split].sha256 for language in languages}
    parts = Parts(
        folder / "parts", decoding.text_decoder, _best, digests_of_texts, run.params.decode.seed
    )
    num_parts = parts.write(_lines(run, split, languages, decoding))

    # The parts hold all that a restart needs, so they go last.
    if processes.is_first():
        texts = _written(run, split, languages, decoding, folder, parts.lines(num_parts))
        decoding.conclude(texts, folder)
        shutil.rmtree(parts.folder)


class _Translations:
    """Sentences with their translations."""

    def __init__(self, run: Run, codes: Sequence[str]) -> None:
        """Reads the weights; `codes` are those of all languages of the data."""
        self.text_decoder = Translator(*run.decoder())
        self._codes = codes

    def examples(self, path: pathlib.Path) -> Iterator[_Example]:
        for source, reference in sentences.eval_text(path):
            # Both sides of a score have one form, and files have one line for each sentence.
            in_one_line = " ".join(source.split())
            yield _Example(source, in_one_line, self.text_decoder.written(reference))

    def conclude(self, texts: Iterator[_Texts], folder: pathlib.Path) -> None:
        """Writes and prints the scores."""
        qualities = []
        targets = set()
        for of_language in texts:
            language = of_language.language
            num_sentences = len(of_language.results)
            if num_sentences == 0:
                print(f"{language.code} has no sentence to score.")
                continue

            _, target = example_codec.sides(language.code, self._codes)
            targets.add(target)
            scores = {
                metric: quality.score(metric, of_language.results, of_language.references, target)
                for metric in quality.available()
            }
            train_pairs = language.num_examples("train")
            qualities.append(LanguageQuality(language.code, train_pairs, num_sentences, **scores))

        if not qualities:
            raise ValueError(f"{storage.origin(folder)}: there is no sentence to score.")
        scores_of_all = Quality(tuple(qualities))
        scores_of_all.save(folder / "scores.json")
        scores_of_all.draw(folder / "bleu.png")
        print("\n".join([scores_of_all.table(), *tokenization.advice(sorted(targets))]))
        if "spbleu" not in quality.available():
            print(f"spBLEU needs its tokenizer's model in {quality.SPBLEU_MODEL}.")
        written = storage.origin(folder)
        print(f"Wrote {written}/scores.json, bleu.png and one file of translations per language.")


class _Continuations:
    """Documents, of which the model reads the first tokens."""

    def __init__(self, run: Run, codes: Sequence[str]) -> None:
        """Reads the weights. Raises ValueError for prompts longer than the model reads."""
        del codes
        decode = run.params.decode
        if not 1 <= decode.prompt_len <= decode.max_prompt_len:
            raise ValueError(
                f"decode.prompt_len must be 1 to max_prompt_len {decode.max_prompt_len}, got "
                f"{decode.prompt_len}."
            )
        self.text_decoder = Generator(*run.decoder(), first_tokens=decode.prompt_len)

    def examples(self, path: pathlib.Path) -> Iterator[_Example]:
        for document in sentences.eval_documents(path):
            prompt, rest = self.text_decoder.divided(document)
            yield _Example(document, prompt, rest)

    def conclude(self, texts: Iterator[_Texts], folder: pathlib.Path) -> None:
        num_documents = sum(len(of_corpus.results) for of_corpus in texts)
        written = storage.origin(folder)
        print(f"Wrote the continuations of {num_documents} documents to {written}.")


_KINDS: dict[str, type[_Translations] | type[_Continuations]] = {
    Kind.PARALLEL: _Translations,
    Kind.TEXT: _Continuations,
}


def _data_dir(run: Run) -> str:
    """Returns the prepared folder, which every run has whose task decodes text."""
    assert run.launch.data_dir is not None
    return run.launch.data_dir


def _languages(run: Run, split: str) -> list[Language]:
    """Returns the languages that have the split, with their text checked."""
    data_dir = _data_dir(run)
    max_sentences = run.params.decode.max_sentences
    if max_sentences is not None and max_sentences < 1:
        raise ValueError(f"decode.max_sentences must be 1 or more, or None, got {max_sentences}.")

    data = manifest.load(data_dir)
    languages = [language for language in data.languages if split in language.text]
    if not languages:
        splits: set[str] = set()
        for language in data.languages:
            splits.update(language.text)
        known = ", ".join(sorted(splits)) or "none"
        raise ValueError(
            f"{data_dir}: no {data.group} has a {split} split to decode; there is {known}."
        )

    digests.verify(data_dir, [language.text[split] for language in languages])
    return languages


def _lines(
    run: Run, split: str, languages: list[Language], decoding: _SplitDecoding
) -> Iterator[str]:
    """Yields the lines of all languages."""
    for language in languages:
        for example in _examples(run, split, language, decoding):
            yield example.line


def _examples(
    run: Run, split: str, language: Language, decoding: _SplitDecoding
) -> Iterator[_Example]:
    """Yields the examples of a language that are decoded."""
    path = digests.local(_data_dir(run), language.text[split])
    return itertools.islice(decoding.examples(path), run.params.decode.max_sentences)


def _best(results: NBest) -> str:
    return results[0].text


def _written(
    run: Run,
    split: str,
    languages: list[Language],
    decoding: _SplitDecoding,
    folder: pathlib.Path,
    lines: Iterator[str],
) -> Iterator[_Texts]:
    """Writes each language's texts and yields them; `lines` has the results of all."""
    source_name = decoding.text_decoder.spec.input_name
    for language in languages:
        examples = list(_examples(run, split, language, decoding))
        of_language = _Texts(
            language,
            results=[line.rstrip("\n") for line in itertools.islice(lines, len(examples))],
            sources=[example.source for example in examples],
            references=[example.reference for example in examples],
        )

        code = language.code
        _write(folder / f"{code}.txt", of_language.results)
        _write(folder / f"{code}.{source_name}.txt", of_language.sources)
        _write(folder / f"{code}.reference.txt", of_language.references)
        yield of_language


def _write(path: pathlib.Path, lines: Sequence[str]) -> None:
    atomic_file.write(path, "".join(f"{line}\n" for line in lines))
