"""Flat beam search (appendix A.1): hypotheses interleaved in one sequence, never reordered.

Step t writes the k newest tokens to places t * k to t * k + k - 1 of a flat sequence of P = T * k
places, whatever hypotheses they extend. A 0/1 mask [B, k, P] says which places belong to which
active hypothesis; when the beam branches, only this mask is reordered.

B batch, k beam, V vocabulary, T steps, P = T * k places.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.cache import write_at

# Below any log-probability of a hypothesis, and still far from float32's limit when summed.
_NEVER = -1e9

# (model state, ids [B, k], mask [B, k, P], step) -> (logits [B, k, V], model state)
DecodeStep = Callable[[NestedMap, tf.Tensor, tf.Tensor, tf.Tensor], tuple[tf.Tensor, NestedMap]]


@dataclasses.dataclass(frozen=True)
class BeamSearch:
    """What to search for.

    Attributes:
      beam_size: k, active and finished hypotheses kept for each example.
      max_steps: T, the longest hypothesis in tokens, its EOS included.
      length_norm_alpha: scores are log-probabilities over ((5 + length) / 6)^alpha (Wu et al.
        2016), length in tokens with the EOS.
      min_steps: the shortest hypothesis in tokens, its EOS included.
      bos_id: what every hypothesis starts from; no part of it.
      eos_id: what ends one.

    Raises:
      ValueError: a size below 1, a negative alpha, or min_steps above max_steps.
    """

    beam_size: int
    max_steps: int
    length_norm_alpha: float = 0.6
    min_steps: int = 1
    bos_id: int = 1
    eos_id: int = 2

    def __post_init__(self) -> None:
        if self.beam_size < 1 or self.max_steps < 1 or self.length_norm_alpha < 0:
            raise ValueError(
                "BeamSearch: beam_size and max_steps must be 1 or more and length_norm_alpha 0 "
                f"or more, got {self.beam_size}, {self.max_steps}, {self.length_norm_alpha}."
            )
        if not 1 <= self.min_steps <= self.max_steps:
            raise ValueError(
                f"BeamSearch: min_steps must be 1 to max_steps {self.max_steps}, got "
                f"{self.min_steps}."
            )

    @property
    def places(self) -> int:
        """P, the places of the flat sequence: what the model's caches must hold."""
        return self.max_steps * self.beam_size


@dataclasses.dataclass(frozen=True)
class Hypotheses:
    """The best hypotheses of each example, best first.

    Attributes:
      ids: int32 [B, k, T], ended by EOS and then zeros; one that never ended has none.
      lengths: int32 [B, k], tokens with the EOS; 0 where fewer than k were found.
      scores: float32 [B, k], length-normalized log-probabilities.
    """

    ids: tf.Tensor
    lengths: tf.Tensor
    scores: tf.Tensor


def search(
    config: BeamSearch,
    decode_step: DecodeStep,
    model_state: NestedMap,
    batch_size: int,
    annotate: Callable[[tf.Tensor, str], tf.Tensor],
) -> Hypotheses:
    """Finds the k best continuations of each example, in one loop of the program.

    At every step the active hypotheses of an example offer all their continuations. Of those that
    do not end, the k most probable stay active. One that ends is finished, and scored with its
    length, if it is among the k most probable of all; at the last step, in any case. (Were every
    ending to count, the empty hypothesis would win wherever a model is unsure.) The loop ends when
    no active hypothesis of any example can still enter its finished ones.

    Args:
      config: the search.
      decode_step: the model.
      model_state: the state of its first step; its tensors keep their shapes.
      batch_size: B.
      annotate: (tensor, dims) -> annotated tensor; dims begin with B.
    """
    loop = _Loop(config, decode_step, batch_size, annotate)
    start = loop.start(model_state)

    def condition(*leaves: tf.Tensor) -> tf.Tensor:
        return loop.unfinished(start.Pack(leaves))

    def body(*leaves: tf.Tensor) -> list[tf.Tensor]:
        return loop.advance(start.Pack(leaves)).Flatten()

    leaves = tf.while_loop(condition, body, start.Flatten(), maximum_iterations=config.max_steps)
    return loop.results(start.Pack(leaves))


@dataclasses.dataclass(frozen=True)
class _Loop:
    """The search's steps over its state, a NestedMap:

    step: int32 scalar.
    ids: int32 [B, k], the newest token of each active hypothesis.
    flat_ids: int32 [B, T, k], every token that was written.
    mask: float32 [B, k, P], the places of each active hypothesis.
    log_probs: float32 [B, k], of the active hypotheses, best first.
    done_mask, done_scores, done_lengths: the finished ones, best first.
    model: the model's state.
    """

    config: BeamSearch
    decode_step: DecodeStep
    batch_size: int
    annotate: Callable[[tf.Tensor, str], tf.Tensor]

    def start(self, model_state: NestedMap) -> NestedMap:
        b, k, c = self.batch_size, self.config.beam_size, self.config
        alone = tf.constant([[0.0] + [_NEVER] * (k - 1)])  # k equal ones would stay equal.
        return self._annotated(
            NestedMap(
                step=tf.constant(0),
                ids=tf.fill([b, k], c.bos_id),
                flat_ids=tf.zeros([b, c.max_steps, k], tf.int32),
                mask=tf.zeros([b, k, c.places]),
                log_probs=tf.tile(alone, [b, 1]),
                done_mask=tf.zeros([b, k, c.places]),
                done_scores=tf.fill([b, k], _NEVER),
                done_lengths=tf.zeros([b, k], tf.int32),
                model=model_state,
            )
        )

    def unfinished(self, s: NestedMap) -> tf.Tensor:
        """Whether an active hypothesis can still beat a finished one.

        log P only falls, and the longest hypothesis divides it by most: no active one's final
        score exceeds log P over the normalizer of T.
        """
        bound = s.log_probs[:, 0] / self._normalizer(float(self.config.max_steps))
        return tf.reduce_any(bound > s.done_scores[:, -1])

    def advance(self, s: NestedMap) -> NestedMap:
        k = self.config.beam_size
        s = self._write(s)
        logits, model = self.decode_step(s.model, s.ids, s.mask, s.step)
        log_probs = s.log_probs[..., None] + tf.nn.log_softmax(logits)  # [B, k, V]
        vocab_size = log_probs.shape[-1]
        ending = tf.one_hot(self.config.eos_id, vocab_size, on_value=_NEVER, off_value=0.0)
        flat = tf.reshape(log_probs + ending, [self.batch_size, k * vocab_size])
        best, index = top_k(flat, k)
        s = self._finish(s, log_probs[..., self.config.eos_id], best)
        return self._annotated(
            NestedMap(
                s,
                step=s.step + 1,
                ids=index % vocab_size,
                mask=_reorder(s.mask, index // vocab_size),
                log_probs=best,
                model=model,
            )
        )

    def results(self, s: NestedMap) -> Hypotheses:
        """The finished hypotheses; one that reached T without an EOS stands as it is.

        Only if nothing finished at all does an example's best active hypothesis take its place.
        """
        c = self.config
        none = s.done_lengths[:, :1] == 0
        first = tf.one_hot(0, c.beam_size) * tf.cast(none, tf.float32)  # [B, k]
        unended = s.log_probs / self._normalizer(float(c.max_steps))
        scores = tf.where(first > 0, unended, s.done_scores)
        lengths = tf.where(first > 0, c.max_steps, s.done_lengths)
        mask = tf.where(first[..., None] > 0, s.mask, s.done_mask)
        return Hypotheses(self._read(s, mask, lengths, first), lengths, scores)

    def _write(self, s: NestedMap) -> NestedMap:
        """Gives each active hypothesis its place of this step and writes its newest token."""
        c = self.config
        flat_ids = write_at(s.flat_ids, s.ids[:, None], s.step)
        place = s.step * c.beam_size + tf.range(c.beam_size)
        return NestedMap(s, flat_ids=flat_ids, mask=s.mask + tf.one_hot(place, c.places)[None])

    def _finish(self, s: NestedMap, ended: tf.Tensor, going_on: tf.Tensor) -> NestedMap:
        """Merges the hypotheses that end here into the finished.

        Args:
          s: the state.
          ended: float [B, k], log-probabilities of each active hypothesis with its ending.
          going_on: float [B, k], those of the k best that do not end.
        """
        length = s.step + 1
        # One that does not exist, of the first steps, must not pass for finished.
        valid = (ended > _NEVER / 2) & (length >= self.config.min_steps)
        valid &= self._competes(ended, going_on) | (length == self.config.max_steps)
        score = ended / self._normalizer(tf.cast(length, tf.float32))
        score = tf.where(valid, score, _NEVER)
        lengths = tf.where(valid, length, 0)
        scores = tf.concat([s.done_scores, score], 1)
        best, index = top_k(scores, self.config.beam_size)
        candidates = tf.concat([s.done_lengths, lengths], 1)
        return NestedMap(
            s,
            done_scores=best,
            done_mask=_reorder(tf.concat([s.done_mask, s.mask], 1), index),
            done_lengths=tf.gather(candidates, index, batch_dims=1),
        )

    def _competes(self, ended: tf.Tensor, going_on: tf.Tensor) -> tf.Tensor:
        """bool [B, k]: which endings are among the k best of all continuations, ends or not."""
        others = tf.concat([ended, going_on], 1)
        better = tf.cast(others[:, None] > ended[..., None], tf.int32)
        return tf.reduce_sum(better, -1) < self.config.beam_size

    def _read(
        self, s: NestedMap, mask: tf.Tensor, lengths: tf.Tensor, unended: tf.Tensor
    ) -> tf.Tensor:
        """The tokens at the places of each hypothesis, without BOS and with EOS."""
        c = self.config
        by_step = tf.reshape(mask, [self.batch_size, c.beam_size, c.max_steps, c.beam_size])
        inputs = tf.reduce_sum(tf.cast(by_step, tf.int32) * s.flat_ids[:, None], -1)  # [B, k, T]
        # The token after each: an unended hypothesis' last one was never written.
        newest = tf.where(unended > 0, s.ids[:, :1], 0)[..., None]
        following = tf.concat([inputs[..., 1:], newest], -1)
        place = tf.range(1, c.max_steps + 1)[None, None]
        is_end = (place == lengths[..., None]) & (unended[..., None] == 0)
        return tf.where(is_end, c.eos_id, tf.where(place <= lengths[..., None], following, 0))

    def _normalizer(self, length: tf.Tensor | float) -> tf.Tensor | float:
        return ((5.0 + length) / 6.0) ** self.config.length_norm_alpha

    def _annotated(self, s: NestedMap) -> NestedMap:
        def by_batch(x: tf.Tensor) -> tf.Tensor:
            return self.annotate(x, "B" + "_" * (x.shape.rank - 1)) if x.shape.rank else x

        return NestedMap(s.Transform(by_batch), model=s.model)  # The model annotates its own.


def top_k(x: tf.Tensor, k: int) -> tuple[tf.Tensor, tf.Tensor]:
    """The k largest of each row, in order, and their int32 indices; ties go to the lower.

    k passes of argmax: for a beam's k faster than a sort, and local to a partition of rows.

    Args:
      x: float [B, n], all above -inf.
      k: at most n.
    """
    values, indices = [], []
    for _ in range(k):
        index = tf.argmax(x, -1, output_type=tf.int32)
        values.append(tf.reduce_max(x, -1))
        indices.append(index)
        taken = tf.one_hot(index, x.shape[-1], on_value=True, off_value=False, dtype=tf.bool)
        x = tf.where(taken, x.dtype.min, x)
    return tf.stack(values, -1), tf.stack(indices, -1)


def _reorder(mask: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """mask[b, rows[b, i]]: [B, n, P] and int32 [B, k] give [B, k, P].

    A product with a one-hot matrix, exact on 0/1, that stays local to a partition of B.
    """
    return tf.einsum("BKN,BNP->BKP", tf.one_hot(rows, mask.shape[1], dtype=mask.dtype), mask)
