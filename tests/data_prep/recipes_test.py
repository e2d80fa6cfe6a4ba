"""The recipes on small folders with the layout and names of the real corpora."""

import gzip
import itertools
import pathlib

import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from data_prep import config, engines, pipeline
from data_prep.rules import Rule
from data_prep.sources import ColumnsFile, MosesFiles, Row, TsvFile
from data_prep.tsv import Malformed, Pair
from lingvo_gshard.input import manifest, sentences
from lingvo_gshard.input.batches import TranslationInput

_RECIPES = pathlib.Path(config.__file__).parent / "recipes"
_REPRODUCING = _RECIPES.parents[1] / "repro/recipes"


def _load(name, folder, **settings):
    recipes = {path.stem: path for path in [*_RECIPES.glob("*.toml"), *_REPRODUCING.glob("*.toml")]}
    return config.load(recipes[name], settings, folder)


def _write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())


def _lines(prefix, number):
    return "".join(f"{prefix} {i}\n" for i in range(number))


def test_each_recipe_has_a_test():
    assert {path.stem for path in _RECIPES.glob("*.toml")} == {
        *("opus100", "opus100_evaluated", "ted_multi", "nllb", "multi30k")
    }
    assert {path.stem for path in _REPRODUCING.glob("*.toml")} == {"m4bible", "english"}


def test_opus100(tmp_path):
    files = {}
    for pair, splits in {"de-en": ("train", "dev", "test"), "en-zh": ("train",)}.items():
        for split in splits:
            for side in pair.split("-"):
                number = 90 if split == "train" else 3
                name = f"supervised/{pair}/opus.{pair}-{split}.{side}"
                files[name] = _lines(f"{split} {'水' if side == 'zh' else side}", number)
    files["zero-shot/de-fr/opus.de-fr-test.de"] = files["zero-shot/de-fr/opus.de-fr-test.fr"] = "x"
    _write(tmp_path, files)
    sources, made = _load("opus100", tmp_path, source_vocab_size=300, target_vocab_size=300)
    folders = [tmp_path / "supervised" / pair for pair in ("de-en", "en-zh")]
    assert sources == (
        *(
            MosesFiles(
                folders[0] / f"opus.de-en-{split}.de",
                folders[0] / f"opus.de-en-{split}.en",
                "de",
                split,
            )
            for split in ("dev", "test", "train")
        ),
        MosesFiles(
            folders[1] / "opus.en-zh-train.zh", folders[1] / "opus.en-zh-train.en", "zh", "train"
        ),
    )
    last = pipeline.Step.SELECT
    pipeline.run_through(last, sources, tmp_path / "data", made, engines.pool(1))
    (tmp_path / "supervised/de-en/opus.de-en-dev.en").unlink()
    sources, made = _load("opus100", tmp_path)
    with pytest.raises(ValueError, match=r"opus.de-en-dev.en: there is no such file"):
        pipeline.run_through(last, sources, tmp_path / "other", made, engines.pool(1))


def test_opus100_evaluated(tmp_path):
    """Training text that is in an evaluation set is dropped; the sets have text, not records."""
    pair = "opus-100-corpus/v1.0/supervised/de-en/opus.de-en-train"
    files = {f"{pair}.de": _lines("Satz", 60), f"{pair}.en": _lines("sentence", 60)}
    sets = {
        "floresp-v2.0-rc.3/devtest/devtest.{}": ("deu_Latn", "cat_Latn_vale1252", "eng_Latn"),
        "NTREX/NTREX-128/newstest2019-ref.{}.txt": ("deu", "zho-CN", "aze-Latn", "eng-GB"),
        "NTREX/NTREX-128/newstest2019-src.{}.txt": ("eng",),
    }
    for number, (name, codes) in enumerate(sets.items()):
        files |= {name.format(code): f"{code}\nSentence {3 + number}!\n" for code in codes}
    _write(tmp_path, files | {"NTREX/NTREX-128/newstest2019-ref-2.spa.txt": "x"})
    sources, made = _load("opus100_evaluated", tmp_path, source_vocab_size=320)
    assert [(one.language, one.split, one.english.name.split(".")[1]) for one in sources[1:]] == [
        ("ca-x-vale1252", "flores", "eng_Latn"),
        ("de", "flores", "eng_Latn"),
        ("az-Latn", "ntrex", "eng"),
        ("de", "ntrex", "eng"),
        ("zh-CN", "ntrex", "eng"),
    ]
    pipeline.run_through(pipeline.Step.REPORT, sources, tmp_path / "data", made, engines.pool(1))
    data = manifest.load(tmp_path / "data")
    german, chinese = data.language("de"), data.language("zh-CN")
    assert german.dropped == {"held_out": 2}  # One from each set.
    assert (set(german.records), set(german.text)) == ({"train"}, {"flores", "ntrex"})
    assert (set(chinese.records), set(chinese.text)) == (set(), {"ntrex"})
    text = sentences.eval_text(tmp_path / "data" / german.text["ntrex"].path)
    assert list(text) == [("deu", "eng"), ("Sentence 4!", "Sentence 5!")]
    assert TranslationInput.Facts(str(tmp_path / "data")).languages == ("de",)


def test_nllb(tmp_path):
    row = "ein Satz\ta sentence\t{}\t1.0\t0.9\tcc\t_\tcc\t_\n"
    text = row.format(1.2) + row.format(1.05) + "ein Satz\ta sentence\n" + row.format("x")
    swapped = "a sentence\tune phrase\t1.06\n"
    _write(tmp_path, {"deu_Latn-eng_Latn.gz": text, "eng_Latn-fra_Latn.gz": swapped})
    sources, _ = _load("nllb", tmp_path)
    assert sources == (
        ColumnsFile(tmp_path / "deu_Latn-eng_Latn.gz", "de", 0, 1, 2, 1.06),
        ColumnsFile(tmp_path / "eng_Latn-fra_Latn.gz", "fr", 1, 0, 2, 1.06),
    )
    german = [row.example for row in sources[0].rows()]
    assert (german[0].line, german[1]) == ("ein Satz\ta sentence\n", Rule.LOW_SCORE)
    assert german[2:] == [
        Malformed("there are only 2 columns"),
        Malformed("could not convert string to float: 'x'"),
    ]
    assert [row.example.line for row in sources[1].rows()] == ["une phrase\ta sentence\n"]


def test_ted_multi(tmp_path):
    sources, _ = _load("ted_multi", tmp_path)
    assert [(one.tfds_split, one.split) for one in sources] == [
        ("train", "train"),
        ("validation", "dev"),
        ("test", "test"),
    ]
    texts = {"language": ["calv", "en", "pt-br"], "translation": ["?", "a house", "uma casa"]}
    example = {"talk_name": "x", "translations": texts}

    def made(builder, *args, **kwargs):
        assert builder.name == "ted_multi_translate"
        return tf.data.Dataset.from_tensors(example)

    with tfds.testing.mock_data(as_dataset_fn=made):
        assert list(sources[1].rows()) == [
            Row("calv", Rule.UNKNOWN_LANGUAGE),
            Row("pt", Pair("uma casa", "a house")),
        ]


def test_multi30k(tmp_path):
    raw = tmp_path / "data/task1/raw"
    files = {"train": "train", "dev": "val", "test": "test_2016_flickr"}
    sides = [
        *itertools.product(files.values(), ("cs", "de", "en", "fr")),
        ("test_2017_mscoco", "de"),
    ]
    _write(raw, {f"{name}.{side}.gz": _lines(f"{name} {side}", 3) for name, side in sides})
    sources, _ = _load("multi30k", tmp_path)
    assert sources == tuple(
        MosesFiles(raw / f"{name}.{code}.gz", raw / f"{name}.en.gz", code, split)
        for split, name in files.items()
        for code in ("cs", "de", "fr")
    )
    assert next(sources[3].rows()).example == Pair("val cs 0", "val en 0")


def test_m4bible(tmp_path):
    paths = [
        f"{split}/{code}-en.tsv.gz" for split in ("train", "dev", "test") for code in ("acu", "zh")
    ]
    _write(tmp_path, dict.fromkeys(paths, "a\tb\n") | {"README.md": "x"})
    sources, _ = _load("m4bible", tmp_path)
    assert sources == tuple(
        TsvFile(tmp_path / path, path.split("/")[1].split("-")[0], path.split("/")[0])
        for path in paths
    )


def test_english(tmp_path):
    files = {}
    raw = "multi30k/data/task1/raw"
    for split, name, number in (
        ("train", "train", 40),
        ("dev", "val", 3),
        ("test", "test_2016_flickr", 2),
    ):
        verses = [f"cs {i}\t{split} of m4bible {i}\n" for i in range(number)]
        files[f"m4bible/{split}/cs-en.tsv.gz"] = "".join(verses)
        files[f"{raw}/{name}.de.gz"] = _lines(f"{split} de", number)
        files[f"{raw}/{name}.en.gz"] = _lines(f"{split} of multi30k", number)
    _write(tmp_path, files)

    sources, made = _load("english", tmp_path, text_vocab_size=300)
    pipeline.run_through(pipeline.Step.REPORT, sources, tmp_path / "data", made, engines.pool(1))
    corpora = manifest.load(tmp_path / "data").languages
    counts = {corpus.code: corpus.num_examples("train") for corpus in corpora}
    assert counts == {"bible": 40, "captions": 40}
    for corpus, name in zip(corpora, ("m4bible", "multi30k"), strict=True):
        text = tmp_path / "data" / corpus.text["test"].path
        expected = [f"test of {name} 0", f"test of {name} 1"]
        assert list(sentences.eval_documents(text)) == expected
