"""Examples and tokens that the input packs in a second of CPU, beside plain tf.data; its wait.

    python -m bench.input [--data_dir=DIR] [--model=toy.MoE8E4L]

tf.data does the same work on the same examples from TFRecords: shuffles each language, mixes them
by temperature, packs pairs as they come into rows, and batches. Without DIR the corpus is made up.
Target rows are as long as the data's ratio of tokens says, so that both sides can be full.
Then the model takes real steps, and the time that it waits for batches is measured.
"""

from __future__ import annotations

import functools
import pathlib
import tempfile
import time

from absl import app, flags, logging

from lingvo_gshard.spmd import environment

_DATA_DIR = flags.DEFINE_string("data_dir", None, "A prepared folder.")
_MODEL = flags.DEFINE_string("model", "toy.MoE8E4L", "The registered experiment that waits.")
_BATCHES = flags.DEFINE_integer("batches", 200, "Timed batches of each.")
_STEPS = flags.DEFINE_integer("steps", 20, "Timed steps of the model.")
_SOURCE_LEN = flags.DEFINE_integer("source_len", 128, "Tokens of a row's source side.")
_BATCH_SIZE = 64
_TEMPERATURE = 5.0


def main(argv: list[str]) -> None:
    environment.prepare(1)
    logging.set_verbosity(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        data_dir = _DATA_DIR.value or _prepare(pathlib.Path(folder))
        lengths = _row_lengths(data_dir)
        rows = {
            "input": _own(data_dir, lengths),
            "tf.data": _plain(data_dir, pathlib.Path(folder), lengths),
        }
        print("rows of {source} and {target} tokens; CPU seconds of one core".format(**lengths))
        print(f"{'':<9}{'examples/s':>12}{'tokens/s':>12}{'padding, source':>17}{'target':>9}")
        for name, (batches, secs) in rows.items():
            print(f"{name:<9}" + _rates(batches, secs))
        wait, total = _wait(data_dir)
    print(
        f"{_MODEL.value}: waits {wait * 1e3:.1f} ms of {total:.2f} s in {_STEPS.value} steps: "
        f"{wait / total:.2%}"
    )


def _prepare(folder: pathlib.Path) -> str:
    from bench import corpus
    from data_prep import config, pipeline

    corpus.write(folder / "text")
    sizes = config.BuildConfig(source_vocab_size=8000, target_vocab_size=4000)
    pipeline.build(folder / "text", folder / "data", sizes)
    return str(folder / "data")


def _row_lengths(data_dir: str) -> dict[str, int]:
    from lingvo_gshard.input import manifest, mixture

    languages = mixture.languages_of(manifest.load(data_dir), "train", None)
    records = [language.records["train"] for language in languages]
    counts = [one.num_examples for one in records]
    weights = mixture.sampling_weights(counts, _TEMPERATURE, None) / counts
    source, target = (
        weights @ [getattr(one, f"num_{side}_tokens") for one in records]
        for side in ("source", "target")
    )
    return {"source": _SOURCE_LEN.value, "target": round(_SOURCE_LEN.value * target / source)}


def _rates(batches, secs: float) -> str:
    examples = sum(int(b["source_segment_ids"].max(axis=1).sum()) for b in batches)
    filled = {
        side: sum(int((b[f"{side}_segment_ids"] > 0).sum()) for b in batches)
        for side in ("source", "target")
    }
    room = {
        side: sum(b[f"{side}_segment_ids"].size for b in batches) for side in ("source", "target")
    }
    padding = (f"{1 - filled[side] / room[side]:.1%}" for side in room)
    return "{:>12.0f}{:>12.0f}{:>17}{:>9}".format(
        examples / secs, sum(filled.values()) / secs, *padding
    )


def _own(data_dir: str, lengths: dict[str, int]):
    """(features of the batches, CPU seconds)."""
    source = _input(data_dir, _BATCH_SIZE, lengths["source"], lengths["target"])
    next(source)
    began = time.process_time()
    batches = [next(source).features for _ in range(_BATCHES.value)]
    secs = time.process_time() - began
    source.close()
    return batches, secs


def _input(data_dir: str, batch_size: int, source_len: int, target_len: int):
    from lingvo_gshard.input.batches import TranslationInput

    p = TranslationInput.Params().Set(
        data_dir=data_dir,
        batch_size=batch_size,
        source_len=source_len,
        target_len=target_len,
        temperature=_TEMPERATURE,
        max_repeats=None,
    )
    return p.Instantiate()


def _plain(data_dir: str, folder: pathlib.Path, lengths: dict[str, int]):
    """As `_own`, by tf.data."""
    import tensorflow as tf

    from lingvo_gshard.input import manifest, mixture

    data = manifest.load(data_dir)
    languages = mixture.languages_of(data, "train", None)
    counts = [language.num_examples("train") for language in languages]
    weights = mixture.sampling_weights(counts, _TEMPERATURE, None)
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
    fitting = mixed.filter(
        lambda s, t: (tf.size(s) <= lengths["source"]) & (tf.size(t) <= lengths["target"])
    )
    next_fit = functools.partial(_next_fit, lengths)
    rows = fitting.scan(_empty_row(), next_fit).filter(lambda is_full, _: is_full)
    batches = rows.map(lambda _, row: row).batch(_BATCH_SIZE).prefetch(4).as_numpy_iterator()
    next(batches)
    began = time.process_time()
    taken = [next(batches) for _ in range(_BATCHES.value)]
    return taken, time.process_time() - began


def _as_tfrecords(data_dir: str, language, folder: pathlib.Path) -> str:
    import numpy as np
    import tensorflow as tf

    from lingvo_gshard.input.records import RecordSource

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
    import tensorflow as tf

    spec = {name: tf.io.VarLenFeature(tf.int64) for name in ("source", "target")}
    parsed = tf.io.parse_single_example(record, spec)
    return tuple(tf.cast(parsed[name].values, tf.int32) for name in ("source", "target"))


def _empty_row():
    import tensorflow as tf

    return {
        f"{side}_{what}": tf.zeros([0], tf.int32)
        for side in ("source", "target")
        for what in ("ids", "segment_ids", "positions")
    }


def _next_fit(lengths, row, example):
    """(row that goes on, (whether a row is full, that row)): of one more example."""
    import tensorflow as tf

    source, target = example
    has_room = (tf.size(row["source_ids"]) + tf.size(source) <= lengths["source"]) & (
        tf.size(row["target_ids"]) + tf.size(target) <= lengths["target"]
    )
    segment = tf.cond(
        has_room, lambda: tf.reduce_max(tf.concat([[0], row["source_segment_ids"]], 0)), lambda: 0
    )
    goes_on = {}
    for side, ids in (("source", source), ("target", target)):
        new = {
            "ids": ids,
            "segment_ids": tf.fill(tf.shape(ids), segment + 1),
            "positions": tf.range(tf.size(ids)),
        }
        for what, values in new.items():
            name = f"{side}_{what}"
            old = tf.cond(has_room, lambda name=name: row[name], lambda: tf.zeros([0], tf.int32))
            goes_on[name] = tf.concat([old, values], 0)
    length_of = {name: lengths[name.split("_")[0]] for name in row}
    full = {
        name: tf.pad(values, [[0, length_of[name] - tf.size(values)]])
        for name, values in row.items()
    }
    for name, values in full.items():
        values.set_shape([length_of[name]])
    return goes_on, (~has_room, full)


def _wait(data_dir: str) -> tuple[float, float]:
    """(seconds that training waited for batches, all its seconds)."""
    from bench import synthetic
    from lingvo_gshard.core.nested_map import NestedMap
    from lingvo_gshard.input import manifest
    from lingvo_gshard.sharding.layout import Partitioning
    from lingvo_gshard.sharding.mesh import Mesh
    from lingvo_gshard.spmd import lowering
    from lingvo_gshard.spmd.executable import compile_program
    from lingvo_gshard.train import steps

    params, data = synthetic.experiment(_MODEL.value), manifest.load(data_dir)
    params.task.Set(
        source_vocab_size=data.source_vocabulary.size, target_vocab_size=data.target_vocabulary.size
    )
    model, state = synthetic.model_and_state(params, 1)
    p = params.input
    source = _input(data_dir, p.batch_size, p.source_len, p.target_len)
    partitioning = Partitioning.from_dict(Mesh.flat(1), params.sharding)
    step = steps.train_step(model.model_fn, params)
    annotated = steps.trainer(step, model.state_spec, source.specs, 1, partitioning)
    run = compile_program(lowering.export(annotated, partitioning))
    wait = total = 0.0
    for number in range(1 + _STEPS.value):
        began = time.perf_counter()
        batch = next(source)
        waited = time.perf_counter() - began
        batches = run.place("batches", batch.Transform(lambda x: x[None]))
        result = run(NestedMap(state), batches)
        float(result.metrics.loss[0])  # Waits for the devices.
        state = result.state
        if number:  # The first compiles.
            wait, total = wait + waited, total + time.perf_counter() - began
    source.close()
    return wait, total


if __name__ == "__main__":
    app.run(main)
