"""Flat beam search (appendix A.1): hypotheses interleaved in one sequence that is never reordered.

Step t writes the k newest tokens to places t * k to t * k + k - 1 of a flat sequence of P = T * k
places, regardless of the hypotheses that they extend. A 0/1 mask [B, k, P] marks the places of each
active hypothesis. When the beam branches, only it is reordered. The sequence can grow in stages.

B batch, k beam, n finished hypotheses, V vocabulary, S source length, T steps, P places.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

from lingvo_gshard.beam_search import selection
from lingvo_gshard.beam_search.beam import BeamSearch, Hypotheses, Requests
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.random import random_uniform
from lingvo_gshard.layers.slices import lengthened, write_at

# Below the log-probability of any hypothesis; sums of it stay far from float32's limit.
_NEVER = -1e9

# (model state, ids [B, k], mask [B, k, P], step) -> (logits [B, k, V], model state)
DecodeStep = Callable[
    [NestedMap, "tf.Tensor", "tf.Tensor", "tf.Tensor"], "tuple[tf.Tensor, NestedMap]"
]
# (model state, P) -> the same state with room for P places
Grow = Callable[[NestedMap, int], NestedMap]
Annotate = Callable[["tf.Tensor", str], "tf.Tensor"]


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
    done when none of its active hypotheses can still become one of its n best finished ones. The
    loop ends when all examples are done.

    `decode_step` ignores all-zero mask rows: absent hypotheses, or those of an example that is
    done. Its steps keep the shapes of `model_state`. If the state has `attention`, float32
    [B, k, S], from the newest tokens to the source, the search records it. A coverage penalty needs
    it and `source_real`, float32 [B, S], 1 for tokens; ValueError is raised without them.
    `annotate` gets dims that begin with B. The search runs in stages, one loop for each of
    config.stage_ends. The model's state and the masks have places for the current stage only, at
    first config.first_places.
    """
    if config.coverage_weight and not {"attention", "source_real"} <= set(model_state):
        raise ValueError(
            f"flat_beam_search: coverage_weight {config.coverage_weight} needs attention and "
            f"source_real in the model's state, which has only {', '.join(sorted(model_state))}."
        )
    loop = _Loop(config, decode_step, requests, annotate)
    s = loop.start(model_state)
    for begin, end in itertools.pairwise((0, *config.stage_ends)):
        if begin:
            s = loop.grown(s, end * config.beam_size, grow)
        s = loop.run(s, end - begin)
    return loop.results(s)


@dataclasses.dataclass(frozen=True)
class _Loop:
    """The steps of the search. Its state is a NestedMap:

    step: int32 scalar.
    alive: bool [B], whether the search of an example goes on; if not, its hypotheses stay fixed.
    active: the active hypotheses, best first: mask [B, k, P], log_probs [B, k], and their newest
      tokens' ids and token_log_probs, both [B, k].
    done: the finished hypotheses, best first: mask [B, n, P], scores and lengths [B, n], and the
      token_log_probs [B, n] of their EOS.
    flat: what the steps wrote: ids and token_log_probs [B, T, k], attention [B, P, S].
    model: the model's state.
    """

    config: BeamSearch
    decode_step: DecodeStep
    requests: Requests
    annotate: Annotate

    def start(self, model_state: NestedMap) -> NestedMap:
        """Returns the state before the first step."""
        c, b = self.config, self.requests.max_steps.shape[0]
        k, n, places = c.beam_size, c.num_found, c.first_places
        alone = tf.constant([[0.0] + [_NEVER] * (k - 1)])  # k equal ones would never differ.
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
        """Returns the state with room for P places."""
        grown = NestedMap(s, model=grow(s.model, places), flat=NestedMap(s.flat))
        for hypotheses in ("active", "done"):
            mask = lengthened(s[hypotheses].mask, places, axis=2)
            grown[hypotheses] = NestedMap(s[hypotheses], mask=mask)
        if "attention" in s.flat:
            grown.flat.attention = lengthened(s.flat.attention, places)
        return self._annotated(grown)

    def run(self, s: NestedMap, most_steps: int) -> NestedMap:
        """Advances while any example is alive."""
        leaves = tf.while_loop(
            lambda *leaves: tf.reduce_any(s.Pack(leaves).alive),
            lambda *leaves: self._advance(s.Pack(leaves)).Flatten(),
            s.Flatten(),
            maximum_iterations=most_steps,
        )
        return s.Pack(leaves)

    def _advance(self, s: NestedMap) -> NestedMap:
        """Extends each active hypothesis by one token."""
        active, flat = self._write(s)
        exists = s.alive[:, None] & (active.log_probs > _NEVER / 2)
        mask = active.mask * tf.cast(exists, tf.float32)[..., None]
        logits, model = self.decode_step(s.model, active.ids, mask, s.step)
        if "attention" in flat:
            place = s.step * self.config.beam_size
            flat.attention = write_at(flat.attention, model.attention, place)
        # log_softmax would write all V numbers another time, to subtract their maximum.
        log_probs = logits - tf.reduce_logsumexp(logits, -1, keepdims=True)
        token_log_probs = self._permitted(log_probs, s.step)  # [B, k, V]
        ranks = self._ranks(active.log_probs[..., None] + token_log_probs, s.step)
        is_end = tf.range(ranks.shape[-1]) == self.config.eos_id
        going_on = tf.reshape(tf.where(is_end, _NEVER, ranks), [ranks.shape[0], -1])
        best, index = selection.top_k(going_on, self.config.beam_size)
        ends = ranks[..., self.config.eos_id]
        done = self._finish(s, active, flat, token_log_probs, ends, best)
        active = self._branch(active, token_log_probs, best, index)
        return self._annotated(
            NestedMap(
                step=s.step + 1,
                alive=s.alive & self._undecided(active, done, s.step + 1),
                active=selection.where(s.alive, active, s.active),
                done=selection.where(s.alive, done, s.done),
                flat=flat,
                model=model,
            )
        )

    def results(self, s: NestedMap) -> Hypotheses:
        """Returns the finished hypotheses, or the best active one of an example that has none."""
        found, max_steps = s.done, self.requests.max_steps
        none = (found.lengths[:, 0] == 0) & (max_steps > 0)
        unended = none[:, None] & (tf.range(self.config.num_found) == 0)  # [B, n]
        best = s.active.Transform(lambda x: x[:, :1])
        score = best.log_probs / self._length_penalty(max_steps)[:, None]
        found = NestedMap(
            mask=tf.where(unended[..., None], best.mask, found.mask),
            scores=tf.where(unended, score, found.scores),
            lengths=tf.where(unended, max_steps[:, None], found.lengths),
            token_log_probs=tf.where(unended, best.token_log_probs, found.token_log_probs),
        )
        last_ids = tf.where(unended, best.ids, self.config.eos_id)
        attention = s.flat.get("attention")
        if attention is not None:
            written = tf.reshape(attention, [*s.flat.ids.shape, attention.shape[-1]])
            attention = tf.einsum("BNTK,BTKS->BNTS", self._by_step(found), written)
        return Hypotheses(
            ids=self._read(found, s.flat.ids, last_ids),
            lengths=found.lengths,
            scores=found.scores,
            token_log_probs=self._read(found, s.flat.token_log_probs, found.token_log_probs),
            attention=attention,
        )

    def _write(self, s: NestedMap) -> tuple[NestedMap, NestedMap]:
        """Adds a place to each active hypothesis and writes its newest token there."""
        k = self.config.beam_size
        here = tf.one_hot(s.step * k + tf.range(k), s.active.mask.shape[-1])
        active, flat = NestedMap(s.active, mask=s.active.mask + here[None]), NestedMap(s.flat)
        for name in ("ids", "token_log_probs"):
            flat[name] = write_at(s.flat[name], s.active[name][:, None], s.step)
        return active, flat

    def _permitted(self, log_probs: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """Returns the log-probabilities [B, k, V] without EOS before the minimum length."""
        too_soon = (step + 1 < self.requests.min_steps)[:, None]
        forbidden = too_soon & (tf.range(log_probs.shape[-1]) == self.config.eos_id)  # [B, V]
        return tf.where(forbidden[:, None], _NEVER, tf.maximum(log_probs, _NEVER))

    def _ranks(self, log_probs: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """Returns the numbers [B, k, V] that continuations are ranked by.

        These are log-probabilities or, with a temperature, log p / temperature + g with g drawn
        from Gumbel's distribution: the token with the largest sum is a sample of that softmax.
        """
        if self.config.temperature is None:
            return log_probs
        seed = self.requests.seed + tf.stack([step, 0])
        uniform = random_uniform(tuple(log_probs.shape), seed)
        uniform = tf.maximum(self.annotate(uniform, "B__"), 2.0**-25)
        drawn = log_probs / self.config.temperature - tf.math.log(-tf.math.log(uniform))
        return tf.where(log_probs > _NEVER / 2, drawn, _NEVER)

    def _branch(
        self, active: NestedMap, token_log_probs: tf.Tensor, ranks: tf.Tensor, index: tf.Tensor
    ) -> NestedMap:
        """Extends active hypotheses by the chosen [B, k] of the k * V continuations."""
        batch_size, beam_size, vocab_size = token_log_probs.shape
        flat = tf.reshape(token_log_probs, [batch_size, beam_size * vocab_size])
        chosen = selection.gathered(flat, index)
        parents = index // vocab_size
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
        s: NestedMap,
        active: NestedMap,
        flat: NestedMap,
        token_log_probs: tf.Tensor,
        ends: tf.Tensor,
        going_on: tf.Tensor,
    ) -> NestedMap:
        """Merges the hypotheses that end at this step into the finished ones.

        `s` is the state before this step; `active` and `flat` include it. `ends` [B, k] ranks each
        active hypothesis followed by EOS, `going_on` [B, k] the k best continuations without EOS.
        """
        length = s.step + 1
        ending = token_log_probs[..., self.config.eos_id]
        log_probs = active.log_probs + ending
        others = tf.concat([ends, going_on], 1)
        num_better = tf.reduce_sum(tf.cast(others[:, None] > ends[..., None], tf.int32), -1)
        # Absent hypotheses of the first steps must not count as finished.
        valid = log_probs > _NEVER / 2
        valid &= (num_better < ends.shape[1]) | (length == self.requests.max_steps)[:, None]
        score = log_probs / self._length_penalty(length)
        if self.config.coverage_weight:
            score += self._coverage_penalty(active.mask, flat.attention, s.model.source_real)
        new = NestedMap(
            mask=active.mask,
            scores=tf.where(valid, score, _NEVER),
            lengths=tf.where(valid, length, 0),
            token_log_probs=ending,
        )
        finished = s.done.Transform(lambda *pair: tf.concat(pair, 1), new)
        scores, index = tf.math.top_k(finished.scores, self.config.num_found)
        return NestedMap(
            mask=selection.reordered(finished.mask, index),
            scores=scores,
            lengths=selection.picked(finished.lengths, index),
            token_log_probs=selection.picked(finished.token_log_probs, index),
        )

    def _undecided(self, active: NestedMap, done: NestedMap, step: tf.Tensor) -> tf.Tensor:
        """Returns bool [B]: whether the active hypotheses can still change the n best.

        Let p <= 0 be an active hypothesis' log-probability, and let a continuation end with q <= p
        at a length l <= L. Since q <= 0 and 0 < lp(l) <= lp(L) (alpha is not negative), q / lp(l)
        <= q / lp(L) <= p / lp(L). As cp <= 0, the same bounds its score q / lp(l) + cp.
        """
        may_go_on = step < self.requests.max_steps
        if self.config.temperature is not None:
            return may_go_on & (done.lengths[:, 0] == 0)
        bound = active.log_probs[:, 0] / self._length_penalty(self.requests.max_steps)
        return may_go_on & (bound > done.scores[:, -1])

    def _length_penalty(self, length: tf.Tensor) -> tf.Tensor:
        """lp = ((5 + length) / 6)^alpha; a score is log P / lp + cp (Wu et al., equation 14)."""
        return ((5.0 + tf.cast(length, tf.float32)) / 6.0) ** self.config.length_norm_alpha

    def _coverage_penalty(
        self, mask: tf.Tensor, attention: tf.Tensor, source_real: tf.Tensor
    ) -> tf.Tensor:
        """cp = beta * sum_i log(min(sum_j p_ij, 1)) over source tokens i and a hypothesis' j."""
        covered = tf.einsum("BKP,BPS->BKS", mask, attention)
        covered = tf.clip_by_value(covered, 1e-9, 1.0)  # Keeps the logarithm finite.
        penalty = tf.einsum("BKS,BS->BK", tf.math.log(covered), source_real)
        return self.config.coverage_weight * penalty

    def _read(self, found: NestedMap, written: tf.Tensor, last: tf.Tensor) -> tf.Tensor:
        """Returns [B, n, T] values of each hypothesis' tokens.

        `written`, [B, T, k], are values by step, those of BOS first. The last token of a hypothesis
        is never written to the flat sequence, as no step follows; its values are `last`, [B, n].
        """
        inputs = tf.reduce_sum(tf.cast(self._by_step(found), written.dtype) * written[:, None], -1)
        outputs = tf.concat([inputs[..., 1:], tf.zeros_like(inputs[..., :1])], -1)
        count, length = tf.range(1, self.config.max_steps + 1), found.lengths[..., None]
        ended = tf.where(count == length, last[..., None], outputs)
        return tf.where(count <= length, ended, tf.zeros_like(ended))

    def _by_step(self, found: NestedMap) -> tf.Tensor:
        """Returns the masks as [B, n, T, k], with at most one place in each step."""
        c = self.config
        return tf.reshape(found.mask, [*found.mask.shape[:2], c.max_steps, c.beam_size])

    def _annotated(self, s: NestedMap) -> NestedMap:
        def by_batch(x: tf.Tensor) -> tf.Tensor:
            return self.annotate(x, "B" + "_" * (x.shape.rank - 1)) if x.shape.rank else x

        return NestedMap(s.Transform(by_batch), model=s.model)  # The model annotates its state.
