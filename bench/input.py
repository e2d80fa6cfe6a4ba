"""Examples and tokens packed in a second of CPU time, beside plain tf.data; the wait for batches.

    python -m bench.input [--data_dir=DIR] [--model=toy.MoE8E4L]

tf.data does the same work on the same examples, from TFRecords: it shuffles each language, mixes
the languages by temperature, packs pairs into rows in their order, and makes batches. Without DIR,
the corpus is synthetic. The target and source lengths of a row have the same ratio as the numbers
of tokens in the data, so that both sides can be full. Then the model trains, and the time that it
waits for batches is measured.
"""

import functools
import itertools
import pathlib
import tempfile
import time
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from absl import flags, logging

from bench import corpus, synthetic
from data_prep import config, engines, pipeline, tsv_folder
from lingvo_gshard import cli
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.input import manifest, mixture
from lingvo_gshard.input.batches import TranslationInput
from lingvo_gshard.input.records import RecordSource
from lingvo_gshard.model.spec import Mode
from xla_spmd.files import table
from xla_spmd.runtime import environment

_DATA_DIR = flags.DEFINE_string("data_dir", None, "A prepared folder.")
_MODEL = flags.DEFINE_string("model", "toy.MoE8E4L", "The registered experiment that is trained.")
_BATCHES = flags.DEFINE_integer("batches", 200, "The number of timed batches of each.")
_STEPS = flags.DEFINE_integer("steps", 20, "The number of timed steps of the model.")
_SOURCE_LEN = flags.DEFINE_integer("source_len", 128, "Tokens of a row's source side.")
_BATCH_SIZE = 64
_TEMPERATURE = 5.0
_SIDES = ("source", "target")


def main() -> None:
    environment.prepare(1)
    logging.set_verbosity(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        data_dir = _DATA_DIR.value or _prepare(pathlib.Path(folder))
        lengths = _row_lengths(data_dir)

        ours = _input(data_dir, _BATCH_SIZE, lengths["source"], lengths["target"])
        rows = [("input", *_rates(batch.features for batch in ours))]
        ours.close()
        rows.append(("tf.data", *_rates(_tf_data(data_dir, pathlib.Path(folder), lengths))))

        print("rows of {source} and {target} tokens; CPU seconds of one core".format(**lengths))
        header = ("", "examples/s", "tokens/s", "padding of sources", "of targets")
        print(table.text([header, *rows]))
        wait, total = _time_waits(data_dir)

    print(
        f"{_MODEL.value}: waits {wait * 1e3:.1f} ms of {total:.2f} s in {_STEPS.value} steps: "
        f"{wait / total:.2%}"
    )


def _prepare(folder: pathlib.Path) -> str:
    corpus.write(folder / "text")
    sizes = config.BuildConfig(source_vocab_size=8000, target_vocab_size=4000)
    found = tsv_folder.sources_in(folder / "text")
    pipeline.run_through(pipeline.Step.REPORT, found, folder / "data", sizes, engines.pool(1))
    return str(folder / "data")


def _row_lengths(data_dir: str) -> dict[str, int]:
    languages = mixture.languages_of(manifest.load(data_dir), "train", None)
    records = [language.records["train"] for language in languages]
    counts = [of_language.num_examples for of_language in records]

    # Each language counts with the probability with which it is drawn.
    weights = mixture.sampling(counts, _TEMPERATURE, None).probabilities / counts
    source = weights @ [of_language.num_source_tokens for of_language in records]
    target = weights @ [of_language.num_target_tokens for of_language in records]
    return {"source": _SOURCE_LEN.value, "target": round(_SOURCE_LEN.value * target / source)}


def _rates(iterator) -> Sequence[str]:
    """Times batches of features; returns the cells of a row, without its name."""
    next(iterator)  # The first batch fills the buffers.
    began = time.process_time()
    batches = [next(iterator) for _ in range(_BATCHES.value)]
    secs = time.process_time() - began

    # Segments count from 1 in each row; 0 is padding.
    num_examples = sum(int(batch["source_segment_ids"].max(axis=1).sum()) for batch in batches)
    num_tokens = 0
    padding = []
    for side in _SIDES:
        segment_ids = np.stack([batch[f"{side}_segment_ids"] for batch in batches])
        num_tokens += np.count_nonzero(segment_ids)
        padding.append(f"{np.mean(segment_ids == 0):.1%}")
    return (f"{num_examples / secs:.0f}", f"{num_tokens / secs:.0f}", *padding)


def _input(data_dir: str, batch_size: int, source_len: int, target_len: int) -> TranslationInput:
    p = TranslationInput.Params().Set(
        data_dir=data_dir,
        batch_size=batch_size,
        source_len=source_len,
        target_len=target_len,
        temperature=_TEMPERATURE,
        max_repeats=None,
    )
    return p.Instantiate()


def _tf_data(data_dir: str, folder: pathlib.Path, lengths: dict[str, int]):
    """Returns a tf.data iterator over the features of batches of packed rows."""
    languages = mixture.languages_of(manifest.load(data_dir), "train", None)
    counts = [language.num_examples("train") for language in languages]
    weights = mixture.sampling(counts, _TEMPERATURE, None).probabilities

    mixed = tf.data.Dataset.sample_from_datasets(
        [
            tf.data.TFRecordDataset(_as_tfrecords(data_dir, language, folder))
            .shuffle(10_000, seed=1)
            .repeat()
            .map(_parse, tf.data.AUTOTUNE)
            for language in languages
        ],
        weights.tolist(),
        seed=1,
    )

    # Pairs that fit into a row are packed in their order.
    fitting = mixed.filter(
        lambda s, t: (tf.size(s) <= lengths["source"]) & (tf.size(t) <= lengths["target"])
    )
    next_fit = functools.partial(_next_fit, lengths)
    rows = fitting.scan(_empty_row(), next_fit).filter(lambda is_full, _: is_full)
    return rows.map(lambda _, row: row).batch(_BATCH_SIZE).prefetch(4).as_numpy_iterator()


def _as_tfrecords(data_dir: str, language: manifest.Language, folder: pathlib.Path) -> str:
    path = str(folder / f"{language.code}.tfrecord")
    source = RecordSource(data_dir, language.records["train"])
    with tf.io.TFRecordWriter(path) as writer:
        for example in source.read(np.arange(len(source))):
            lists = {
                name: tf.train.Feature(int64_list=tf.train.Int64List(value=ids.tolist()))
                for name, ids in (("source", example.source_ids), ("target", example.target_ids))
            }
            features = tf.train.Features(feature=lists)
            writer.write(tf.train.Example(features=features).SerializeToString())
    return path


def _parse(record):
    parsed = tf.io.parse_single_example(
        record, {name: tf.io.VarLenFeature(tf.int64) for name in _SIDES}
    )
    return tuple(tf.cast(parsed[name].values, tf.int32) for name in _SIDES)


def _empty_row():
    features = itertools.product(_SIDES, ("ids", "segment_ids", "positions"))
    return {f"{side}_{name}": tf.zeros([0], tf.int32) for side, name in features}


def _next_fit(lengths, row, example):
    """Adds an example to the row, or begins a new row with it if the row is full.

    Returns:
      (the row to continue, (whether `row` is full, `row` padded to the lengths)).
    """
    source, target = example

    has_room = (tf.size(row["source_ids"]) + tf.size(source) <= lengths["source"]) & (
        tf.size(row["target_ids"]) + tf.size(target) <= lengths["target"]
    )
    segment = tf.cond(
        has_room, lambda: tf.reduce_max(tf.concat([[0], row["source_segment_ids"]], 0)), lambda: 0
    )

    # The row with the example, or the example alone.
    next_row = {}
    for side, ids in (("source", source), ("target", target)):
        added = {
            "ids": ids,
            "segment_ids": tf.fill(tf.shape(ids), segment + 1),
            "positions": tf.range(tf.size(ids)),
        }
        for feature, values in added.items():
            name = f"{side}_{feature}"
            old = tf.cond(has_room, lambda name=name: row[name], lambda: tf.zeros([0], tf.int32))
            next_row[name] = tf.concat([old, values], 0)

    # The row without it, which is used if it is full.
    padded_row = {}
    for name, values in row.items():
        length = lengths[name.split("_")[0]]
        padded_row[name] = tf.pad(values, [[0, length - tf.size(values)]])
        padded_row[name].set_shape([length])
    return next_row, (~has_room, padded_row)


def _time_waits(data_dir: str) -> tuple[float, float]:
    """Trains the model; returns the seconds of waiting for batches, and all seconds."""
    params = synthetic.experiment(_MODEL.value)
    data = manifest.load(data_dir)
    params.task.Set(
        source_vocab_size=data.source_vocabulary.size, target_vocab_size=data.target_vocabulary.size
    )
    model, state = synthetic.model_and_state(params, 1)

    p = params.input
    source = _input(data_dir, p.batch_size, p.source_len, p.target_len)
    run = synthetic.programs(model).get(Mode.TRAIN, source.specs)

    wait = 0.0
    total = 0.0
    for number in range(1 + _STEPS.value):
        began = time.perf_counter()
        batch = next(source)
        waited = time.perf_counter() - began

        batches = run.place("batches", batch.Transform(lambda x: x[None]))
        result = run(NestedMap(state), batches)
        float(result.metrics.loss[0])  # Waits for the devices.
        state = result.state

        if number:  # The first step is slower.
            wait += waited
            total += time.perf_counter() - began
    source.close()
    return wait, total


if __name__ == "__main__":
    cli.run("input", main)
