"""Layers with random names of weights, which compute as before.

Some of the names are used by other weights of the library, such as a router's `wg`.
"""

import zlib
from collections.abc import Iterator

import numpy as np

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.attention import MultiHeadAttention
from lingvo_gshard.layers.feed_forward import FeedForwardLayer
from lingvo_gshard.layers.moe import MoELayer
from lingvo_gshard.layers.norms import LayerNorm
from lingvo_gshard.layers.vocabulary import EmbeddingLayer

_OTHERS = ["wg", "wq", "wi", "wk", "wv", "embedding_table", "self_norm", "some_bias"]
# The methods of layers that take theta.
_METHODS = ("FProp", "Project", "Weights")


def _names(path: str) -> Iterator[str]:
    """Returns the names for a layer, which are the same whenever the model is built."""
    rng = np.random.default_rng(zlib.crc32(path.encode()))
    numbers = rng.choice(10_000, 8, replace=False)
    return iter(rng.permutation([*_OTHERS, *(f"w{number}" for number in numbers)]).tolist())


class _WithOwnNames(NestedMap):
    """Weights by the names that a layer has in its code."""


def _renamed(base):
    """Returns a subclass of a layer that declares its weights by other names."""

    class Renamed(base):
        def __init__(self, params, annotator, path=""):
            self.names = {}
            self._unused = _names(path)
            super().__init__(params, annotator, path)

        def CreateVariable(self, name, spec):
            self.names[name] = next(self._unused)
            super().CreateVariable(self.names[name], spec)

    def with_own_names(method):
        def renamed(self, theta, *args, **kwargs):
            if not isinstance(theta, _WithOwnNames):
                children = theta.keys() - set(self.names.values())
                own = _WithOwnNames({name: theta[name] for name in children})
                for name, alias in self.names.items():
                    own[name] = theta[alias]
                theta = own
            return method(self, theta, *args, **kwargs)

        return renamed

    for method in _METHODS:
        if hasattr(base, method):
            setattr(Renamed, method, with_own_names(getattr(base, method)))
    return Renamed


RenamedMoELayer = _renamed(MoELayer)
_CLASSES = {
    MoELayer: RenamedMoELayer,
    **{
        base: _renamed(base)
        for base in (EmbeddingLayer, FeedForwardLayer, LayerNorm, MultiHeadAttention)
    },
}


def with_class(params: Params) -> Params:
    """Returns a layer's settings for the same layer with other names."""
    changed = params.Copy()
    changed.cls = _CLASSES[params.cls]
    return changed


def task(params: Params) -> Params:
    """Returns a translation task's settings for layers with other names."""
    renamed = params.Copy()
    renamed.embedding = with_class(renamed.embedding)
    for stack in (renamed.encoder, renamed.decoder):
        stack.layer.norm = with_class(stack.layer.norm)
        stack.layer.attention = with_class(stack.layer.attention)
        stack.dense = with_class(stack.dense)
        if stack.moe is not None:
            stack.moe = with_class(stack.moe)
    return renamed
