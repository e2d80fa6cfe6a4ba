"""The input of language models: packed rows of documents."""

from __future__ import annotations

from lingvo_gshard.core import hyperparams
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.layout import TensorSpec


class TextInput:
    """An iterator of batches of packed documents over a prepared data folder."""

    @classmethod
    def Params(cls) -> hyperparams.InstantiableParams:
        """Returns the input's hyperparameters."""
        p = hyperparams.InstantiableParams(cls)
        p.Define("data_dir", hyperparams.REQUIRED, "A folder that data_prep.build prepared.")
        p.Define("batch_size", hyperparams.REQUIRED, "B, rows per batch, over all processes.")
        p.Define("row_len", hyperparams.REQUIRED, "L, tokens per row.")
        p.Define("split", "train", "train, dev or test.")
        p.Define("repeat", True, "Endless and mixed, or one pass.")
        p.Define("shuffle", True, "Shuffle the documents and the rows.")
        p.Define("seed", 1, "Seed of the mixture and the shuffles.")
        return p

    @staticmethod
    def batch_specs(p: hyperparams.Params) -> NestedMap:
        """Returns the TensorSpecs of a batch by the settings alone, without any data."""
        shape = (p.batch_size, p.row_len)
        ids = TensorSpec(shape, "int32", "BL")
        return NestedMap(
            features=NestedMap(ids=ids, segment_ids=ids, positions=ids),
            labels=NestedMap(labels=ids, weights=TensorSpec(shape, "float32", "BL"), num_bytes=ids),
        )
