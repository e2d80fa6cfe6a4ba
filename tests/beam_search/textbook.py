"""A small random model with ragged sources, and a slow beam search that reorders its caches.

The search is an independent implementation, one example at a time, in float64, with explicit lists
of tokens. It never ends early.

B batch, k beam, n wanted hypotheses, S source length, T steps, V vocabulary, D model.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.slices import lengthened, write_at

BOS, EOS = 1, 2


@dataclasses.dataclass(frozen=True)
class Found:
    """One hypothesis."""

    score: float
    tokens: tuple[int, ...]
    token_log_probs: tuple[float, ...]
    attention: np.ndarray  # [tokens, S]


@dataclasses.dataclass(frozen=True)
class RandomModel:
    """A model whose logits depend on all previous tokens, their positions and the source.

    A hypothesis' cache is h [D], the sum of its tokens' vectors. It attends to the source with
    weights softmax(source h), and its logits are (tanh h + weights source) out.
    """

    table_TVD: np.ndarray
    source_BSD: np.ndarray
    real_BS: np.ndarray
    out_DV: np.ndarray

    @classmethod
    def make(cls, seed: int, lengths: list[int], vocab_size: int, steps: int) -> RandomModel:
        """Returns a random model of float32 arrays; `lengths` are the sources' lengths."""
        rng, dim, batch_size = np.random.default_rng(seed), 6, len(lengths)
        real = np.arange(5)[None] < np.array(lengths)[:, None]

        def normal(*shape):
            return rng.standard_normal(shape).astype("float32")

        return cls(
            normal(steps, vocab_size, dim),
            normal(batch_size, 5, dim),
            real.astype("float32"),
            0.9 * normal(dim, vocab_size),
        )

    def tensors(self) -> NestedMap:
        """Returns the arrays by name."""
        return NestedMap({f.name: getattr(self, f.name) for f in dataclasses.fields(self)})

    def step(self, b: int, h_KD: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (log-probabilities [k, V], attention [k, S]) of example b, in float64."""
        source_SD = self.source_BSD[b].astype("float64")
        logits_KS = np.where(self.real_BS[b] > 0, h_KD @ source_SD.T, -np.inf)
        attention_KS = _softmax(logits_KS)
        return np.log(_softmax((np.tanh(h_KD) + attention_KS @ source_SD) @ self.out_DV)), (
            attention_KS
        )


def flat_state(config, model: NestedMap) -> NestedMap:
    """Returns the flat decoder's first state from RandomModel.tensors."""
    batch_size, source_len, dim = model.source_BSD.shape
    return NestedMap(
        flat=tf.zeros([batch_size, config.first_places, dim]),
        attention=tf.zeros([batch_size, config.beam_size, source_len]),
        source_real=model.real_BS,
    )


def flat_grow(state: NestedMap, places: int) -> NestedMap:
    """Returns the state with room for this many places."""
    return NestedMap(state, flat=lengthened(state.flat, places))


def flat_step(config, model: NestedMap):
    """Returns the same model for the flat beam; the mask selects from its cache [B, P, D]."""

    def step(state, ids, mask, index):
        new = tf.gather(tf.gather(model.table_TVD, index), ids)  # [B, k, D]
        state = NestedMap(state, flat=write_at(state.flat, new, index * config.beam_size))
        h = tf.einsum("BKP,BPD->BKD", mask, state.flat)
        logits = tf.einsum("BKD,BSD->BKS", h, model.source_BSD)
        logits += (state.source_real[:, None] - 1.0) * 1e9
        state.attention = tf.nn.softmax(logits)
        context = tf.einsum("BKS,BSD->BKD", state.attention, model.source_BSD)
        return tf.einsum("BKD,DV->BKV", tf.tanh(h) + context, model.out_DV), state

    return step


def search(config, model: RandomModel, b: int, min_steps: int, max_steps: int) -> list[Found]:
    """Returns the n best hypotheses of example b, best first."""
    k = config.beam_size
    active = [((), ())]  # Tokens and their log-probabilities.
    cache_KD, attended_KTS = np.zeros([1, model.out_DV.shape[0]]), np.zeros([1, 0, 5])
    finished: list[Found] = []
    for step in range(max_steps):
        newest = [tokens[-1] if tokens else BOS for tokens, _ in active]
        cache_KD = cache_KD + model.table_TVD[step, newest]
        log_probs_KV, attention_KS = model.step(b, cache_KD)
        attended_KTS = np.concatenate([attended_KTS, attention_KS[:, None]], 1)
        if step + 1 < min_steps:
            log_probs_KV[:, EOS] = -np.inf
        extended = [
            (sum(old) + log_probs_KV[parent, v], parent, v)
            for parent, (_, old) in enumerate(active)
            for v in range(log_probs_KV.shape[1])
            if log_probs_KV[parent, v] > -np.inf
        ]
        extended.sort(key=lambda x: -x[0])
        for _, parent, v in extended if step + 1 == max_steps else extended[:k]:
            if v == EOS:
                hypothesis = _grown(active, log_probs_KV, parent, v)
                finished.append(_found(config, model, b, *hypothesis, attended_KTS[parent]))
        going_on = [(parent, v) for _, parent, v in extended if v != EOS][:k]
        active = [_grown(active, log_probs_KV, parent, v) for parent, v in going_on]
        parents = [parent for parent, _ in going_on]
        cache_KD, attended_KTS = cache_KD[parents], attended_KTS[parents]
    finished.sort(key=lambda x: -x.score)
    if finished:
        return finished[: config.num_found]
    return [_found(config, model, b, *active[0], attended_KTS[0])]


def exhaustive(config, model: RandomModel, b: int) -> list[tuple[float, tuple[int, ...]]]:
    """Returns the score and tokens of all sequences of at most T tokens with EOS, best first."""
    words, scored = [v for v in range(model.out_DV.shape[1]) if v != EOS], []
    for length in range(config.max_steps):
        for body in itertools.product(words, repeat=length):
            tokens, cache, total = [*body, EOS], 0.0, 0.0
            for step, token in enumerate(tokens):
                cache = cache + model.table_TVD[step, [tokens[step - 1] if step else BOS]]
                total += model.step(b, cache)[0][0, token]
            scored.append((total / normalizer(config, len(tokens)), tuple(tokens)))
    return sorted(scored, reverse=True)


def _grown(active, log_probs_KV, parent, v):
    tokens, log_probs = active[parent]
    return (*tokens, v), (*log_probs, float(log_probs_KV[parent, v]))


def _found(config, model, b, tokens, log_probs, attention_TS) -> Found:
    covered = attention_TS.sum(0)[model.real_BS[b] > 0]
    score = sum(log_probs) / normalizer(config, len(tokens))
    score += config.coverage_weight * np.log(np.minimum(covered, 1.0)).sum()
    return Found(score, tokens, log_probs, attention_TS)


def normalizer(config, length: int) -> float:
    """Returns the divisor of a log-probability (Wu et al. 2016, equation 14)."""
    return ((5 + length) / 6) ** config.length_norm_alpha


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
