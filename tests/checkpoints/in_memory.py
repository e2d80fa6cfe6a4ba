"""Arrays like a checkpoint's, whose values are in memory."""

import jax
import numpy as np
import tensorstore
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lingvo_gshard.checkpoints.checked_array import CheckedArray, computed_view
from lingvo_gshard.checkpoints.fingerprints import fingerprint
from lingvo_gshard.sharding.layout import TensorSpec


def array(values, dims, name="theta.w"):
    """Returns an array without fingerprints."""
    values = np.asarray(values)
    spec = TensorSpec(values.shape, values.dtype.name, dims)
    return CheckedArray(name, spec, lambda: tensorstore.array(values))


def saved_fingerprint(values, dims):
    """Returns the fingerprint that saving the array would compute."""
    here = NamedSharding(Mesh(jax.devices()[:1], ("here",)), PartitionSpec())
    return fingerprint(jax.device_put(values, here), dims)


class File:
    """The file of one array; `reads` are the indices that were read from it."""

    def __init__(self, values, dims, name="theta.w", has_fingerprints=True, chunk_shape=None):
        """The file is read in chunks of `chunk_shape`, by default one element."""
        self.values = np.asarray(values)
        self.reads = []
        self._chunk_shape = chunk_shape or (1,) * self.values.ndim
        saved = saved_fingerprint(self.values, dims) if has_fingerprints else None
        spec = TensorSpec(self.values.shape, self.values.dtype.name, dims)
        self.array = CheckedArray(name, spec, self._view, saved)

    def _view(self):
        return computed_view(self._read, self.values.shape, self.values.dtype, self._chunk_shape)

    def _read(self, index, values):
        self.reads.append(index)
        values[...] = self.values[index]
