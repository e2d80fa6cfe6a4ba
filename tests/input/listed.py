"""A source of examples in memory, and the settings for batches of them."""

import numpy as np

from lingvo_gshard.input import packing
from lingvo_gshard.input.batches import TranslationInput
from lingvo_gshard.input.batching import Batching
from lingvo_gshard.input.example_codec import EOS_ID, Example


class ListedSource:
    """One language's examples of given lengths; example i consists of the id 10 + i, and EOS."""

    def __init__(self, lengths):
        self.lengths = np.array(lengths)
        self.sizes = [len(lengths)]

    def __len__(self):
        return len(self.lengths)

    def read(self, indices):
        return [self._example(int(index)) for index in indices]

    def _example(self, index):
        source, target = self.lengths[index]
        ids = [np.array([10 + index] * (n - 1) + [EOS_ID], np.int32) for n in (source, target)]
        return Example(*ids)


def batching(lengths, shape, process_index=0, num_processes=1, **settings):
    """Returns a Batching; without shuffling, unless `settings` say otherwise."""
    settings = {"shuffle": False, "seed": 1, "temperature": 1.0, "max_repeats": None} | settings
    params = TranslationInput.Params().Set(**settings)
    row_shape = packing.RowShape(*shape)
    return Batching(ListedSource(lengths), params, row_shape, process_index, num_processes)


def examples_of(batch):
    """Returns the numbers of the examples in each row, in order, ignoring EOS and padding."""
    rows = batch.features.source_ids.tolist()
    return [list(dict.fromkeys(token - 10 for token in row if token >= 10)) for row in rows]
