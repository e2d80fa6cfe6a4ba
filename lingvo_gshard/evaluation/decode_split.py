"""Decodes a split of every language with a trained run, and scores the translations."""

import abc
import dataclasses
import itertools
import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence

from lingvo_gshard.decoding.chunks import Parts
from lingvo_gshard.decoding.generator import Generator
from lingvo_gshard.decoding.outcomes import CutLines, Finish, Line, NoResultError
from lingvo_gshard.decoding.text_decoder import NBest, TextDecoder
from lingvo_gshard.decoding.translator import Translator
from lingvo_gshard.evaluation import quality, tokenization
from lingvo_gshard.evaluation.quality import LanguageQuality, Quality
from lingvo_gshard.input import example_codec, manifest, sentences
from lingvo_gshard.input.manifest import Kind, Language
from lingvo_gshard.input.normalization import one_line
from lingvo_gshard.runs.launch import check_decoded, decoded_languages, recorded
from lingvo_gshard.runs.run import Run
from lingvo_gshard.spmd import processes
from xla_spmd.files import atomic_file, digests, storage

Tell = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class _Example:
    """A line to decode, the text of its input without language tokens, and the expected result."""

    line: str
    source: str
    reference: str


@dataclasses.dataclass(frozen=True)
class _Texts:
    """The lines of a language, as many of each kind, and the number of results that were cut."""

    language: Language
    results: list[str]
    num_cut: int
    sources: list[str]
    references: list[str]


class _SplitDecoding(abc.ABC):
    """A split of some languages to decode; a subclass for each kind of data."""

    text_decoder: TextDecoder

    def __init__(self, run: Run, split: str, languages: Sequence[Language]) -> None:
        """A subclass reads the weights."""
        self.run = run
        self.split = split
        self.languages = languages

    @abc.abstractmethod
    def read(self, language: Language, path: pathlib.Path) -> Iterator[_Example]:
        """Yields the examples of a language's file."""

    @abc.abstractmethod
    def conclude(self, texts: Iterator[_Texts], folder: pathlib.Path, tell: Tell) -> Quality | None:
        """Writes and returns the results of all languages, and passes a report to `tell`."""

    def examples(self, language: Language) -> Iterator[_Example]:
        """Yields the examples of a language that are to be decoded."""
        path = digests.local(_data_dir(self.run), language.text[self.split])
        return itertools.islice(self.read(language, path), self.run.params.decode.max_sentences)

    def lines(self) -> Iterator[str]:
        """Yields the lines of all languages."""
        for language in self.languages:
            for example in self.examples(language):
                yield example.line

    def place(self, number: int) -> str:
        """Returns the name of a line within its language, by its number, from 1, in all."""
        for language in self.languages:
            count = sum(1 for _ in self.examples(language))
            if number <= count:
                return _named(language, number)
            number -= count
        raise AssertionError(f"{number} lines more than the {self.split} split has")

    def written(
        self, folder: pathlib.Path, lines: Iterator[Line], cut_lines: CutLines
    ) -> Iterator[_Texts]:
        """Writes each language's texts and yields them; `lines` has the results of all languages.

        Counts the results in `cut_lines`.
        """
        source_name = self.text_decoder.spec.reading.input_name
        for language in self.languages:
            examples = list(self.examples(language))
            results = list(itertools.islice(lines, len(examples)))
            for number, result in enumerate(results, start=1):
                cut_lines.count(_named(language, number), result.finish)

            of_language = _Texts(
                language,
                results=[result.text for result in results],
                num_cut=sum(result.finish is Finish.LENGTH for result in results),
                sources=[example.source for example in examples],
                references=[example.reference for example in examples],
            )

            code = language.code
            _write(folder / f"{code}.txt", of_language.results)
            _write(folder / f"{code}.{source_name}.txt", of_language.sources)
            _write(folder / f"{code}.reference.txt", of_language.references)
            yield of_language


def decode_split(run: Run, split: str, tell: Tell = print) -> Quality | None:
    """Writes LOGDIR/decode_SPLIT; for translations, returns the scores by language.

    The folder gets LANGUAGE.txt with one translation per line, LANGUAGE.source.txt and
    LANGUAGE.reference.txt beside it, scores.json and bleu.png. A language model continues the first
    decode.prompt_len tokens of each document: CORPUS.txt has its continuations, CORPUS.prompt.txt
    the prompts, and CORPUS.reference.txt the rest of the documents. All of these files have text
    alone, without tokens of languages. A warning counts the results that were cut at the maximum
    length.

    Until the end, finished parts are in the folder's own folder `parts`, and another call resumes
    from them. All processes must call it; process 0 scores, one language at a time, and alone
    returns the scores.

    Raises ValueError if the run was never trained; if no language has the split or its text is
    damaged; if decode.max_sentences or decode.prompt_len is out of its range; or if the model's
    numbers for a line are not finite.
    """
    check_decoded(run.launch.model, run.params)
    recorded(run.logdir)  # Refuses a folder in which nothing was trained.
    languages = decoded_languages(run.launch, run.params, split)
    digests.verify(_data_dir(run), [language.text[split] for language in languages])
    decoding = _KINDS[manifest.load(_data_dir(run)).kind](run, split, languages)
    folder = pathlib.Path(run.logdir, f"decode_{split}")
    with processes.locked(folder, "decodes to this folder"):
        folder.mkdir(exist_ok=True)
        return _decode(decoding, folder, tell)


def _decode(decoding: _SplitDecoding, folder: pathlib.Path, tell: Tell) -> Quality | None:
    """Decodes a split into a folder that no other program writes."""
    # Batches mix languages, so that they are full and each length needs only one program.
    digests_of_texts = {
        language.code: language.text[decoding.split].sha256 for language in decoding.languages
    }
    seed = decoding.run.params.decode.seed
    parts = Parts(folder / "parts", decoding.text_decoder, _best, digests_of_texts, seed)
    try:
        num_lines = sum(1 for _ in decoding.lines())
        num_parts = parts.write(decoding.lines(), num_lines)
    except NoResultError as error:
        place = decoding.place(error.number)
        raise NoResultError(place, decoding.text_decoder.spec.reading.noun) from error

    # The parts are all that a restart needs, so they are deleted last.
    if processes.is_first():
        cut_lines = CutLines()
        written = decoding.written(folder, parts.lines(num_parts), cut_lines)
        scores = decoding.conclude(written, folder, tell)
        cut_lines.warn()
        shutil.rmtree(parts.folder)
        return scores
    return None


class _Translations(_SplitDecoding):
    """Sentences and their translations."""

    text_decoder: Translator

    def __init__(self, run: Run, split: str, languages: Sequence[Language]) -> None:
        super().__init__(run, split, languages)
        self.text_decoder = Translator(*run.decoder())

    def read(self, language: Language, path: pathlib.Path) -> Iterator[_Example]:
        for raw_source, reference in sentences.eval_text(path):
            line = language.line(raw_source)
            # Other programs read this source, so it must not contain tokens of languages.
            source = one_line(self.text_decoder.source(line))
            # References are normalized like results, and files have one line for each sentence.
            yield _Example(line, source, self.text_decoder.written(reference))

    def conclude(self, texts: Iterator[_Texts], folder: pathlib.Path, tell: Tell) -> Quality | None:
        """Writes and returns the scores, and passes their table to `tell`."""
        codes = [language.code for language in manifest.load(_data_dir(self.run)).languages]
        qualities = []
        targets = set()
        for of_language in texts:
            language = of_language.language
            num_sentences = len(of_language.results)
            if num_sentences == 0:
                tell(f"{language.code}: there are no sentences to score.")
                continue

            _, target = example_codec.sides(language.code, codes)
            targets.add(target)
            scores = {
                metric: quality.score(metric, of_language.results, of_language.references, target)
                for metric in quality.available()
            }
            train_pairs = language.num_examples("train")
            cut_share = of_language.num_cut / num_sentences
            qualities.append(
                LanguageQuality(
                    language.code, train_pairs, num_sentences, cut_share=cut_share, **scores
                )
            )

        if not qualities:
            raise ValueError(f"{storage.origin(folder)}: there are no sentences to score.")
        scores_of_all = Quality(tuple(qualities))
        scores_of_all.save(folder / "scores.json")
        scores_of_all.draw(folder / "bleu.png")
        tell("\n".join([scores_of_all.table(), *tokenization.advice(sorted(targets))]))
        if "spbleu" not in quality.available():
            tell(f"spBLEU is left out: its tokenizer's model is not at {quality.SPBLEU_MODEL}.")
        written = storage.origin(folder)
        tell(f"Wrote {written}/scores.json, bleu.png and one file of translations per language.")
        return scores_of_all


class _Continuations(_SplitDecoding):
    """Documents, whose first tokens are the model's prompts."""

    text_decoder: Generator

    def __init__(self, run: Run, split: str, languages: Sequence[Language]) -> None:
        """Raises ValueError if prompts are longer than the model can read."""
        super().__init__(run, split, languages)
        decode = run.params.decode
        if not 1 <= decode.prompt_len <= decode.max_prompt_len:
            raise ValueError(
                f"decode.prompt_len must be 1 to max_prompt_len {decode.max_prompt_len}, got "
                f"{decode.prompt_len}."
            )
        self.text_decoder = Generator(*run.decoder(), first_tokens=decode.prompt_len)

    def read(self, language: Language, path: pathlib.Path) -> Iterator[_Example]:
        for document in sentences.eval_documents(path):
            prompt, rest = self.text_decoder.divided(document)
            yield _Example(document, prompt, rest)

    def conclude(self, texts: Iterator[_Texts], folder: pathlib.Path, tell: Tell) -> Quality | None:
        num_documents = sum(len(of_corpus.results) for of_corpus in texts)
        written = storage.origin(folder)
        tell(f"Wrote the continuations of {num_documents} documents to {written}.")
        return None


_KINDS: dict[str, type[_SplitDecoding]] = {Kind.PARALLEL: _Translations, Kind.TEXT: _Continuations}


def _data_dir(run: Run) -> str:
    """Returns the prepared folder; every run of a task that decodes text has one."""
    assert run.launch.data_dir is not None
    return run.launch.data_dir


def _named(language: Language, number: int) -> str:
    return f"line {number} of {language.code}"


def _best(results: NBest) -> Line:
    return Line(results[0].text, results[0].finish)


def _write(path: pathlib.Path, lines: Sequence[str]) -> None:
    atomic_file.write(path, "".join(f"{line}\n" for line in lines))
