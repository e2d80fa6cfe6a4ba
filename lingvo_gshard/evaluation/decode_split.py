"""Translates a split of every language with a trained run and scores the translations."""

import dataclasses
import itertools
import pathlib
import shutil
from collections.abc import Iterator

from lingvo_gshard.evaluation import quality
from lingvo_gshard.evaluation.quality import LanguageQuality, Quality
from lingvo_gshard.files import atomic_file, digests, storage
from lingvo_gshard.input import manifest, sentences
from lingvo_gshard.input.manifest import Language
from lingvo_gshard.runs.launch import check_decoded, recorded
from lingvo_gshard.runs.run import Run
from lingvo_gshard.spmd import processes
from lingvo_gshard.translation.chunks import Parts
from lingvo_gshard.translation.translator import NBest, Translator


@dataclasses.dataclass(frozen=True)
class _Texts:
    """The lines of a language, equally many of each kind."""

    translations: list[str]
    sources: list[str]
    references: list[str]


def decode_split(run: Run, split: str) -> None:
    """Writes LOGDIR/decode_SPLIT and prints the scores by language.

    The folder gets LANGUAGE.txt with one translation per line, LANGUAGE.source.txt and
    LANGUAGE.reference.txt beside it, scores.json and bleu.png. Until then, its folder `parts` holds
    what is done, and another call resumes there. All processes must call it; process 0 scores, one
    language at a time. Raises ValueError if the run was never trained, no language has the split or
    its text is damaged, or decode.max_sentences is below 1.
    """
    check_decoded(run.launch.model, run.params)
    recorded(run.logdir)  # Refuses a folder that was never trained in.
    languages = _languages(run, split)
    folder = pathlib.Path(run.logdir, f"decode_{split}")
    folder.mkdir(exist_ok=True)

    # Batches mix languages, so that they are full and each length needs one program only.
    digests_of_texts = {language.code: language.text[split].sha256 for language in languages}
    parts = Parts(folder / "parts", Translator(*run.decoder()), _best, digests_of_texts)
    num_parts = parts.write(_sources(run, split, languages))

    # The parts hold all that a restart needs, so they go last.
    if processes.is_first():
        scores = _score(run, split, languages, folder, parts.lines(num_parts))
        scores.save(folder / "scores.json")
        scores.draw(folder / "bleu.png")
        shutil.rmtree(parts.folder)
        _print(scores, folder)


def _languages(run: Run, split: str) -> list[Language]:
    """Returns the languages that have the split, with their text checked."""
    data_dir = run.launch.data_dir
    max_sentences = run.params.decode.max_sentences
    if max_sentences is not None and max_sentences < 1:
        raise ValueError(f"decode.max_sentences must be 1 or more, or None, got {max_sentences}.")

    all_languages = manifest.load(data_dir).languages
    languages = [language for language in all_languages if split in language.text]
    if not languages:
        splits: set[str] = set()
        for language in all_languages:
            splits.update(language.text)
        known = ", ".join(sorted(splits)) or "none"
        raise ValueError(
            f"{data_dir}: no language has a {split} split to decode; there is {known}."
        )

    digests.verify(data_dir, [language.text[split] for language in languages])
    return languages


def _sources(run: Run, split: str, languages: list[Language]) -> Iterator[str]:
    """Yields the source sentences of all languages."""
    for language in languages:
        for source, _ in _pairs(run, split, language):
            yield source


def _pairs(run: Run, split: str, language: Language) -> Iterator[tuple[str, str]]:
    """Yields the source sentences of a language and their references."""
    path = digests.local(run.launch.data_dir, language.text[split])
    return itertools.islice(sentences.eval_text(path), run.params.decode.max_sentences)


def _best(translations: NBest) -> str:
    return translations[0].text


def _score(
    run: Run, split: str, languages: list[Language], folder: pathlib.Path, lines: Iterator[str]
) -> Quality:
    """Writes each language's texts and returns the scores; `lines` has all translations."""
    qualities = []
    for language in languages:
        pairs = list(_pairs(run, split, language))
        texts = _Texts(
            translations=[line.rstrip("\n") for line in itertools.islice(lines, len(pairs))],
            sources=[source for source, _ in pairs],
            references=[reference for _, reference in pairs],
        )
        _write(folder, language.code, texts)

        scores = {
            metric: quality.score(metric, texts.translations, texts.references)
            for metric in quality.available()
        }
        train_pairs = language.num_examples("train")
        qualities.append(LanguageQuality(language.code, train_pairs, len(pairs), **scores))

    return Quality(tuple(qualities))


def _write(folder: pathlib.Path, code: str, texts: _Texts) -> None:
    files = {
        f"{code}.txt": texts.translations,
        f"{code}.source.txt": texts.sources,
        f"{code}.reference.txt": texts.references,
    }
    for name, lines in files.items():
        atomic_file.write(folder / name, "".join(f"{line}\n" for line in lines))


def _print(scores: Quality, folder: pathlib.Path) -> None:
    print(scores.table())
    if "spbleu" not in quality.available():
        print(f"spBLEU needs its tokenizer's model in {quality.SPBLEU_MODEL}.")
    written = storage.origin(folder)
    print(f"Wrote {written}/scores.json, bleu.png and one file of translations per language.")
