"""Examples and tokens that data_prep makes of text in a second of CPU, beside plain tf.data.

    python -m bench.data_prep

Both read the same gzip files, normalize, drop by length, tokenize with the same two vocabularies
and write records; data_prep alone repairs, looks at scripts and repetition, and finds duplicates.
The training of the vocabularies counts for neither.
"""

from __future__ import annotations

import pathlib
import tempfile
import time

from absl import app, logging

from bench import corpus
from data_prep import config, pipeline, sources
from data_prep.pipeline import Step
from lingvo_gshard.spmd import environment

_CONFIG = config.BuildConfig(source_vocab_size=8000, target_vocab_size=4000)


def main(argv: list[str]) -> None:
    environment.prepare()
    logging.set_verbosity(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        text, data = pathlib.Path(folder, "text"), pathlib.Path(folder, "data")
        corpus.write(text)
        secs = _step_secs(text, data)
        num_examples, num_tokens, plain_secs = _plain(text, data)
    own_secs = sum(secs[step] for step in Step if step is not Step.VOCAB)
    print(f"{num_examples} pairs, {num_tokens} tokens of both sides; CPU seconds of one core")
    print("data_prep by step: " + ", ".join(f"{step} {secs[step]:.1f}" for step in Step))
    print(f"{'':<12}{'CPU s':>8}{'examples/s':>12}{'tokens/s':>12}")
    for name, cpu_secs in (("data_prep", own_secs), ("tf.data", plain_secs)):
        rates = (num_examples / cpu_secs, num_tokens / cpu_secs)
        print(f"{name:<12}{cpu_secs:>8.1f}{rates[0]:>12.0f}{rates[1]:>12.0f}")


def _step_secs(text: pathlib.Path, data: pathlib.Path) -> dict[Step, float]:
    """CPU seconds of each step in this process."""
    found = sources.in_folder(text)
    # Loading TensorFlow is no part of the work.
    import tensorflow_text

    assert tensorflow_text.SentencepieceTokenizer
    secs = {}
    for step in Step:
        began = time.process_time()
        pipeline.run_through(step, found, data, _CONFIG, num_workers=1)
        secs[step] = time.process_time() - began
    return secs


def _plain(text: pathlib.Path, data: pathlib.Path) -> tuple[int, int, float]:
    """(examples, tokens, CPU seconds) of a tf.data pipeline over the same files."""
    import tensorflow as tf
    import tensorflow_text

    source, target = (
        tensorflow_text.SentencepieceTokenizer(
            model=(data / "vocab" / f"{name}.model").read_bytes(), add_eos=True
        )
        for name in ("source", "target")
    )

    def split(lines):
        sides = tf.strings.split(lines, "\t").to_tensor()
        return tuple(tensorflow_text.normalize_utf8(sides[:, i], "NFKC") for i in (0, 1))

    def is_usable(source_text, english):
        lengths = [tf.strings.length(side, "UTF8_CHAR") + 10 for side in (source_text, english)]
        longest, shortest = tf.maximum(*lengths), tf.minimum(*lengths)
        return (longest <= _CONFIG.max_chars) & (
            tf.cast(longest, tf.float32) <= _CONFIG.max_length_ratio * tf.cast(shortest, tf.float32)
        )

    def serialize(source_text, english):
        ids = [source.tokenize(source_text), target.tokenize(english)]
        number = sum(tf.size(side.flat_values) for side in ids)
        lines = [
            tf.strings.reduce_join(tf.strings.as_string(side), axis=-1, separator=" ")
            for side in ids
        ]
        return tf.strings.join(lines, "\t"), number

    began = time.process_time()
    num_examples = num_tokens = 0
    for path in sorted((text / "train").iterdir()):
        lines = tf.data.TextLineDataset(str(path), compression_type="GZIP").batch(2048)
        pairs = lines.map(split, tf.data.AUTOTUNE).unbatch().filter(is_usable).batch(2048)
        records = pairs.map(serialize, tf.data.AUTOTUNE).prefetch(1)
        with tf.io.TFRecordWriter(str(data / f"{path.name}.tfrecord")) as writer:
            for serialized, number in records.as_numpy_iterator():
                for record in serialized:
                    writer.write(record)
                num_examples += len(serialized)
                num_tokens += int(number)
    return num_examples, num_tokens, time.process_time() - began


if __name__ == "__main__":
    app.run(main)
