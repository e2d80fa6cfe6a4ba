"""A TensorFlow SavedModel of a decoder, which takes text and gives text.

    loaded = tf.saved_model.load(folder)  # After `import tensorflow_text`.
    loaded.signatures["serving_default"](text=tf.constant(["Guten Morgen."]))
    loaded.theta["softmax"]  # A weight, by its path in the bundle and in checkpoints.

Its tokenizers are tensorflow-text's, with the SentencePiece models in the graph. XLA compiles the
encoder and the flat beam search, one program for each length of sources. The weights are variables.
Lines are normalized, split and batched like the Translator's, so a bundle has the same
translations. It runs on one device.

`write` runs in the process that traces (spmd/tracer.py).

N lines, P their parts, B the rows of a batch, L source length, n hypotheses, T target length.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections.abc import Sequence
from typing import Any, TypeAlias

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.late import tf, tf_text
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.decoding import text_graph
from lingvo_gshard.decoding.bundle import Decoder
from lingvo_gshard.decoding.bundle_spec import DecoderSpec
from lingvo_gshard.decoding.outcomes import MIN_END_LOG_PROB, Finish, no_result
from lingvo_gshard.files import safetensors_file
from lingvo_gshard.input.example_codec import BOS_ID, EOS_ID, PAD_ID, target_token
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.runs import saved_model_request
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.spmd import tracer
from xla_spmd.files import atomic_file, digests
from xla_spmd.mesh import Mesh

# The SHA-256 of all other files, in sha256sum's format; TensorFlow ignores this folder.
SUMS = "assets.extra/SHA256SUMS"

Vocabularies = tuple[pathlib.Path, pathlib.Path]  # The source's and the target's.
# A tf.function from ids, int32 [B, L], and the numbers of tokens, int32 [B], to ids [B, n, T],
# lengths, scores and whether they were cut, [B, n].
Search: TypeAlias = Any


def save(
    folder: str | pathlib.Path, decoder: Decoder, params: Params, vocabularies: Vocabularies
) -> None:
    """Writes a SavedModel with a decoder's weights, settings and vocabularies.

    The folder appears at once, and replaces an earlier SavedModel. Raises ValueError for weights
    other than FLOAT32, for a folder with other files, and for a path that TensorFlow would take for
    a pattern.
    """
    numbers = decoder.spec.weights
    if numbers != "float32":
        raise ValueError(
            f"--export_saved_model: the weights are {numbers}, and a SavedModel needs float32; "
            "export a bundle."
        )
    saved_model_request.check_folder(folder)

    with atomic_file.replacing_folder(folder) as partial:
        # The other process reads the weights from a file, as they may be too large for a message.
        weights = partial / "weights.safetensors"
        safetensors_file.write(weights, dict(decoder.theta.FlattenItems()), {})
        tracer.run(write, partial, weights, params, decoder.spec, vocabularies)
        weights.unlink()
        _write_sums(partial)


def _write_sums(folder: pathlib.Path) -> None:
    """Writes SUMS, since TensorFlow checks variables when it loads them, but not the graph."""
    lines = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            lines.append(f"{digests.describe(folder, name).sha256}  {name}\n")
    (folder / SUMS).parent.mkdir()
    atomic_file.write(folder / SUMS, "".join(lines))


def write(
    folder: pathlib.Path,
    weights: pathlib.Path,
    params: Params,
    spec: DecoderSpec,
    vocabularies: Vocabularies,
) -> None:
    """Writes a SavedModel into `folder`, with the arrays of the safetensors file `weights`.

    Raises ValueError if tensorflow-text does not fit TensorFlow.
    """
    module = _translating_module(weights, params, spec, vocabularies)
    # A served model is not trained, so TensorFlow need not trace gradients, which some operators
    # lack.
    tf.saved_model.save(
        module,
        str(folder),
        {"serving_default": module.translate.get_concrete_function()},
        options=tf.saved_model.SaveOptions(experimental_custom_gradients=False),
    )


def _translating_module(
    weights: pathlib.Path, params: Params, spec: DecoderSpec, vocabularies: Vocabularies
) -> tf.Module:
    """Returns a module with everything in a SavedModel, whose `translate` is the signature."""
    source, target = map(_tokenizer, vocabularies)

    # One device has all of every tensor.
    model = TaskModel(params, Partitioning.from_dict(Mesh.flat(1), {}))
    arrays = safetensors_file.read(weights).arrays
    variables = {}
    for path, _ in model.state_spec.theta.FlattenItems():
        name = path.replace("[", ".").replace("]", "")  # TensorFlow does not allow brackets.
        variables[path] = tf.Variable(arrays[path], name=name)
    theta = model.state_spec.theta.Pack(variables.values())

    searches = {length: _search(model, theta, params, length) for length in spec.input_lengths}
    graph = _TranslatorGraph(spec, source, target, searches)
    lines = tf.TensorSpec([None], tf.string, "text")
    if spec.targets:
        signature = [lines, tf.TensorSpec([None], tf.string, "target_lang")]
        translate = tf.function(graph.translate_to, input_signature=signature, autograph=False)
    else:
        translate = tf.function(graph.translate, input_signature=[lines], autograph=False)

    # Only attributes of the module are saved.
    module = tf.Module()
    module.theta = variables
    module.tokenizers = [source, target]
    module.translate = translate
    return module


def _tokenizer(path: pathlib.Path) -> tf_text.SentencepieceTokenizer:
    try:
        make = tf_text.SentencepieceTokenizer
    except (ImportError, tf.errors.NotFoundError) as error:  # Symbols that TensorFlow lacks.
        raise ValueError(
            f"tensorflow-text does not fit TensorFlow {tf.__version__}: {error}"
        ) from None

    # A process has only one tokenizer of each name, the first that it loads. So each vocabulary
    # needs a name of its own.
    model = path.read_bytes()
    name = f"vocabulary_{hashlib.sha256(model).hexdigest()}"
    return make(model, out_type=tf.int32, add_eos=True, name=name)


def _search(model: TaskModel, theta: NestedMap, params: Params, length: int) -> Search:
    """Returns the flat beam search over a batch of sources of one length, compiled by XLA."""

    def search(ids: tf.Tensor, num_tokens: tf.Tensor) -> Sequence[tf.Tensor]:
        positions = tf.range(length)
        is_token = positions < num_tokens[:, None]
        features = NestedMap(
            source_ids=ids,
            source_segment_ids=tf.cast(is_token, tf.int32),
            source_positions=tf.where(is_token, positions, 0),
        )

        state = NestedMap(theta=theta.Transform(tf.convert_to_tensor))
        hypotheses = model.predict(state, NestedMap(features=features)).predictions
        return hypotheses.ids, hypotheses.lengths, hypotheses.scores, _is_cut(hypotheses)

    batch_size = params.decode.batch_size
    signature = [
        tf.TensorSpec([batch_size, length], tf.int32),
        tf.TensorSpec([batch_size], tf.int32),
    ]
    return tf.function(search, input_signature=signature, autograph=False, jit_compile=True)


def _is_cut(hypotheses: NestedMap) -> tf.Tensor:
    """Returns whether hypotheses are cut at the maximum length, bool [B, n]; see TextDecoder."""
    is_longest = hypotheses.lengths == hypotheses.ids.shape[-1]
    is_end = hypotheses.ids[..., -1] == EOS_ID
    is_end &= hypotheses.token_log_probs[..., -1] > MIN_END_LOG_PROB
    return is_longest & ~is_end


@dataclasses.dataclass(frozen=True)
class _Found:
    """The n best hypotheses of P parts or N lines; a missing one has 0 tokens."""

    text: tf.Tensor  # string [P, n]
    num_tokens: tf.Tensor  # int32 [P, n], with EOS.
    scores: tf.Tensor  # float32 [P, n]
    is_cut: tf.Tensor  # bool [P, n]

    @property
    def finishes(self) -> tf.Tensor:
        """Returns why each text ends, a Finish: string [P, n]."""
        return tf.where(self.is_cut, Finish.LENGTH.value, Finish.STOP.value)


def _distinct(found: _Found) -> _Found:
    """Removes hypotheses whose text a better one has; see TextDecoder."""
    num_best = found.text.shape[1]
    is_equal = found.text[:, :, None] == found.text[:, None, :]
    is_earlier = tf.range(num_best)[None, :] < tf.range(num_best)[:, None]
    is_repeated = tf.reduce_any(is_equal & is_earlier, 2)

    # The others move up, and the last ones are missing.
    order = tf.argsort(tf.cast(is_repeated, tf.int32), 1, stable=True)

    def moved(values: tf.Tensor, missing: Any) -> tf.Tensor:
        return tf.gather(tf.where(is_repeated, missing, values), order, batch_dims=1)

    return _Found(
        text=moved(found.text, ""),
        num_tokens=moved(found.num_tokens, 0),
        scores=moved(found.scores, 0.0),
        is_cut=moved(found.is_cut, False),
    )


@dataclasses.dataclass(frozen=True)
class _TranslatorGraph:
    """The Translator (decoding/translator.py) as a graph of TensorFlow."""

    spec: DecoderSpec
    source: tf_text.SentencepieceTokenizer
    target: tf_text.SentencepieceTokenizer
    searches: dict[int, Search]  # By source length.

    def translate_to(self, text: tf.Tensor, target_lang: tf.Tensor) -> dict[str, tf.Tensor]:
        """Translates each line into its own target language, string [N]; see `translate`."""
        is_target = target_lang[:, None] == tf.constant(self.spec.targets)
        expected = f"target_lang: expected one of {', '.join(self.spec.targets)}"
        is_known = tf.debugging.Assert(
            tf.reduce_all(tf.reduce_any(is_target, 1)), [expected, "got", target_lang]
        )
        with tf.control_dependencies([is_known]):
            beginnings = tf.constant([self.spec.beginning(code) for code in self.spec.targets])
            return self._translate(text, tf.gather(beginnings, tf.argmax(is_target, 1)))

    def translate(self, text: tf.Tensor) -> dict[str, tf.Tensor]:
        """Translates lines of text, string [N].

        Returns `translations`, string [N], `scores`, float32 [N], and `finishes`, string [N]. If n
        is above 1, also returns the n best of each line, best first: `nbest_translations`,
        `nbest_scores`, `nbest_finishes` and `nbest_num_tokens` [N, n], where a missing hypothesis
        has 0 tokens. Fails, and names the line, if the model's numbers for it are not finite.
        """
        return self._translate(text, tf.fill(tf.shape(text), ""))

    def _translate(self, text: tf.Tensor, beginnings: tf.Tensor) -> dict[str, tf.Tensor]:
        """Translates lines after their `beginnings`, string [N], which are tokens."""
        num_lines = tf.size(text, tf.int64)
        parts, lines = self._parts(text_graph.normalize(text), beginnings)
        tokens = self._tokens(tf.gather(beginnings, lines), parts)

        # Each part of a line is decoded on its own, and the best ones are joined.
        of_parts = self._decoded(tokens)
        with tf.control_dependencies([self._check_found(of_parts, lines)]):
            best = _distinct(self._joined(_distinct(of_parts), lines, num_lines))

        results = {
            "translations": best.text[:, 0],
            "scores": best.scores[:, 0],
            "finishes": best.finishes[:, 0],
        }
        if self.spec.num_best > 1:
            results["nbest_translations"] = best.text
            results["nbest_scores"] = best.scores
            results["nbest_finishes"] = best.finishes
            results["nbest_num_tokens"] = best.num_tokens
        return results

    def _check_found(self, parts: _Found, lines: tf.Tensor) -> tf.Operation:
        """Returns an operation that fails, and names the line, if a part lacks a hypothesis."""
        is_found = (parts.num_tokens[:, 0] > 0) & tf.math.is_finite(parts.scores[:, 0])
        first = tf.reduce_min(tf.where(is_found, tf.int64.max - 1, lines)) + 1
        problem = tf.strings.format(f"line {{}} {no_result(self.spec.reading.noun)}", first)
        return tf.debugging.Assert(tf.reduce_all(is_found), [problem])

    def _parts(self, text: tf.Tensor, beginnings: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the parts of normalized lines, string [P], and their lines, int64 [P]."""
        longest = self.spec.input_lengths[-1]

        def fits(parts: tf.Tensor, lines: tf.Tensor) -> tf.Tensor:
            tokens = self._tokens(tf.gather(beginnings, lines), parts)
            return tokens.row_lengths() <= longest

        # A blank line does not have parts.
        lines = tf.where(text != "")[:, 0]
        return text_graph.split(tf.gather(text, lines), lines, fits)

    def _tokens(self, beginnings: tf.Tensor, texts: tf.Tensor) -> tf.RaggedTensor:
        """Returns the ids of P texts with their beginnings, ragged int32 [P, None] with EOS."""
        if not self.spec.targets:
            return self.source.tokenize(beginnings + texts)

        # Only a beginning becomes a token; the text of a token within a line is split.
        tokens = [target_token(code) for code in self.spec.targets]
        parts = tf.strings.split(beginnings + text_graph.cut_tokens(texts, tokens), text_graph.CUT)
        ids = self.source.tokenize(parts).merge_dims(1, 2)

        # The text has a single EOS, at its end.
        ids = tf.ragged.boolean_mask(ids, ids != EOS_ID)
        return tf.concat([ids, tf.fill([ids.nrows(), 1], EOS_ID)], 1)

    def _decoded(self, tokens: tf.RaggedTensor) -> _Found:
        """Returns the hypotheses of P sources, ragged int32 [P, None] with EOS."""
        longest = self.spec.input_lengths[-1]
        num_tokens = tf.cast(tokens.row_lengths(), tf.int32)
        ids = tokens.to_tensor(PAD_ID, shape=[None, longest])

        # A single character may be too long. It is cut, and still ends with EOS.
        is_cut = (num_tokens > longest)[:, None] & (tf.range(longest) == longest - 1)
        ids = tf.where(is_cut, EOS_ID, ids)
        num_tokens = tf.minimum(num_tokens, longest)

        # Each source is in a batch of the shortest length that holds it.
        lengths = tf.constant(self.spec.input_lengths)
        row_lengths = tf.gather(lengths, tf.searchsorted(lengths, num_tokens))
        shortest_first = tf.argsort(num_tokens, stable=True)
        indices = []
        hypotheses = []
        for length in self.spec.input_lengths:
            is_here = tf.gather(row_lengths, shortest_first) == length
            rows = tf.boolean_mask(shortest_first, is_here)
            indices.append(rows)
            hypotheses.append(self._searched(length, ids[:, :length], num_tokens, rows))

        # Back in the order of the sources.
        order = tf.argsort(tf.concat(indices, 0))
        leaves = [tf.concat(leaf, 0) for leaf in zip(*hypotheses, strict=True)]
        target_ids, target_lengths, scores, is_cut = [tf.gather(leaf, order) for leaf in leaves]
        text = self._detokenized(target_ids, target_lengths)
        return _Found(text, target_lengths, scores, is_cut)

    def _searched(
        self, length: int, ids: tf.Tensor, num_tokens: tf.Tensor, rows: tf.Tensor
    ) -> list[tf.Tensor]:
        """Returns the hypotheses of the sources `rows`, in this order, a batch at a time.

        `ids` are int32 [P, L], and `num_tokens` int32 [P].
        """
        # Empty rows, which take 0 steps, fill the last batch.
        empty_row = tf.shape(ids)[0]
        ids = tf.pad(ids, [[0, 1], [0, 0]])
        num_tokens = tf.pad(num_tokens, [[0, 1]])
        missing = -tf.size(rows) % self.spec.batch_size
        filled = tf.concat([rows, tf.fill([missing], empty_row)], 0)
        batches = tf.reshape(filled, [-1, self.spec.batch_size])

        search = self.searches[length]
        of_a_batch = search.get_concrete_function().outputs
        results = tf.map_fn(
            lambda batch: search(tf.gather(ids, batch), tf.gather(num_tokens, batch)),
            batches,
            fn_output_signature=tuple(map(tf.TensorSpec.from_tensor, of_a_batch)),
            parallel_iterations=1,  # A batch has all cores.
        )

        # Reshapes [batches, B, ...], and removes the empty rows.
        found = []
        for result in results:
            by_row = tf.reshape(result, [-1, *result.shape[2:]])
            found.append(by_row[: tf.size(rows)])
        return found

    def _detokenized(self, ids: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
        """Returns the text of hypotheses, string [P, n], given int32 [P, n, T] and [P, n]."""
        num_best, max_steps = ids.shape[1:]
        flat = tf.reshape(ids, [-1, max_steps])
        is_token = tf.range(max_steps) < tf.reshape(lengths, [-1, 1])
        for special in (PAD_ID, BOS_ID, EOS_ID):
            is_token &= flat != special

        text = self.target.detokenize(tf.ragged.boolean_mask(flat, is_token))
        return tf.reshape(text_graph.one_line(text), [-1, num_best])

    def _joined(self, parts: _Found, lines: tf.Tensor, num_lines: tf.Tensor) -> _Found:
        """Returns the translations of N lines: the i-th best of their parts form the i-th best."""
        # A line's i-th best needs the i-th best of all its parts. A blank line has an empty one.
        is_found = tf.cast(parts.num_tokens > 0, tf.int32)
        has_all = tf.math.unsorted_segment_min(is_found, lines, num_lines) > 0  # [N, n]

        num_tokens = tf.math.unsorted_segment_sum(parts.num_tokens, lines, num_lines)
        weighted = parts.scores * tf.cast(parts.num_tokens, tf.float32)
        sums = tf.math.unsorted_segment_sum(weighted, lines, num_lines)
        scores = tf.math.divide_no_nan(sums, tf.cast(num_tokens, tf.float32))

        num_cut = tf.math.unsorted_segment_sum(tf.cast(parts.is_cut, tf.int32), lines, num_lines)

        texts = []
        for i in range(self.spec.num_best):
            texts.append(text_graph.joined(parts.text[:, i], lines, num_lines))

        return _Found(
            text=tf.where(has_all, tf.stack(texts, 1), ""),
            num_tokens=tf.where(has_all, num_tokens, 0),
            scores=tf.where(has_all, scores, 0.0),
            is_cut=has_all & (num_cut > 0),
        )
