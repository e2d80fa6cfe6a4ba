"""Translates a split of every language with a trained run and scores the translations."""

import itertools
import pathlib

from lingvo_gshard.decode.translator import Translator
from lingvo_gshard.evaluation import quality
from lingvo_gshard.input import manifest, sentences
from lingvo_gshard.spmd import processes
from lingvo_gshard.train.run import Run, recorded


def decode_split(run: Run, split: str) -> None:
    """Writes LOGDIR/decode_SPLIT and prints the scores by language.

    The folder gets LANGUAGE.txt with one translation per line, scores.json and bleu.png. All
    processes must call it; process 0 writes. Raises ValueError if the run was never trained, no
    language has the split, or decode.max_sentences is below 1.
    """
    recorded(run.logdir)  # Refuses a folder that was never trained in.
    data_dir, limit = run.launch.data_dir, run.params.decode.max_sentences
    data = manifest.load(data_dir)
    if limit is not None and limit < 1:
        raise ValueError(f"decode.max_sentences must be 1 or more, or None, got {limit}.")
    texts = {
        language.code: sentences.eval_text(data_dir, split, language.code)[:limit]
        for language in data.languages
        if split in language.text
    }
    if not texts:
        raise ValueError(f"{data_dir}: no language has a {split} split to decode.")
    folder = pathlib.Path(run.logdir, f"decode_{split}")
    folder.mkdir(exist_ok=True)
    # Batches mix languages, so that they are full and each length needs one program only.
    lines = (source for pairs in texts.values() for source, _ in pairs)
    translations = Translator(*run.decoder()).translate(lines)
    hypotheses: dict[str, list[str]] = {}
    for code, pairs in texts.items():
        hypotheses[code] = [best.text for best, *_ in itertools.islice(translations, len(pairs))]
        if processes.is_first():
            text = "".join(line + "\n" for line in hypotheses[code])
            (folder / f"{code}.txt").write_text(text)
    if not processes.is_first():
        return
    rows = []
    for code, pairs in texts.items():
        both = hypotheses[code], [english for _, english in pairs]
        scores = [quality.score(metric, *both) for metric in quality.METRICS]
        size = data.language(code).num_examples("train")
        rows.append(quality.LanguageQuality(code, size, len(pairs), *scores))
    found = quality.Quality(tuple(rows))
    found.save(folder / "scores.json")
    found.draw(folder / "bleu.png")
    print(found.table())
    print(f"Wrote {folder}/scores.json, bleu.png and one file of translations per language.")
