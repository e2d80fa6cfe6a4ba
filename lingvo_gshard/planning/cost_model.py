"""A quick estimate of a training step, from an experiment's numbers and its table alone.

The forward pass is a list of products of two tensors whose dims have letters, those of
sharding/layout.py. Each product has two gradients, which are products as well. From the axes of
the letters follow the size of a core's part and the collectives: a sum over a split dim is an
all-reduce, or a reduce-scatter if its axis splits the result elsewhere; a factor is gathered over
the axes that split the other factor elsewhere.
"""

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping

import numpy as np

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.hlo.collectives import Collective
from lingvo_gshard.layers import moe
from lingvo_gshard.layers.dispatch import Dispatch
from lingvo_gshard.layers.repeat import Remat
from lingvo_gshard.model import flops
from lingvo_gshard.planning.hardware import Network, Torus
from lingvo_gshard.planning.memory import GIB, state_gib
from lingvo_gshard.planning.plan import Times
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.sharding.mesh import names_of

# Fitted to compiled steps: how often results that are kept, and weights with their gradients, are
# read or written outside products, such as by norms, sums, stacks and the optimizer.
_KEPT_PASSES, _WEIGHT_PASSES = 5, 10
# From so many partitions on, a TPU's compiler writes them as all-reduces, which take twice as long.
_SUMMED = {"reduce-scatter": 1, "all-gather": 64}
_SAVING = (Remat.NONE, Remat.ALL_BUT_PRODUCTS, Remat.BLOCK)


@dataclasses.dataclass(frozen=True)
class Product:
    """The einsum `left, right -> result`, which a forward pass runs `times`."""

    left: str
    right: str
    result: str
    sizes: Mapping[str, float]  # Of its letters.
    times: int
    kept: Remat = Remat.NONE  # The most saving remat that keeps the result for backward.
    moved: str = ""  # The dims that the result is then moved to.
    is_lookup: bool = False  # It has no flops and no left factor.


def products(params: Params, weights: NestedMap) -> Iterator[Product]:
    """Yields the products of a forward pass, given the specs of all weights."""
    for path, spec in weights.FlattenItems():
        sizes = _batch_sizes(params, path) | _sizes(spec)
        times, name = sizes.get("R", 1), path.rpartition(".")[2]
        if name != "bias":
            yield _with_weight(path, spec.dims.removeprefix("R"), sizes, times)
        if name == "wq":
            yield Product("BNLD", "BNTD", "BNLT", sizes, times)
            yield Product("BNLT", "BNTD", "BNLD", sizes, times)
        if name == "wg":
            indexed = params.task.Get(path.partition(".")[0]).moe.dispatch is Dispatch.GATHER
            kept = Remat.ALL_BUT_PRODUCTS
            yield Product("GSEC", "GSM", "GECM", sizes, times, kept, "EGCM", indexed)
            yield Product("GSEC", "GECM", "GSM", sizes, times, is_lookup=indexed)


def _with_weight(path: str, dims: str, sizes: Mapping[str, int], times: int) -> Product:
    """The product with a weight, whose first dims but E are summed: M, or all but a last M."""
    own = dims.removeprefix("E")
    summed = "M" if own[0] == "M" else own[:-1]
    rows = "EGC" if own != dims else "GS" if "_" in dims else "BL"
    result = rows + (own.removeprefix(summed) or "M")
    kept = Remat.ALL_BUT_PRODUCTS if path.endswith((".wi", ".wo")) else Remat.NONE
    if "[" not in path or "self_norm" in path:  # Outside the stacks, or the input of a layer.
        kept = Remat.BLOCK
    moved = "GECM" if result == "EGCM" else ""
    return Product(rows + summed, dims, result, sizes, times, kept, moved, "embedding" in path)


def _batch_sizes(params: Params, path: str) -> dict[str, int]:
    """The sizes of the letters of a batch where the weight of this path is used."""
    p, is_encoder = params.input, path.startswith(("encoder", "source"))
    is_source = is_encoder or flops.reads_source(path)
    length = p.source_len if is_source else p.target_len
    attended = p.source_len if "source_attention" in path else length
    sizes = {"B": p.batch_size, "L": length, "T": attended}
    experts = (params.task.encoder if is_encoder else params.task.decoder).moe
    if experts is None:
        return sizes
    size = moe.group_size(experts, p.batch_size * length)
    capacity = experts.train_capacity.Instantiate().places(size, experts.num_experts)
    groups = p.batch_size * length // size
    return sizes | {"G": groups, "S": size, "E": experts.num_experts, "C": capacity}


class CostModel:
    """Estimates training steps of an experiment for different tables and remats.

    `state` are the specs of theta and slots, and the partitions lie on `network` in its order.
    """

    def __init__(self, params: Params, state: NestedMap, network: Network) -> None:
        self._state, self._network = state, network
        self._products = list(products(params, state.theta))
        self._num_bytes = 2 if params.task.activation_dtype == "bfloat16" else 4
        # The decoder's activations take the encoded source along.
        p, dim = params.input, params.task.dim
        lengths = (p.source_len, p.source_len + p.target_len)
        self._travelling = [{"B": p.batch_size, "L": length, "M": dim} for length in lengths]

    def estimate(
        self, parts: Partitioning, remat: Remat, microbatches: int = 1
    ) -> tuple[float, Times]:
        """The GiB of a core, and the times of a step at the roofline."""
        layout = _Layout(parts, self._network, self._num_bytes, microbatches)
        secs, kept, largest = np.zeros(4), 0.0, 0.0
        for each in self._products:
            is_kept = _SAVING.index(remat) <= _SAVING.index(each.kept)
            staged = layout.stages > 1 and "R" in each.sizes
            run = layout.in_stages(each) if staged else each
            secs += run.times * layout.product(run, forward_runs=2 - is_kept)
            made = layout.part(run.moved or run.result, run.sizes)
            # A stage has the results of one microbatch.
            kept += (each.times // layout.stages if staged else is_kept * each.times) * made
            largest = max(largest, made)
        for sizes in self._travelling:
            made, shifts = layout.shifts(sizes)
            secs, kept = secs + shifts, kept + made
        for spec in self._state.theta.Flatten():
            updated, gradient = layout.update(spec)
            secs, kept = secs + updated, kept + gradient
        gib = sum(state_gib(self._state, parts)) + (kept + largest) / GIB
        return gib, Times(*secs.tolist())


class _Layout:
    """What products and updates cost a core: seconds of compute, memory, network, and of all."""

    def __init__(
        self, parts: Partitioning, network: Network, num_bytes: int, microbatches: int
    ) -> None:
        self._parts, self._network, self._num_bytes = parts, network, num_bytes
        (self.stages,), self._microbatches = parts.factor("R"), microbatches
        self._ticks = microbatches + self.stages - 1
        # On a TPU, what only products read is rounded before it is sent.
        self._sent = 2 / num_bytes if isinstance(network, Torus) else 1.0
        self._shape, self._rates = parts.mesh.shape, dict[tuple[str, str], float]()
        self._splits = dict[str, Mapping[str, str]]()

    def in_stages(self, p: Product) -> Product:
        """A product of one microbatch, which all stages run in each tick, idle ones included."""
        return dataclasses.replace(
            p,
            left=f"R{p.left}",
            right=f"R{p.right}",
            result=f"R{p.result}",
            moved=p.moved and f"R{p.moved}",
            sizes=self._microbatch(p.sizes),
            times=p.times * self._ticks // self.stages,
        )

    def shifts(self, sizes: Mapping[str, float]) -> tuple[float, np.ndarray]:
        """The bytes that enter and leave a stage's ticks, and the times of moves between stages."""
        if self.stages == 1:
            return 0.0, np.zeros(4)
        size = self.part("RBLM", self._microbatch(sizes))
        secs = self._secs("collective-permute", names_of(self._parts.axes("R")), size)
        return 3 * self._ticks * size, self._times(0, 0, 3 * self._ticks * secs)

    def _microbatch(self, sizes: Mapping[str, float]) -> dict[str, float]:
        parts = {each: sizes[each] / self._microbatches for each in "BG" if each in sizes}
        return {**sizes, **parts, "R": self.stages}

    def product(self, p: Product, forward_runs: int) -> np.ndarray:
        """A product, its gradients, and the moves and passes of its result."""
        # A weight's gradient is summed where the weight is updated.
        right = p.right if set(p.right) & set("BG") else p.right.lower()
        total = forward_runs * self._einsum(p, p.left, p.right, p.result)
        gradient = self._einsum(p, p.left, p.result, right)
        if right.startswith("r"):  # Summed over the partitions once, after a stage's last tick.
            gradient -= (1 - 1 / self._ticks) * gradient[2] * np.array([0, 0, 1, 1])
        total += gradient
        if not p.is_lookup:
            total += self._einsum(p, p.result, p.right, p.left)
        size, here, there = self.part(p.result, p.sizes), *map(self._split, (p.result, p.moved))
        axes = [axis for axis in here if there.get(axis, here[axis]) != here[axis]]
        network = self._secs("all-to-all", axes, size * self._sent)
        passes = _KEPT_PASSES * size if forward_runs == 1 else 0
        return total + self._times(0, passes, (forward_runs + 1) * network)

    def update(self, spec: TensorSpec) -> tuple[np.ndarray, float]:
        """A weight's update with the gathering of what was split for it; its gradient's bytes."""
        sizes, whole, split = _sizes(spec), *map(self._split, (spec.dims, spec.dims.lower()))
        axes = [axis for axis in split if axis not in whole]
        gathered = self._secs("all-gather", axes, 4 * self._elements(spec.dims, sizes, whole))
        elements = self._elements(spec.dims, sizes, split)
        # A stage adds to its gradients in every tick: a product's result, read and written again.
        staged = self.stages > 1 and spec.dims.startswith("R")
        passes = _WEIGHT_PASSES + 2 * staged * self._ticks
        # The gradients of stacks of matrices have the dtype of activations.
        is_stack = spec.dims.startswith("R") and len(spec.dims) > 2
        gradient = (self._num_bytes if is_stack else 4) * elements
        return self._times(0, passes * 4 * elements, gathered), gradient

    def part(self, dims: str, sizes: Mapping[str, float]) -> float:
        """The bytes of a core's part of an activation; probabilities and logits are float32."""
        elements = self._elements(dims, sizes, self._split(dims))
        is_float32 = dims.removeprefix("R") in ("BNLT", "BLV")
        return elements * (4 if is_float32 else self._num_bytes)

    def _einsum(self, p: Product, left: str, right: str, result: str) -> np.ndarray:
        """One product; its left factor stays where it is."""
        on_right, on_result = self._split(right), self._split(result)
        split = {**on_result, **on_right, **self._split(left)}
        summed = [axis for axis, letter in split.items() if letter not in result.upper()]
        scattered = [axis for axis in summed if axis in on_result]
        gathered = [axis for axis, letter in on_right.items() if split[axis] != letter]
        sizes = [
            self._num_bytes * self._elements(dims.upper(), p.sizes, split)
            for dims in (left, right, result)
        ]
        sizes[1] *= self._sent if gathered else 1
        part = sizes[2] / math.prod(self._shape[axis] for axis in scattered)
        network = self._secs("all-gather", gathered, sizes[1])
        network += self._secs("reduce-scatter", scattered, part)
        network += self._secs("all-reduce", set(summed) - set(scattered), part)
        if p.is_lookup:
            return self._times(0, 2 * min(sizes[1:]), network)
        products = 2 * self._elements({*left, *right}, p.sizes, split)
        return self._times(products, sum(sizes), network)

    def _split(self, dims: str) -> Mapping[str, str]:
        """The letter, as a capital, that each axis splits."""
        if dims not in self._splits:
            axes = zip(dims.upper(), self._parts.axes(dims), strict=True)
            self._splits[dims] = {name: dim for dim, axis in axes for name in names_of([axis])}
        return self._splits[dims]

    def _elements(
        self, dims: Collection[str], sizes: Mapping[str, float], split: Mapping[str, str]
    ) -> float:
        ways = math.prod(self._shape[axis] for axis, letter in split.items() if letter in dims)
        return math.prod(sizes[letter] for letter in dims) / ways

    def _times(self, flops: float, num_bytes: float, network: float) -> np.ndarray:
        rates = self._network.generation
        compute, moved = flops / rates.peak_flops, num_bytes / rates.memory_bytes_per_sec
        return np.array([compute, moved, network, max(compute, moved) + network])

    def _secs(self, kind: str, axes: Collection[str], num_bytes: float) -> float:
        """The time of a collective among the cores along `axes`."""
        key, count = (kind, ",".join(axes)), self._parts.mesh.num_partitions
        if not axes:
            return 0.0
        if key not in self._rates:
            grid = np.arange(count).reshape(self._parts.mesh.axis_sizes)
            group = grid[tuple(slice(None) if name in axes else 0 for name in self._shape)].ravel()
            group = group[:2] if kind == "collective-permute" else group
            collective = Collective(kind, 1, (tuple(group.tolist()),), 1)
            self._rates[key] = self._network.collective_secs(collective)
            if isinstance(self._network, Torus) and count >= _SUMMED.get(kind, math.inf):
                self._rates[key] *= 2
        return num_bytes * self._rates[key]


def _sizes(spec: TensorSpec) -> dict[str, int]:
    return dict(zip(spec.dims, spec.shape, strict=True))
