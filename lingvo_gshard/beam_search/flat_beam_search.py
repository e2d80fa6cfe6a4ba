"""Flat beam search (appendix A.1): hypotheses interleaved in one sequence that is never reordered.

Step t writes the k newest tokens to places t * k to t * k + k - 1 of a flat sequence of P = T * k
places, regardless of the hypotheses that they extend. A 0/1 mask [B, k, P] marks the places of each
active hypothesis. When the beam branches, only the mask is reordered. With k = 2, where both `c`
and `d`
extend `a`:

    step               0        1        2
    place            0   1    2   3    4   5
    flat sequence   BOS BOS   a   b    c   d
    mask of  a c     1   0    1   0    1   0
    mask of  a d     1   0    1   0    0   1

The sentences of A.1, and where they are implemented:

    the hypotheses' tokens are interleaved in one sequence               _Loop._write
    self-attention is masked to the places of a hypothesis               _Loop._advance
    keys and values are stored alike and never reordered                 the model's state
    a beam expansion reorders the 0/1 mask alone                         _Loop._branch
    scores are normalized by length, as in reference [61] (Wu et al.)    _Loop._length_penalty
    attention becomes k times longer                                     _Loop.grown shortens it

B batch, k beam, n finished hypotheses, V vocabulary, S source length, T steps, P places.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

from lingvo_gshard.beam_search import sampling, selection
from lingvo_gshard.beam_search.beam import BeamSearch, Hypotheses, Requests, Rules, Stopping
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.random import random_uniform
from lingvo_gshard.layers.slices import lengthened, write_at

# Below the log-probability of any hypothesis; sums of it stay far from float32's limit. Any number
# below half of it marks an absent hypothesis or a forbidden token.
_NEVER = -1e9

# (model state, ids [B, k], mask [B, k, P], step) -> (logits [B, k, V], model state)
DecodeStep: TypeAlias = (
    "Callable[[NestedMap, tf.Tensor, tf.Tensor, tf.Tensor], tuple[tf.Tensor, NestedMap]]"
)
# (model state, P) -> the same state with room for P places
Grow: TypeAlias = Callable[[NestedMap, int], NestedMap]
# (tensor, its dims) -> the annotated tensor
Annotate: TypeAlias = "Callable[[tf.Tensor, str], tf.Tensor]"


def search(
    config: BeamSearch,
    decode_step: DecodeStep,
    model_state: NestedMap,
    requests: Requests,
    annotate: Annotate,
    grow: Grow,
) -> Hypotheses:
    """Finds the n best hypotheses of each example in a loop within the program.

    Each step considers all continuations of an example's active hypotheses. The k most probable
    continuations that do not end stay active. A continuation that ends is finished, and scored by
    its length, if it is among the k most probable of all, or if this is its last step. (If every
    ending counted, the empty hypothesis would win whenever the model is unsure.) An example is
    done when none of its active hypotheses can still become one of its n best finished ones, or
    earlier with another config.stopping. The loop ends when all examples are done.

    A sample ends only where EOS is drawn, and is cut at its last step.

    The search runs in stages, one loop for each of config.stage_ends. The model's state and the
    masks have places for the current stage only, at first config.first_places.

    Args:
      config: The settings.
      decode_step: The model. It ignores all-zero rows of the mask, which belong to absent
        hypotheses and to examples that are done, and keeps the shapes of its state.
      model_state: The model's state before the first step. If it has `attention`, float32
        [B, k, S], from the newest tokens to the source, the search records it. A coverage penalty
        needs `attention` and `source_real`, float32 [B, S], 1 for tokens.
      requests: The limits of each example.
      annotate: Annotates a tensor by its dims, which begin with B or, for the logits, with U.
      grow: Makes room for more places in the model's state.

    Raises:
      ValueError: if the model's state lacks what the coverage penalty needs, or top_k is above V.
    """
    if config.coverage_weight and not {"attention", "source_real"} <= set(model_state):
        raise ValueError(
            f"flat_beam_search: coverage_weight {config.coverage_weight} needs attention and "
            f"source_real in the model's state, which has only {', '.join(sorted(model_state))}."
        )

    loop = _Loop(config, decode_step, requests, annotate)
    state = loop.start(model_state)

    steps_taken = 0
    for stage_end in config.stage_ends:
        if steps_taken > 0:
            state = loop.grown(state, stage_end * config.beam_size, grow)
        state = loop.run(state, stage_end - steps_taken)
        steps_taken = stage_end

    return loop.results(state)


@dataclasses.dataclass(frozen=True)
class _Loop:
    """The steps of the search.

    Its state is a NestedMap:

    step: int32 scalar.
    alive: bool [B], whether the search of an example goes on; if not, its hypotheses stay fixed.
    active: the active hypotheses, best first: mask [B, k, P], log_probs [B, k], and their newest
      tokens' ids and token_log_probs, both [B, k].
    done: the finished hypotheses, best first: mask [B, n, P], scores and lengths [B, n], and the
      token_log_probs [B, n] of their EOS.
    flat: the record of all steps: ids and token_log_probs [B, T, k], attention [B, P, S].
    model: the model's state.
    """

    config: BeamSearch
    decode_step: DecodeStep
    requests: Requests
    annotate: Annotate

    def start(self, model_state: NestedMap) -> NestedMap:
        """Returns the state before the first step."""
        config = self.config
        batch_size = self.requests.max_steps.shape[0]
        k = config.beam_size
        n = config.num_kept
        places = config.first_places

        # Only the first hypothesis exists: k equal ones would never differ.
        first_only = tf.constant([[0.0] + [_NEVER] * (k - 1)])

        flat = NestedMap(
            ids=tf.zeros([batch_size, config.max_steps, k], tf.int32),
            token_log_probs=tf.zeros([batch_size, config.max_steps, k]),
        )
        if "attention" in model_state:
            source_len = model_state.attention.shape[-1]
            flat.attention = tf.zeros([batch_size, places, source_len])

        return self._annotated(
            NestedMap(
                step=tf.constant(0),
                alive=self.requests.max_steps > 0,
                active=NestedMap(
                    ids=tf.fill([batch_size, k], config.bos_id),
                    mask=tf.zeros([batch_size, k, places]),
                    log_probs=tf.tile(first_only, [batch_size, 1]),
                    token_log_probs=tf.zeros([batch_size, k]),
                ),
                done=NestedMap(
                    mask=tf.zeros([batch_size, n, places]),
                    scores=tf.fill([batch_size, n], _NEVER),
                    lengths=tf.zeros([batch_size, n], tf.int32),
                    token_log_probs=tf.zeros([batch_size, n]),
                ),
                flat=flat,
                model=model_state,
            )
        )

    def grown(self, state: NestedMap, places: int, grow: Grow) -> NestedMap:
        """Returns the state with room for P places.

        A.1 notes that attention becomes k times longer. It attends to the places of a stage only,
        so early steps, whose places are few, do not pay for the last ones.
        """
        grown = NestedMap(state, model=grow(state.model, places), flat=NestedMap(state.flat))

        for hypotheses in ("active", "done"):
            mask = lengthened(state[hypotheses].mask, places, axis=2)
            grown[hypotheses] = NestedMap(state[hypotheses], mask=mask)

        if "attention" in state.flat:
            grown.flat.attention = lengthened(state.flat.attention, places)

        return self._annotated(grown)

    def run(self, state: NestedMap, max_steps: int) -> NestedMap:
        """Returns the state after at most `max_steps` steps, fewer if all examples are done."""
        (state,) = tf.while_loop(
            lambda state: tf.reduce_any(state.alive),
            lambda state: [self._advance(state)],
            [state],
            maximum_iterations=max_steps,
        )
        return state

    def _advance(self, state: NestedMap) -> NestedMap:
        """Returns the state after a step, which extends each active hypothesis by one token."""
        active, flat = self._write(state)

        # A.1: each hypothesis attends to its own places of the flat sequence. An absent one, or one
        # of an example that is done, attends to nothing.
        exists = state.alive[:, None] & (active.log_probs > _NEVER / 2)  # [B, k]
        mask = active.mask * tf.cast(exists, tf.float32)[..., None]
        logits, model = self.decode_step(state.model, active.ids, mask, state.step)
        self.config.check_vocabulary(logits.shape[-1])
        if "attention" in flat:
            place = state.step * self.config.beam_size
            flat.attention = write_at(flat.attention, model.attention, place)

        # Rank all continuations, [B, k, V]. log_softmax would write all V numbers another time, to
        # subtract their maximum.
        log_probs = logits - tf.reduce_logsumexp(logits, -1, keepdims=True)
        token_log_probs = self._permitted(log_probs, state.step)
        ranks = self._ranks(active.log_probs[..., None], token_log_probs, state.step)

        # The k best continuations of each example that do not end, out of k * V.
        is_end = tf.range(ranks.shape[-1]) == self.config.eos_id
        going_on = tf.reshape(tf.where(is_end, _NEVER, ranks), [ranks.shape[0], -1])
        best, index = selection.top_k(going_on, self.config.beam_size)  # Both [B, k].

        # Endings compete with them, and then with the hypotheses that ended before.
        ends = ranks[..., self.config.eos_id]  # [B, k]
        done = self._finish(state, active, flat, token_log_probs, ends, best)
        active = self._branch(active, token_log_probs, best, index)

        return self._annotated(
            NestedMap(
                step=state.step + 1,
                alive=state.alive & self._undecided(active, done, state.step + 1),
                active=selection.where(state.alive, active, state.active),
                done=selection.where(state.alive, done, state.done),
                flat=flat,
                model=model,
            )
        )

    def results(self, state: NestedMap) -> Hypotheses:
        """Returns the best hypotheses of each example, of which some may lack EOS; see Rules."""
        is_sample = self.config.temperature is not None
        if self.config.rules is Rules.HUGGING_FACE and not is_sample:
            hypotheses = self._with_all_unended(state)
        else:
            hypotheses = self._with_one_unended(state)
        last_ids = hypotheses.pop("last_ids")

        # The attention of a hypothesis' tokens, collected by its mask from the flat sequence.
        attention = state.flat.get("attention")
        if attention is not None:
            by_step = tf.reshape(attention, [*state.flat.ids.shape, attention.shape[-1]])
            attention = tf.einsum("BNTK,BTKS->BNTS", self._by_step(hypotheses), by_step)

        return Hypotheses(
            ids=self._read(hypotheses, state.flat.ids, last_ids),
            lengths=hypotheses.lengths,
            scores=hypotheses.scores,
            token_log_probs=self._read(
                hypotheses, state.flat.token_log_probs, hypotheses.token_log_probs
            ),
            attention=attention,
        )

    def _with_one_unended(self, state: NestedMap) -> NestedMap:
        """Returns the finished hypotheses; the best active one for an example without any.

        `last_ids`, int32 [B, n], are their last tokens.
        """
        done = state.done
        max_steps = self.requests.max_steps

        # An example that finished no hypothesis gets its best active one, cut at its maximum
        # length, in the first of the n rows, unless its logits are not finite.
        best = state.active.Transform(lambda leaf: leaf[:, :1])
        exists = (max_steps > 0)[:, None] & (best.log_probs > _NEVER / 2)  # [B, 1]
        has_none = (done.lengths[:, :1] == 0) & exists
        unended = has_none & (tf.range(self.config.num_found) == 0)  # [B, n]
        score = self._scores(best.mask, best.log_probs, max_steps[:, None], state)
        return NestedMap(
            mask=tf.where(unended[..., None], best.mask, done.mask),
            scores=tf.where(unended, score, done.scores),
            lengths=tf.where(unended, max_steps[:, None], done.lengths),
            token_log_probs=tf.where(unended, best.token_log_probs, done.token_log_probs),
            last_ids=tf.where(unended, best.ids, self.config.eos_id),
        )

    def _with_all_unended(self, state: NestedMap) -> NestedMap:
        """Returns the n best of the finished hypotheses and the ones cut at the maximum length.

        The same fields as `_with_one_unended`; n is config.num_found.
        """
        done = state.done
        active = state.active
        max_steps = self.requests.max_steps

        # An example that was decided before its last step has active hypotheses that do not count.
        num_steps = tf.cast(tf.reduce_sum(active.mask[:, 0], -1), tf.int32)  # [B]
        is_cut = (max_steps > 0) & (num_steps == max_steps)
        valid = is_cut[:, None] & (active.log_probs > _NEVER / 2)  # [B, k]
        score = self._scores(active.mask, active.log_probs, max_steps[:, None], state)

        ended = NestedMap(done, last_ids=tf.fill(done.lengths.shape, self.config.eos_id))
        cut = NestedMap(
            mask=active.mask,
            scores=tf.where(valid, score, _NEVER),
            lengths=tf.where(valid, max_steps[:, None], 0),
            token_log_probs=active.token_log_probs,
            last_ids=active.ids,
        )
        return _best(ended, cut, self.config.num_found)

    def _write(self, state: NestedMap) -> tuple[NestedMap, NestedMap]:
        """Adds a place to each active hypothesis and writes its newest token there.

        A.1: hypothesis i's token at step t has place t * k + i, whatever its earlier places are.
        Returns the active hypotheses and the flat sequence.
        """
        k = self.config.beam_size
        new_places = tf.one_hot(state.step * k + tf.range(k), state.active.mask.shape[-1])  # [k, P]
        active = NestedMap(state.active, mask=state.active.mask + new_places[None])

        flat = NestedMap(state.flat)
        for name in ("ids", "token_log_probs"):
            flat[name] = write_at(state.flat[name], state.active[name][:, None], state.step)

        return active, flat

    def _permitted(self, log_probs: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """Returns the log-probabilities [B, k, V] of the tokens that may follow at this step.

        EOS may not follow before the minimum length, and only the forced token may come first.
        """
        too_soon = (step + 1 < self.requests.min_steps)[:, None]
        forbidden = too_soon & (tf.range(log_probs.shape[-1]) == self.config.eos_id)  # [B, V]
        permitted = tf.where(forbidden[:, None], _NEVER, tf.maximum(log_probs, _NEVER))
        if self.requests.first_ids is None:
            return permitted

        # A first token that is forced is certain.
        first_ids = self.requests.first_ids
        forced = tf.one_hot(first_ids, log_probs.shape[-1], 0.0, _NEVER)[:, None]  # [B, 1, V]
        is_forced = (step == 0) & (first_ids >= 0)
        return tf.where(is_forced[:, None, None], forced, permitted)

    def _ranks(
        self, log_probs_before: tf.Tensor, token_log_probs: tf.Tensor, step: tf.Tensor
    ) -> tf.Tensor:
        """Returns the numbers [B, k, V] by which an example's continuations are ranked.

        In a beam these are the log-probabilities of whole hypotheses: of the tokens before,
        [B, k, 1], plus the new tokens' own. A beam of one ranks only the new tokens, since they all
        follow the same tokens; so neither the choice nor a sample depends on the length.
        """
        if self.config.beam_size > 1:
            return log_probs_before + token_log_probs
        if self.config.temperature is None:
            return token_log_probs
        return self._drawn_ranks(token_log_probs, self.config.temperature, step)

    def _drawn_ranks(
        self, token_log_probs: tf.Tensor, temperature: float, step: tf.Tensor
    ) -> tf.Tensor:
        """Returns numbers [B, 1, V], the largest of which is at the sampled token.

        The token with the largest log p / temperature + g, with g drawn from Gumbel's distribution,
        is a sample of softmax(log p / temperature). With top_k or top_p, only the tokens that they
        keep are drawn. A forbidden token is never drawn.
        """
        # g = -log(-log(u)) with u uniform in (0, 1); 0 is replaced by a number below the smallest
        # positive one that can be drawn.
        seed = self.requests.seed + tf.stack([step, 0])
        uniform = random_uniform(tuple(token_log_probs.shape), seed)
        uniform = tf.maximum(self.annotate(uniform, "U_V"), 2.0**-25)
        gumbel = -tf.math.log(-tf.math.log(uniform))

        # Both terms are multiplied by min(temperature, 1), so that no temperature leaves float32's
        # range: the lower the temperature, the less g counts.
        scale = min(temperature, 1.0)
        ranks = token_log_probs * (scale / temperature) + gumbel * scale

        # The forbidden tokens are known before anything is divided or drawn.
        permitted = token_log_probs > _NEVER / 2
        if self.config.top_k is not None or self.config.top_p is not None:
            permitted = sampling.may_be_drawn(
                token_log_probs, permitted, temperature, self.config.top_k, self.config.top_p
            )
        return tf.where(permitted, ranks, _NEVER)

    def _branch(
        self, active: NestedMap, token_log_probs: tf.Tensor, ranks: tf.Tensor, index: tf.Tensor
    ) -> NestedMap:
        """Returns the active hypotheses extended by the chosen ones of the k * V continuations.

        `ranks` and `index`, both [B, k], describe the chosen continuations. A.1: the flat sequence,
        with its keys and values, stays in place; only the mask is reordered.
        """
        batch_size, beam_size, vocab_size = token_log_probs.shape
        by_index = tf.reshape(token_log_probs, [batch_size, beam_size * vocab_size])
        chosen = selection.gathered(by_index, index)  # [B, k]
        parents = index // vocab_size  # [B, k], the hypotheses that the continuations extend.

        # If fewer than k can go on, endings and forbidden tokens fill the rest.
        chosen = tf.where(ranks > _NEVER / 2, chosen, _NEVER)

        return NestedMap(
            ids=index % vocab_size,
            mask=selection.reordered(active.mask, parents),
            log_probs=selection.picked(active.log_probs, parents) + chosen,
            token_log_probs=chosen,
        )

    def _finish(
        self,
        state: NestedMap,
        active: NestedMap,
        flat: NestedMap,
        token_log_probs: tf.Tensor,
        ends: tf.Tensor,
        going_on: tf.Tensor,
    ) -> NestedMap:
        """Returns the n best finished hypotheses, including the ones that end at this step.

        `state` is the state before this step; `active` and `flat` include it. `ends` [B, k] ranks
        each active hypothesis followed by EOS, `going_on` [B, k] the k best continuations without
        EOS.
        """
        length = state.step + 1
        ending = token_log_probs[..., self.config.eos_id]  # [B, k]
        log_probs = active.log_probs + ending  # [B, k], log P of the whole hypotheses.

        # An ending counts only among the k best of all continuations, or at the last step. Any
        # continuation with a better rank is another ending, or among the k best that go on.
        others = tf.concat([ends, going_on], 1)  # [B, 2 * k]
        num_better = tf.reduce_sum(tf.cast(others[:, None] > ends[..., None], tf.int32), -1)
        counts = num_better < ends.shape[1]
        if self.config.temperature is None:  # A sample ends only if its EOS is drawn.
            counts |= (length == self.requests.max_steps)[:, None]

        # Absent hypotheses of the first steps must not count as finished.
        valid = counts & (log_probs > _NEVER / 2)
        score = self._scores(active.mask, log_probs, length, NestedMap(state, flat=flat))

        # Merge them with the hypotheses that ended before, [B, n + k], and keep the n best.
        new = NestedMap(
            mask=active.mask,
            scores=tf.where(valid, score, _NEVER),
            lengths=tf.where(valid, length, 0),
            token_log_probs=ending,
        )
        return _best(state.done, new, self.config.num_kept)

    def _undecided(self, active: NestedMap, done: NestedMap, step: tf.Tensor) -> tf.Tensor:
        """Returns bool [B]: whether the active hypotheses can still change the n best.

        Let p <= 0 be an active hypothesis' log-probability, and let a continuation end with q <= p
        at a length l <= L. Since q <= 0 and 0 < lp(l) <= lp(L) (alpha is not negative), q / lp(l)
        <= q / lp(L) <= p / lp(L). As cp <= 0, p / lp(L) also bounds its score q / lp(l) + cp.
        """
        # The first active hypothesis is the most probable one; if it is absent, all are.
        may_go_on = (step < self.requests.max_steps) & (active.log_probs[:, 0] > _NEVER / 2)
        if self.config.temperature is not None:
            # Sampling ends with the first sampled EOS, whatever a longer hypothesis might score.
            return may_go_on & (done.lengths[:, 0] == 0)

        if self.config.stopping is Stopping.FIRST:
            return may_go_on & (done.lengths[:, -1] == 0)

        # p / lp(L) of the first one bounds them all. LIKELY takes the length so far, which is a
        # guess: a longer hypothesis may score better.
        is_likely = self.config.stopping is Stopping.LIKELY
        length = step if is_likely else self.requests.max_steps
        bound = active.log_probs[:, 0] / self._length_penalty(length)  # [B]
        return may_go_on & (bound > done.scores[:, -1])

    def _scores(
        self, mask: tf.Tensor, log_probs: tf.Tensor, length: tf.Tensor, state: NestedMap
    ) -> tf.Tensor:
        """Returns the scores log P / lp + cp (Wu et al., equation 14) of whole hypotheses, [B, k].

        `mask` [B, k, P] has the places of all their tokens but the last one, and `log_probs` [B, k]
        their log P. `state` has the attention to the source, if there is a coverage penalty.
        """
        scores = log_probs / self._length_penalty(length)
        if self.config.coverage_weight:
            source_real = state.model.source_real
            scores += self._coverage_penalty(mask, state.flat.attention, source_real)
        return scores

    def _length_penalty(self, length: tf.Tensor) -> tf.Tensor:
        """Returns lp = ((5 + length) / 6)^alpha (Wu et al., equation 14).

        Under Hugging Face's rules, lp = length^alpha.
        """
        if self.config.rules is Rules.HUGGING_FACE:
            return tf.cast(length, tf.float32) ** self.config.length_norm_alpha
        return ((5.0 + tf.cast(length, tf.float32)) / 6.0) ** self.config.length_norm_alpha

    def _coverage_penalty(
        self, mask: tf.Tensor, attention: tf.Tensor, source_real: tf.Tensor
    ) -> tf.Tensor:
        """Returns cp = beta * sum_i log(min(sum_j p_ij, 1)), [B, k] (Wu et al., equation 14).

        i counts source tokens, and j the tokens of a hypothesis; p_ij is the attention of j to i.
        """
        covered = tf.einsum("BKP,BPS->BKS", mask, attention)  # sum_j p_ij
        covered = tf.clip_by_value(covered, 1e-9, 1.0)  # Keeps the logarithm finite.
        penalty = tf.einsum("BKS,BS->BK", tf.math.log(covered), source_real)
        return self.config.coverage_weight * penalty

    def _read(self, hypotheses: NestedMap, written: tf.Tensor, last: tf.Tensor) -> tf.Tensor:
        """Returns [B, n, T] values of each hypothesis' tokens.

        `written`, [B, T, k], holds the values by step, beginning with BOS. The last token of a
        hypothesis is never written to the flat sequence, as no step follows it; its values are
        `last`, [B, n].
        """
        # A hypothesis has one place in each step, so the sum over k is the value at that place.
        mask = tf.cast(self._by_step(hypotheses), written.dtype)
        inputs = tf.reduce_sum(mask * written[:, None], -1)  # [B, n, T]: BOS and its successors.
        outputs = tf.concat([inputs[..., 1:], tf.zeros_like(inputs[..., :1])], -1)

        # The last token is at count == length; beyond it the values are 0.
        count = tf.range(1, self.config.max_steps + 1)
        length = hypotheses.lengths[..., None]
        values = tf.where(count == length, last[..., None], outputs)
        return tf.where(count <= length, values, tf.zeros_like(values))

    def _by_step(self, hypotheses: NestedMap) -> tf.Tensor:
        """Returns the masks as [B, n, T, k], with at most one place in each step."""
        batch_size, num_hypotheses, _ = hypotheses.mask.shape
        shape = [batch_size, num_hypotheses, self.config.max_steps, self.config.beam_size]
        return tf.reshape(hypotheses.mask, shape)

    def _annotated(self, state: NestedMap) -> NestedMap:
        """Returns the state split along B, except the model's state, which the model annotates."""

        def by_batch(leaf: tf.Tensor) -> tf.Tensor:
            if leaf.shape.rank == 0:
                return leaf
            return self.annotate(leaf, "B" + "_" * (leaf.shape.rank - 1))

        return NestedMap(state.Transform(by_batch), model=state.model)


def _best(old: NestedMap, new: NestedMap, count: int) -> NestedMap:
    """Returns the `count` best of two sets of finished hypotheses by their scores, best first.

    Each has a mask [B, ., P], scores, and other numbers [B, .].
    """
    both = old.Transform(lambda *pair: tf.concat(pair, 1), new)
    scores, index = tf.math.top_k(both.scores, count)

    best = NestedMap(mask=selection.reordered(both.mask, index), scores=scores)
    for name in both:
        if name not in best:
            best[name] = selection.picked(both[name], index)
    return best
