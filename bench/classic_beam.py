"""Beam search with classic caches: a row for each hypothesis, and rows reordered at every step.

It uses the model and the search of the flat beam, which does not reorder its caches.

B batch, k beam, T steps, P = T * k places of the flat sequence.
"""

from lingvo_gshard.beam_search.beam import BeamSearch
from lingvo_gshard.beam_search.flat_beam_search import DecodeStep, Grow
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.model.translation import TranslationTask

_REORDERED = ("self_keys", "self_values")


def init_state(
    task: TranslationTask, theta: NestedMap, features: NestedMap, config: BeamSearch
) -> NestedMap:
    """Encodes each source once; returns B * k rows of caches for the steps of the first stage."""
    state = task.InitDecode(theta, features, config.stage_ends[0])
    return state.Transform(lambda x: tf.repeat(x, config.beam_size, axis=0))


def grow(task: TranslationTask, config: BeamSearch) -> Grow:
    """Returns `grow` for flat_beam_search.search: one place of a row's cache is k flat places."""
    return lambda state, places: task.GrowDecode(state, places // config.beam_size)


def decode_step(task: TranslationTask, theta: NestedMap, config: BeamSearch) -> DecodeStep:
    """Returns `decode_step` for flat_beam_search.search, with the state from init_state.

    In a hypothesis' mask, the previous step shows which hypothesis it continues.
    """
    k = config.beam_size

    def step(
        state: NestedMap, ids: tf.Tensor, mask: tf.Tensor, index: tf.Tensor
    ) -> tuple[tf.Tensor, NestedMap]:
        batch_size = ids.shape[0]

        # Its place in the previous step is the hypothesis that it continues.
        by_step = tf.reshape(mask, [batch_size, k, -1, k])
        parents = tf.argmax(tf.gather(by_step, tf.maximum(index - 1, 0), axis=2), -1)  # [B, k]

        def reordered(cache: tf.Tensor) -> tf.Tensor:
            rows = tf.reshape(cache, [batch_size, k, *cache.shape[1:]])
            return tf.reshape(tf.gather(rows, parents, batch_dims=1), cache.shape)

        layers = []
        for layer in state.cache.layers:
            caches = {name: reordered(layer[name]) for name in _REORDERED}
            layers.append(NestedMap(layer, **caches))

        # Each row is a beam of one hypothesis, which attends to its place in every step so far.
        state = NestedMap(state, cache=NestedMap(layers=layers))
        past = tf.reshape(tf.reduce_sum(by_step, -1), [batch_size * k, 1, -1])
        logits, state = task.DecodeStep(
            theta, state, tf.reshape(ids, [batch_size * k, 1]), past, index
        )
        return tf.reshape(logits, [batch_size, k, logits.shape[-1]]), state

    return step
