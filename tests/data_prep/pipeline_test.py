import dataclasses
import functools
import multiprocessing
import os
import pathlib
import random
import shutil
import signal
import sys

import numpy as np
import pytest

from data_prep import deduplication, engines, pipeline, source_cleaning, tsv, tsv_folder
from data_prep.config import BuildConfig
from data_prep.tsv import Pair
from lingvo_gshard.input import manifest, records
from lingvo_gshard.input.bpe_tokenizer import load_pair
from tests.data_prep import prepared
from xla_spmd.files import digests

_CONFIG = BuildConfig(
    source_vocab_size=500,
    target_vocab_size=450,
    max_pieces=30,
    pairs_per_chunk=40,
    pairs_per_shard=90,
)


def _write_corpus(folder: pathlib.Path) -> None:
    for language, count in {"de": 240, "fr": 61}.items():
        pairs = [Pair(f"{language} Satz {i} hier", f"sentence {i} here") for i in range(count)]
        pairs += [Pair(f"{language} Satz 7 hier", "sentence 7 here"), Pair("xy " * 40, "vz " * 40)]
        if language == "de":
            pairs.append(Pair("schÃ¶n hier", "nice here"))
        tsv.write(folder / "train" / f"{language}-en.tsv.gz", pairs)
    held = [Pair(f"Probe \ufb01 {i}", f"Sentence {i} HERE!") for i in range(5)]
    tsv.write(folder / "dev" / "de-en.tsv.gz", [*held, Pair("lang " * 50, "long " * 50)])
    tsv.write(folder / "test" / "ja-en.tsv.gz", [Pair("水", "water")])


def _examples(data_dir, entry):
    source = records.RecordSource(data_dir, entry)
    return source.read(np.arange(len(source)))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline")
    _write_corpus(folder / "text")
    made = prepared.build(folder / "text", folder / "data", _CONFIG)
    return folder, made


def test_counts_and_drops(built):
    _, made = built
    german, french, japanese = made.languages
    assert [german.code, french.code, japanese.code] == ["de", "fr", "ja"]
    # Five English sentences are in dev; one pair repeats; one is longer than 30 pieces.
    assert german.dropped == {"duplicate": 1, "held_out": 5, "too_many_pieces": 1}
    assert german.num_examples("train") == 236
    assert french.dropped == german.dropped
    assert french.num_examples("train") == 56
    assert (german.num_examples("dev"), german.num_examples("test")) == (6, 0)
    assert (japanese.num_examples("train"), japanese.num_examples("test")) == (0, 1)
    assert (german.scripts, japanese.scripts) == (("Latn",), ("Hani",))
    assert (german.repaired, french.repaired) == (1, 0)
    # The mark of a word, water in three bytes, and EOS.
    water = japanese.records["test"]
    assert (water.num_source_tokens, water.num_source_byte_tokens) == (5, 3)


def test_the_manifest_is_saved_and_describes_every_file(built):
    folder, made = built
    data = manifest.load(folder / "data")
    assert data == made
    digests.verify(folder / "data", data.files())
    assert not (folder / "data" / ".unfinished").exists()
    # Chunks of 40 pairs, 35 to 40 of them kept, in files of at most 90.
    shards = data.language("de").records["train"].shards
    assert [shard.num_examples for shard in shards] == [75, 80, 81]


def test_records_decode_to_the_cleaned_text_and_text_is_raw(built):
    folder, made = built
    source, target = load_pair(folder / "data")
    language = made.language("de")
    dev = _examples(folder / "data", language.records["dev"])
    assert source.decode(dev[3].source_ids) == "Probe fi 3"
    assert target.decode(dev[3].target_ids) == "Sentence 3 HERE!"
    raw = list(tsv.read(folder / "data" / language.text["dev"].path))
    assert raw[3] == Pair("Probe \ufb01 3", "Sentence 3 HERE!")
    assert len(raw) == len(dev) == 6
    train = records.RecordSource(folder / "data", language.records["train"])
    examples = _examples(folder / "data", language.records["train"])
    texts = [source.decode(example.source_ids) for example in examples]
    assert texts == [f"de Satz {i} hier" for i in range(5, 240)] + ["schön hier"]
    tokens = [[len(example.source_ids), len(example.target_ids)] for example in examples]
    assert train.lengths.tolist() == tokens
    assert sum(source for source, _ in tokens) == language.records["train"].num_source_tokens


def test_spans_and_groups_do_not_change_the_result(tmp_path, monkeypatch):
    """For plain files without splits, in which one in four lines is malformed."""
    (tmp_path / "text").mkdir()
    for code, number in {"de": 300, "fr": 45}.items():
        lines = [f"{code} {i % 190}\tnumber {i % 190}\n" if i % 4 else "x\n" for i in range(number)]
        (tmp_path / "text" / f"{code}-en.tsv").write_text("".join(lines))
    config = dataclasses.replace(_CONFIG, max_malformed_share=0.3, held_out_share=0.2)
    logged = []
    monkeypatch.setattr(
        source_cleaning.logging, "warning", lambda *args: logged.append(args[0] % args[1:])
    )
    prepared.build(tmp_path / "text", tmp_path / "whole", config)
    of_whole = [line for line in logged if "skipped" in line]
    assert len(of_whole) == 20 and "de-en.tsv:37: skipped: expected 1 tab" in of_whole[9]
    monkeypatch.setattr(tsv, "BYTES_PER_SPAN", 500)
    monkeypatch.setattr(deduplication, "_PAIRS_PER_GROUP", 50)
    prepared.build(tmp_path / "text", tmp_path / "parts", config)
    assert [line for line in logged if "skipped" in line] == of_whole * 2
    assert _contents(tmp_path / "parts") == _contents(tmp_path / "whole")


@pytest.mark.slow
def test_running_step_by_step_gives_the_same_folder(built, tmp_path):
    """Two processes share one step's tasks; in the slow tests, the tasks of all steps."""
    folder, _ = built
    found = tsv_folder.sources_in(folder / "text")
    for step in pipeline.Step:
        num_workers = 2 if step is pipeline.Step.RECORDS else 1
        # The folder may be given by another path when the build is continued.
        relative = pathlib.Path(os.path.relpath(tmp_path))
        out_dir = relative if step is pipeline.Step.CLEAN else tmp_path
        pipeline.run_through(step, found, out_dir, _CONFIG, engines.pool(num_workers))
        assert (tmp_path / "manifest.json").exists() == (step is pipeline.Step.REPORT)
        assert (tmp_path / ".unfinished").exists() == (step is not pipeline.Step.REPORT)
    assert _contents(tmp_path) == _contents(folder / "data")


def test_another_plan_is_refused_and_nothing_is_lost(built, tmp_path):
    folder, _ = built
    found = tsv_folder.sources_in(folder / "text")
    pipeline.run_through(pipeline.Step.SELECT, found, tmp_path, _CONFIG, engines.pool(1))
    finished = shutil.copytree(folder / "data", tmp_path / "finished")
    for out in (tmp_path, finished):
        before = _contents(out)
        with pytest.raises(ValueError, match=r"max_chars = 1000 there, max_chars = 5 given"):
            prepared.build(folder / "text", out, dataclasses.replace(_CONFIG, max_chars=5))
        assert _contents(out) == before


def test_another_modification_time_is_accepted(tmp_path):
    text = tmp_path / "text"
    out = tmp_path / "data"
    _write_corpus(text)
    file = text / "dev/de-en.tsv.gz"
    sources = tsv_folder.sources_in(text)

    def survey():
        pipeline.run_through(pipeline.Step.SURVEY, sources, out, _CONFIG, engines.pool(1))

    survey()
    os.utime(file, (1, 1))
    survey()
    assert "modified 1000000000, " in (out / "plan.txt").read_text()

    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"was begun with other text.*: {file}: \d+ bytes, SHA"):
        survey()


def test_a_finished_build_is_not_repeated(built, tmp_path):
    folder, made = built
    data = shutil.copytree(folder / "data", tmp_path / "data")
    # The state after a run that was killed after its last step.
    (data / ".unfinished").mkdir()
    times = {path: path.stat().st_mtime_ns for path in data.rglob("*")}
    assert prepared.build(folder / "text", data, _CONFIG) == made
    assert not (data / ".unfinished").exists()
    assert all(path.stat().st_mtime_ns == times[path] for path in data.rglob("*"))
    (data / "text/test/ja-en.tsv.gz").unlink()
    with pytest.raises(ValueError, match=r"ja-en.tsv.gz is missing; .* make the folder again"):
        prepared.build(folder / "text", data, _CONFIG)


def test_a_source_that_disappears_midway_is_named_and_nothing_is_lost(tmp_path):
    _write_corpus(tmp_path / "text")
    found = tsv_folder.sources_in(tmp_path / "text")
    gone = tmp_path / "text" / "train" / "fr-en.tsv.gz"

    def engine(calls):
        if calls:  # Empty for the survey, which is done.
            gone.rename(tmp_path / "elsewhere")
        yield from engines.pool(1)(calls)

    build = functools.partial(pipeline.run_through, sources=found, out_dir=tmp_path / "data")
    build(pipeline.Step.SURVEY, config=_CONFIG, engine=engines.pool(1))
    with pytest.raises(ValueError, match=r"train/fr-en.tsv.gz: there is no such file"):
        build(pipeline.Step.CLEAN, config=_CONFIG, engine=engine)
    results = tmp_path / "data" / ".unfinished" / "results-4"
    done = {path: path.stat().st_mtime_ns for path in results.iterdir()}
    assert {path.name for path in done} >= {"survey-000000.result", "clean-000000.result"}
    (tmp_path / "elsewhere").rename(gone)
    build(pipeline.Step.CLEAN, config=_CONFIG, engine=engines.pool(1))
    assert all(path.stat().st_mtime_ns == before for path, before in done.items())


def test_a_folder_with_other_files_is_not_changed(built, tmp_path):
    folder, _ = built
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"has text, but no plan.txt of the run that made them"):
        prepared.build(folder / "text", tmp_path, _CONFIG)
    assert _contents(tmp_path) == {"text/mine.txt": b"mine"}


def _start(function, *args) -> multiprocessing.Process:
    process = multiprocessing.get_context("spawn").Process(target=function, args=args)
    process.start()
    return process


def _build_until(num_changes: int, text: pathlib.Path, data: pathlib.Path) -> None:
    """Builds; kills itself when file number `num_changes` of `data` is renamed, or opened to write.

    In the second case, the file stays half written.
    """
    left = iter(range(num_changes - 1, -1, -1))

    def hook(event: str, args: tuple) -> None:
        mode = set(args[1] or "") if event == "open" else set()
        if not (event == "os.rename" or mode & set("wxa+")):
            return
        if str(args[0]).startswith(str(data)) and not next(left):
            if "w" in mode:
                os.write(os.open(args[0], os.O_CREAT | os.O_TRUNC | os.O_WRONLY), b"half")
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    prepared.build(text, data, _CONFIG)


@pytest.mark.slow
def test_a_build_that_is_killed_at_any_change_ends_with_the_same_bytes(built, tmp_path):
    folder, _ = built
    rng = random.Random(6)
    num_kills = 0
    while True:
        # A run begins with 3 changes, the largest task needs 28, and all together need 152.
        process = _start(_build_until, rng.randint(20, 60), folder / "text", tmp_path / "data")
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        num_kills += 1
    assert num_kills > 2
    assert _contents(tmp_path / "data") == _contents(folder / "data")


def test_a_flat_folder_is_split_into_dev_and_test(tmp_path):
    for language, count in {"de": 400, "fr": 211}.items():
        pairs = [Pair(f"{language} {i}", f"sentence number {i}") for i in range(count)]
        tsv.write(tmp_path / "text" / f"{language}-en.tsv.gz", pairs)
    config = BuildConfig(source_vocab_size=300, target_vocab_size=300, held_out_share=0.1)
    made = prepared.build(tmp_path / "text", tmp_path / "data", config)
    _, target = load_pair(tmp_path / "data")
    english = {split: set() for split in manifest.SPLITS}
    for language in made.languages:
        counts = [language.num_examples(split) for split in manifest.SPLITS]
        assert sum(counts) == {"de": 400, "fr": 211}[language.code]
        assert all(5 < count < 60 for count in counts[1:])
        for split, entry in language.records.items():
            examples = _examples(tmp_path / "data", entry)
            english[split] |= {target.decode(example.target_ids) for example in examples}
    # A sentence that one language holds out is not in another's training text.
    assert sum(map(len, english.values())) == 400


def test_too_many_malformed_lines_are_refused(tmp_path):
    (tmp_path / "de-en.tsv").write_text("a\tb\n" * 98 + "x\n" * 2)
    with pytest.raises(ValueError, match=r"de-en.tsv: 2 of 100 lines are malformed \(2.0%\).*1.0%"):
        prepared.build(tmp_path, tmp_path / "data", _CONFIG)


def test_an_empty_result_of_tokenization_is_an_error(built, tmp_path):
    folder, _ = built
    short = dataclasses.replace(_CONFIG, max_pieces=1)
    with pytest.raises(ValueError, match=r"no training pairs are left: dropped 294 too_many"):
        prepared.build(folder / "text", tmp_path, short)


def _contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
