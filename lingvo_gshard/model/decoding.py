"""Flat beam search (A.1) by an experiment's settings, for tasks that decode. B batch, k beam."""

from __future__ import annotations

from typing import Protocol

from lingvo_gshard.beam_search import flat_beam_search
from lingvo_gshard.beam_search.beam import Requests
from lingvo_gshard.beam_search.flat_beam_search import Annotate, DecodeStep, Grow
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.model.decode_params import SearchParams


class FirstState(Protocol):
    """Makes a model's state before the first step."""

    def __call__(self, cache_len: int, *, attention_beam: int) -> NestedMap:
        """Returns a state with caches of `cache_len` places.

        With `attention_beam`, k, the state has `attention`, for flat_beam_search.search.
        """
        ...


def search(
    decode: SearchParams,
    first_state: FirstState,
    decode_step: DecodeStep,
    grow: Grow,
    has_input: tf.Tensor,
    annotate: Annotate,
    seeds: tf.Tensor | None = None,
    first_ids: tf.Tensor | None = None,
) -> NestedMap:
    """Returns the best hypotheses: ids, lengths, scores, token_log_probs, and perhaps attention.

    `has_input`, int32 [B], is 1 for rows with an input and 0 for filler rows, which are not
    decoded. `seeds`, int32 [B, 2], seed each row's sampling. If it is None, all rows use
    decode.seed, and a sample depends on its place in the batch. `first_ids`, int32 [B], are the
    tokens that each row's hypotheses begin with; see Requests. Raises ValueError if a setting is
    out of its range.
    """
    config = decode.search()
    requests = _requests(decode, has_input, seeds, first_ids)

    needs_attention = decode.tell_attention or decode.coverage_weight
    state = first_state(
        config.first_places, attention_beam=decode.beam_size if needs_attention else 0
    )
    hypotheses = flat_beam_search.search(config, decode_step, state, requests, annotate, grow)

    predictions = NestedMap(
        ids=hypotheses.ids,
        lengths=hypotheses.lengths,
        scores=hypotheses.scores,
        token_log_probs=hypotheses.token_log_probs,
    )
    if decode.tell_attention:
        predictions.attention = hypotheses.attention
    return predictions


def _requests(
    decode: SearchParams,
    has_input: tf.Tensor,
    seeds: tf.Tensor | None,
    first_ids: tf.Tensor | None,
) -> Requests:
    """Returns the experiment's limits for each row that has an input."""
    if not 1 <= decode.min_target_len <= decode.max_target_len:
        raise ValueError(
            f"decode.min_target_len must be 1 to max_target_len {decode.max_target_len}, got "
            f"{decode.min_target_len}."
        )
    if not 0 <= decode.seed < 2**31:
        raise ValueError(f"decode.seed must be from 0 to 2**31 - 1, got {decode.seed}.")

    batch = has_input.shape
    shortest = tf.fill(batch, decode.min_target_len)
    longest = tf.fill(batch, decode.max_target_len)
    if seeds is None:
        seeds = tf.constant((decode.seed, 0))
    return Requests(shortest, longest * has_input, seeds, first_ids)
