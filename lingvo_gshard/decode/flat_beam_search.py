"""Flat beam search (appendix A.1): hypotheses interleaved in one sequence, never reordered.

Step t writes the k newest tokens to places t * k to t * k + k - 1 of a flat sequence of P = T * k
places, whatever hypotheses they extend. A 0/1 mask [B, k, P] says which places belong to which
active hypothesis; when the beam branches, only this mask is reordered. The sequence may grow by
stages, so that early steps attend to few places.

B batch, k beam, n finished hypotheses, V vocabulary, S source length, T steps, P = T * k places or
those of the stage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.decode import rows, scoring
from lingvo_gshard.decode.beam import BeamSearch, Hypotheses, Requests
from lingvo_gshard.decode.top_k import top_k
from lingvo_gshard.layers.random import random_uniform
from lingvo_gshard.layers.slices import lengthened, write_at

# Below any log-probability of a hypothesis, and still far from float32's limit when summed.
_NEVER = -1e9

# (model state, ids [B, k], mask [B, k, P], step) -> (logits [B, k, V], model state)
DecodeStep = Callable[[NestedMap, tf.Tensor, tf.Tensor, tf.Tensor], tuple[tf.Tensor, NestedMap]]
# (model state, P) -> the same with room for P places
Grow = Callable[[NestedMap, int], NestedMap]
Annotate = Callable[[tf.Tensor, str], tf.Tensor]


def search(
    config: BeamSearch,
    decode_step: DecodeStep,
    model_state: NestedMap,
    requests: Requests,
    annotate: Annotate,
    grow: Grow | None = None,
) -> Hypotheses:
    """Finds the n best continuations of each example, in a loop of the program.

    At every step the active hypotheses of an example offer all their continuations. Of those that
    do not end, the k most probable stay active. One that ends is finished, and scored with its
    length, if it is among the k most probable of all; at its last step, in any case. (Were every
    ending to count, the empty hypothesis would win wherever a model is unsure.) An example is done
    when no active hypothesis can still enter its n finished ones, by the bound that
    `scoring.best_possible` proves; the loop ends when all are.

    Args:
      config: the search.
      decode_step: the model. A hypothesis whose row of the mask is all 0 is none, or its example
        is done: what it gives for it is not looked at.
      model_state: the state of its first step; a step keeps its tensors' shapes. If it holds
        `attention`, float32 [B, k, S], the newest tokens' attention to the source, that is
        recorded; a coverage term also needs `source_real`, float32 [B, S].
      requests: what each example asks for.
      annotate: (tensor, dims) -> annotated tensor; dims begin with B.
      grow: with it the search goes by stages, a loop for each of config.stage_ends: the model's
        state, as the masks, has places for the steps up to a stage's end alone; at the start
        config.first_places. Without it all P.

    Raises:
      ValueError: a coverage term, and a model that does not tell its attention.
    """
    if config.coverage_weight and not {"attention", "source_real"} <= set(model_state):
        raise ValueError(
            f"flat_beam_search: coverage_weight {config.coverage_weight} needs a model whose state "
            f"holds attention and source_real, not only {', '.join(sorted(model_state))}."
        )
    loop = _Loop(config, decode_step, requests, annotate)
    ends = config.stage_ends if grow else (config.max_steps,)
    s = loop.start(model_state, ends[0] * config.beam_size)
    for begin, end in zip((0, *ends), ends, strict=False):
        if grow and begin:
            s = loop.grown(s, end * config.beam_size, grow)
        s = _repeated(loop.advance, s, end - begin)
    return loop.results(s)


def _repeated(
    advance: Callable[[NestedMap], NestedMap], s: NestedMap, most_times: int
) -> NestedMap:
    """`advance` applied while any example is alive."""
    leaves = tf.while_loop(
        lambda *leaves: tf.reduce_any(s.Pack(leaves).alive),
        lambda *leaves: advance(s.Pack(leaves)).Flatten(),
        s.Flatten(),
        maximum_iterations=most_times,
    )
    return s.Pack(leaves)


@dataclasses.dataclass(frozen=True)
class _Loop:
    """The search's steps over its state, a NestedMap:

    step: int32 scalar.
    alive: bool [B], whether an example is still searched for; one that is not stays as it is.
    active: the active hypotheses, best first: mask [B, k, P], log_probs [B, k], their newest
      tokens ids [B, k] and these tokens' own token_log_probs [B, k].
    done: the finished ones, best first: mask [B, n, P], scores and lengths [B, n], and
      token_log_probs [B, n] of their endings.
    flat: all that was written: ids and token_log_probs [B, T, k], attention [B, P, S].
    model: the model's state.
    """

    config: BeamSearch
    decode_step: DecodeStep
    requests: Requests
    annotate: Annotate

    def start(self, model_state: NestedMap, places: int) -> NestedMap:
        """The state before the first step, with P places."""
        c, b = self.config, self.requests.batch_size
        k, n = c.beam_size, c.num_found
        alone = tf.constant([[0.0] + [_NEVER] * (k - 1)])  # k equal ones would stay equal.
        flat = NestedMap(
            ids=tf.zeros([b, c.max_steps, k], tf.int32),
            token_log_probs=tf.zeros([b, c.max_steps, k]),
        )
        if "attention" in model_state:
            flat.attention = tf.zeros([b, places, model_state.attention.shape[-1]])
        return self._annotated(
            NestedMap(
                step=tf.constant(0),
                alive=self.requests.max_steps > 0,
                active=NestedMap(
                    ids=tf.fill([b, k], c.bos_id),
                    mask=tf.zeros([b, k, places]),
                    log_probs=tf.tile(alone, [b, 1]),
                    token_log_probs=tf.zeros([b, k]),
                ),
                done=NestedMap(
                    mask=tf.zeros([b, n, places]),
                    scores=tf.fill([b, n], _NEVER),
                    lengths=tf.zeros([b, n], tf.int32),
                    token_log_probs=tf.zeros([b, n]),
                ),
                flat=flat,
                model=model_state,
            )
        )

    def grown(self, s: NestedMap, places: int, grow: Grow) -> NestedMap:
        """The state with P places."""
        grown = NestedMap(s, model=grow(s.model, places), flat=NestedMap(s.flat))
        for hypotheses in ("active", "done"):
            mask = lengthened(s[hypotheses].mask, places, axis=2)
            grown[hypotheses] = NestedMap(s[hypotheses], mask=mask)
        if "attention" in s.flat:
            grown.flat.attention = lengthened(s.flat.attention, places)
        return self._annotated(grown)

    def advance(self, s: NestedMap) -> NestedMap:
        """One token more for each active hypothesis."""
        active, flat = self._write(s)
        exists = s.alive[:, None] & (active.log_probs > _NEVER / 2)
        mask = active.mask * tf.cast(exists, tf.float32)[..., None]
        logits, model = self.decode_step(s.model, active.ids, mask, s.step)
        if "attention" in flat:
            place = s.step * self.config.beam_size
            flat.attention = write_at(flat.attention, model.attention, place)
        # log_softmax would write all V numbers once more, less their maximum.
        log_probs = logits - tf.reduce_logsumexp(logits, -1, keepdims=True)
        token_log_probs = self._permitted(log_probs, s.step)  # [B, k, V]
        ranks = self._ranks(active.log_probs[..., None] + token_log_probs, s.step)
        ends, going_on = self._split_off_ends(ranks)
        best, index = top_k(going_on, self.config.beam_size)
        done = self._finish(s, active, flat, token_log_probs, ends, best)
        active = self._branch(active, token_log_probs, best, index)
        return self._annotated(
            NestedMap(
                step=s.step + 1,
                alive=s.alive & self._undecided(active, done, s.step + 1),
                active=rows.where(s.alive, active, s.active),
                done=rows.where(s.alive, done, s.done),
                flat=flat,
                model=model,
            )
        )

    def results(self, s: NestedMap) -> Hypotheses:
        """The finished hypotheses.

        Only if nothing finished at all does an example's best active hypothesis, which reached
        its last step without an EOS, take their place.
        """
        found, n = s.done, self.config.num_found
        max_steps = self.requests.max_steps
        none = (found.lengths[:, 0] == 0) & (max_steps > 0)
        unended = none[:, None] & (tf.range(n) == 0)  # [B, n]
        best = s.active.Transform(lambda x: x[:, :1])
        score = best.log_probs / self._length_penalty(max_steps)[:, None]
        found = NestedMap(
            mask=tf.where(unended[..., None], best.mask, found.mask),
            scores=tf.where(unended, score, found.scores),
            lengths=tf.where(unended, max_steps[:, None], found.lengths),
            token_log_probs=tf.where(unended, best.token_log_probs, found.token_log_probs),
        )
        last_ids = tf.where(unended, best.ids, self.config.eos_id)
        return Hypotheses(
            ids=self._read(found, s.flat.ids, last_ids),
            lengths=found.lengths,
            scores=found.scores,
            token_log_probs=self._read(found, s.flat.token_log_probs, found.token_log_probs),
            attention=self._read_attention(found, s.flat),
        )

    def _write(self, s: NestedMap) -> tuple[NestedMap, NestedMap]:
        """Gives each active hypothesis its place of this step and writes its newest token."""
        c = self.config
        place = s.step * c.beam_size + tf.range(c.beam_size)
        here = tf.one_hot(place, s.active.mask.shape[-1])
        active = NestedMap(s.active, mask=s.active.mask + here[None])
        flat = NestedMap(
            s.flat,
            ids=write_at(s.flat.ids, s.active.ids[:, None], s.step),
            token_log_probs=write_at(
                s.flat.token_log_probs, s.active.token_log_probs[:, None], s.step
            ),
        )
        return active, flat

    def _permitted(self, log_probs: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """[B, k, V] log-probabilities with all but the prefix, and endings too soon, at NEVER."""
        vocab_size = log_probs.shape[-1]
        too_soon = (step + 1 < self.requests.min_steps)[:, None]
        forbidden = too_soon & (tf.range(vocab_size) == self.config.eos_id)  # [B, V]
        if self.requests.prefix.shape[1]:
            forced = rows.column(self.requests.prefix, step)[:, None]
            forbidden |= (forced > 0) & (tf.range(vocab_size) != forced)
        return tf.where(forbidden[:, None], _NEVER, tf.maximum(log_probs, _NEVER))

    def _ranks(self, log_probs: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """What continuations [B, k, V] are chosen by: their log-probability, or a draw.

        The largest of log p / temperature + g, g from Gumbel's distribution, is a draw from the
        softmax of log p / temperature.
        """
        if self.config.temperature is None:
            return log_probs
        seed = self.requests.seed + tf.stack([step, 0])
        uniform = random_uniform(tuple(log_probs.shape), seed)
        uniform = tf.maximum(self.annotate(uniform, "B__"), 2.0**-25)
        drawn = log_probs / self.config.temperature - tf.math.log(-tf.math.log(uniform))
        return tf.where(log_probs > _NEVER / 2, drawn, _NEVER)

    def _split_off_ends(self, ranks: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Ranks [B, k] of those that end, and [B, k * V] of those that go on."""
        batch_size, beam_size, vocab_size = ranks.shape
        ending = tf.range(vocab_size) == self.config.eos_id
        going_on = tf.reshape(tf.where(ending, _NEVER, ranks), [batch_size, beam_size * vocab_size])
        return ranks[..., self.config.eos_id], going_on

    def _branch(
        self, active: NestedMap, token_log_probs: tf.Tensor, ranks: tf.Tensor, index: tf.Tensor
    ) -> NestedMap:
        """The active hypotheses extended by the chosen [B, k] of the k * V continuations."""
        batch_size, beam_size, vocab_size = token_log_probs.shape
        flat = tf.reshape(token_log_probs, [batch_size, beam_size * vocab_size])
        chosen = rows.gathered(flat, index)
        parents = index // vocab_size
        # Where fewer than k can go on, endings and what is forbidden fill the rest.
        chosen = tf.where(ranks > _NEVER / 2, chosen, _NEVER)
        return NestedMap(
            ids=index % vocab_size,
            mask=rows.reordered(active.mask, parents),
            log_probs=rows.picked(active.log_probs, parents) + chosen,
            token_log_probs=chosen,
        )

    def _finish(
        self,
        s: NestedMap,
        active: NestedMap,
        flat: NestedMap,
        token_log_probs: tf.Tensor,
        ends: tf.Tensor,
        going_on: tf.Tensor,
    ) -> NestedMap:
        """Merges the hypotheses that end here into the finished.

        Args:
          s: the state before this step.
          active: with this step's places.
          flat: with this step's tokens.
          token_log_probs: float [B, k, V].
          ends: float [B, k], the rank of each active hypothesis with its ending.
          going_on: float [B, k], those of the k best that do not end.
        """
        length = s.step + 1
        ending = token_log_probs[..., self.config.eos_id]
        log_probs = active.log_probs + ending
        # One that does not exist, of the first steps, must not pass for finished.
        valid = log_probs > _NEVER / 2
        valid &= _competes(ends, going_on) | (length == self.requests.max_steps)[:, None]
        score = log_probs / self._length_penalty(length)
        if self.config.coverage_weight:
            covered = tf.einsum("BKP,BPS->BKS", active.mask, flat.attention)
            score += scoring.coverage_penalty(
                covered, s.model.source_real, self.config.coverage_weight
            )
        new = NestedMap(
            mask=active.mask,
            scores=tf.where(valid, score, _NEVER),
            lengths=tf.where(valid, length, 0),
            token_log_probs=ending,
        )
        pairs = zip(s.done.Flatten(), new.Flatten(), strict=True)
        all_of_them = s.done.Pack(tf.concat(pair, 1) for pair in pairs)
        scores, index = tf.math.top_k(all_of_them.scores, self.config.num_found)
        return NestedMap(
            mask=rows.reordered(all_of_them.mask, index),
            scores=scores,
            lengths=rows.picked(all_of_them.lengths, index),
            token_log_probs=rows.picked(all_of_them.token_log_probs, index),
        )

    def _undecided(self, active: NestedMap, done: NestedMap, step: tf.Tensor) -> tf.Tensor:
        """bool [B]: whether what is active after `step` steps can still change what is found."""
        may_go_on = step < self.requests.max_steps
        if self.config.temperature is not None:
            return may_go_on & (done.lengths[:, 0] == 0)
        bound = scoring.best_possible(
            active.log_probs[:, 0],
            tf.cast(self.requests.max_steps, tf.float32),
            self.config.length_norm_alpha,
        )
        return may_go_on & (bound > done.scores[:, -1])

    def _length_penalty(self, length: tf.Tensor) -> tf.Tensor:
        return scoring.length_penalty(tf.cast(length, tf.float32), self.config.length_norm_alpha)

    def _read(self, found: NestedMap, written: tf.Tensor, last: tf.Tensor) -> tf.Tensor:
        """[B, n, T]: what was written [B, T, k] for the tokens after BOS, and the last's [B, n].

        A hypothesis' last token is never written: nothing comes after it.
        """
        of_inputs = tf.reduce_sum(
            tf.cast(self._by_step(found), written.dtype) * written[:, None], -1
        )
        of_outputs = tf.concat([of_inputs[..., 1:], tf.zeros_like(of_inputs[..., :1])], -1)
        place, length = tf.range(1, self.config.max_steps + 1), found.lengths[..., None]
        ended = tf.where(place == length, last[..., None], of_outputs)
        return tf.where(place <= length, ended, tf.zeros_like(ended))

    def _read_attention(self, found: NestedMap, flat: NestedMap) -> tf.Tensor | None:
        if "attention" not in flat:
            return None
        batch_size, _, source_len = flat.attention.shape
        by_step = [batch_size, self.config.max_steps, self.config.beam_size, source_len]
        written = tf.reshape(flat.attention, by_step)
        return tf.einsum("BNTK,BTKS->BNTS", self._by_step(found), written)

    def _by_step(self, found: NestedMap) -> tf.Tensor:
        """The masks as [B, n, T, k]: at most one place of each step."""
        batch_size, num_found, _ = found.mask.shape
        c = self.config
        return tf.reshape(found.mask, [batch_size, num_found, c.max_steps, c.beam_size])

    def _annotated(self, s: NestedMap) -> NestedMap:
        def by_batch(x: tf.Tensor) -> tf.Tensor:
            return self.annotate(x, "B" + "_" * (x.shape.rank - 1)) if x.shape.rank else x

        return NestedMap(s.Transform(by_batch), model=s.model)  # The model annotates its own.


def _competes(ends: tf.Tensor, going_on: tf.Tensor) -> tf.Tensor:
    """bool [B, k]: which endings are among the k best of all continuations, ends or not."""
    others = tf.concat([ends, going_on], 1)
    better = tf.cast(others[:, None] > ends[..., None], tf.int32)
    return tf.reduce_sum(better, -1) < ends.shape[1]
