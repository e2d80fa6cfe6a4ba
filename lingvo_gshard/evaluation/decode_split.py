"""Translates a split of every language with a trained run and scores the translations."""

import itertools
import pathlib
import shutil
from collections.abc import Iterator

from lingvo_gshard.evaluation import quality
from lingvo_gshard.evaluation.quality import LanguageQuality, Quality
from lingvo_gshard.files import atomic_file, digests, storage
from lingvo_gshard.input import manifest, sentences
from lingvo_gshard.input.manifest import Language
from lingvo_gshard.runs.launch import recorded
from lingvo_gshard.runs.run import Run
from lingvo_gshard.spmd import processes
from lingvo_gshard.translation.chunks import Parts
from lingvo_gshard.translation.translator import Translator


def decode_split(run: Run, split: str) -> None:
    """Writes LOGDIR/decode_SPLIT and prints the scores by language.

    The folder gets LANGUAGE.txt with one translation per line, LANGUAGE.source.txt and
    LANGUAGE.reference.txt beside it, scores.json and bleu.png. Until then, its folder `parts` holds
    what is done, and another call goes on from there. All processes must call it; process 0 scores,
    one language at a time. Raises ValueError if the run was never trained, no language has the
    split or its text is damaged, or decode.max_sentences is below 1.
    """
    recorded(run.logdir)  # Refuses a folder that was never trained in.
    languages, folder = _languages(run, split), pathlib.Path(run.logdir, f"decode_{split}")
    folder.mkdir(exist_ok=True)
    texts = {language.code: language.text[split].sha256 for language in languages}
    translator = Translator(*run.decoder())
    parts = Parts(folder / "parts", translator, lambda found: found[0].text, texts)
    # Batches mix languages, so that they are full and each length needs one program only.
    num_parts = parts.write(x for each in languages for x, _ in _pairs(run, split, each))
    if processes.is_first():
        lines, rows = parts.lines(num_parts), []
        for language in languages:
            pairs = list(_pairs(run, split, language))
            sides = {
                "": [line.rstrip("\n") for line in itertools.islice(lines, len(pairs))],
                "source.": [source for source, _ in pairs],
                "reference.": [english for _, english in pairs],
            }
            for kind, text in sides.items():
                content = "".join(f"{line}\n" for line in text)
                atomic_file.write(folder / f"{language.code}.{kind}txt", content)
            texts_of = sides[""], sides["reference."]
            scores = {each: quality.score(each, *texts_of) for each in quality.available()}
            train_pairs = language.num_examples("train")
            rows.append(LanguageQuality(language.code, train_pairs, len(pairs), **scores))
        found = Quality(tuple(rows))
        found.save(folder / "scores.json")
        found.draw(folder / "bleu.png")
        shutil.rmtree(parts.folder)
        print(found.table())
        if "spbleu" not in quality.available():
            print(f"spBLEU needs its tokenizer's model in {quality.SPBLEU_MODEL}.")
        there = storage.origin(folder)
        print(f"Wrote {there}/scores.json, bleu.png and one file of translations per language.")


def _languages(run: Run, split: str) -> list[Language]:
    data_dir, limit = run.launch.data_dir, run.params.decode.max_sentences
    if limit is not None and limit < 1:
        raise ValueError(f"decode.max_sentences must be 1 or more, or None, got {limit}.")
    languages = manifest.load(data_dir).languages
    found = [each for each in languages if split in each.text]
    if not found:
        there = ", ".join(sorted({name for each in languages for name in each.text})) or "none"
        raise ValueError(
            f"{data_dir}: no language has a {split} split to decode; there is {there}."
        )
    digests.verify(data_dir, [each.text[split] for each in found])
    return found


def _pairs(run: Run, split: str, language: Language) -> Iterator[tuple[str, str]]:
    path = digests.local(run.launch.data_dir, language.text[split])
    return itertools.islice(sentences.eval_text(path), run.params.decode.max_sentences)
