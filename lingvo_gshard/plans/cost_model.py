"""A quick estimate of a training step's time, from an experiment's numbers and its table alone.

The forward pass is a list of einsums, and each has two gradients, which are einsums as well. The
axes of the letters determine the size of a core's part and the collectives: a sum over a split dim
is an all-reduce, or a reduce-scatter if its axis splits the result elsewhere; a factor is gathered
over the axes that split the other factor elsewhere.

Stacks may have their own tables, and the softmax splits its rows as U. Activations that pass from
one of them to another are resharded, and so are their gradients on the way back.
"""

import functools
import math
from collections.abc import Mapping, Sequence

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.layers.numerics import Remat
from lingvo_gshard.model import step_memory
from lingvo_gshard.model.forward_pass import SOFTMAX, Einsum, Product, forward_products, sizes_of
from lingvo_gshard.model.step_memory import FLOAT32_BYTES, OUTSIDE, CoreParts
from lingvo_gshard.model.step_products import StepProduct
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from xla_plan.cost.step_cost import Times
from xla_plan.machines import networks
from xla_plan.machines.networks import Network, Torus
from xla_spmd.mesh import names_of

# How often kept results, and weights with their gradients, are read or written outside products,
# such as by norms, sums, stacks and the optimizer. The numbers are fitted to compiled steps.
_KEPT_PASSES = 5
_WEIGHT_PASSES = 10

# From this number of partitions on, a TPU's compiler writes them as all-reduces, which take twice
# as long.
_SUMMED_FROM = {"reduce-scatter": 1, "all-gather": 64}


class CostModel:
    """Estimates the times of an experiment's training step for different tables and remats."""

    def __init__(
        self,
        params: Params,
        model: TaskModel,
        products: Sequence[StepProduct],
        network: Network,
    ) -> None:
        """Takes the inputs that do not depend on the partitioning.

        Args:
          params: The experiment.
          model: Its task and optimizer, for the specs of weights and slots.
          products: The products of its loss on a batch.
          network: The machine; its devices hold the partitions in their order.
        """
        self._weights = step_memory.state_of_stacks(params, model).theta.Flatten()
        self._network = network
        self._products = forward_products(products)
        self._activation_bytes = step_memory.activation_bytes(params)
        self._sent_on = step_memory.sent_on(params)

        # Activations [B, L, M] pass from stack to stack. Each stack reads its embedded tokens and
        # the output of the stack before it; the softmax reads the last stack's output.
        batch = params.input
        rows = {"B": batch.batch_size, "M": params.task.dim}
        self._stacks = tuple(params.task.cls.STACKS)
        self._passed_on = []
        for stack, following in zip(self._stacks, (*self._stacks[1:], SOFTMAX), strict=True):
            own = {**rows, "L": batch.Get(params.task.cls.STACKS[stack])}
            self._passed_on += [(OUTSIDE, stack, own), (stack, following, own)]

    def estimate(
        self,
        partitioning: Partitioning,
        remat: Remat,
        microbatches: int = 1,
        scatter_gradients: bool = True,
    ) -> Times:
        """Returns a core's times of a step at the roofline, with this table and remat.

        `scatter_gradients` has the same meaning as in Annotator.
        """
        cores = step_memory.by_stack(
            self._stacks,
            partitioning,
            lambda table: _CoreCosts(
                table, self._network, self._activation_bytes, microbatches, scatter_gradients
            ),
        )

        secs = Times()
        for product in self._products:
            core = cores[product.stack]
            run = core.in_stages(product) if core.is_staged(product) else product

            # The backward pass recomputes all results that are not kept.
            forward_runs = 1 if remat.keeps(product.kept) else 2
            secs += core.product(run, forward_runs).scaled(run.times)

        # The costs outside products: activations and gradients that move from one table to another,
        # a pipeline's sends between stages, and the optimizer.
        for before, after, sizes in self._passed_on:
            secs += cores[before].move_to(cores[after], sizes)
            secs += cores[after].move_to(cores[before], sizes)
        for stack, sizes in self._sent_on.items():
            secs += cores[stack].stage_shifts(sizes)
        for spec in self._weights:
            secs += cores[spec.stack].update(spec)
        return secs


class _CoreCosts(CoreParts):
    """What products and updates cost one core under one table."""

    def __init__(
        self,
        partitioning: Partitioning,
        network: Network,
        scalar_bytes: int,
        microbatches: int,
        scatter_gradients: bool,
    ) -> None:
        """`scalar_bytes` is the size of one scalar of an activation."""
        super().__init__(partitioning, scalar_bytes, microbatches, scatter_gradients)
        self._network = network

        # On a TPU, tensors that only products read are rounded to 16 bits before they are sent.
        rounds = isinstance(network, Torus)
        self._sent_share = 2 / scalar_bytes if rounds else 1.0

        # Many products have the same collectives.
        self._secs_per_byte = functools.cache(self._collective_secs_per_byte)

    def product(self, product: Product, forward_runs: int) -> Times:
        """Returns the times of a product, its gradients, and the moves of its result."""
        # The forward runs: a second one if the backward pass recomputes the product.
        einsum = product.einsum
        secs = self._einsum(einsum, product.is_lookup, product.shares_left).scaled(forward_runs)

        # The right factor's gradient; a stage's weight gradients are summed over the partitions
        # once, after the last tick.
        gradient = einsum.right_gradient(self._scatter_gradients)
        gradient_secs = self._einsum(gradient, product.is_lookup, product.shares_left)
        if einsum.has_weight and einsum.right.startswith("R"):
            saved_secs = (1 - 1 / self._ticks) * gradient_secs.network
            gradient_secs += Times(network=-saved_secs, step=-saved_secs)
        secs += gradient_secs

        # The left factor's gradient. In a lookup that factor is a matrix of places, without a
        # gradient.
        if not product.is_lookup:
            secs += self._einsum(einsum.left_gradient(), is_lookup=False)

        # The result may be moved, by AllToAlls over the axes that then split a different dim of it;
        # its gradient is moved back.
        result_bytes = self.activation_bytes(einsum.result, einsum.sizes)
        before = self._split(einsum.result)
        after = self._split(product.moved)
        exchanged = [axis for axis in before if after.get(axis, before[axis]) != before[axis]]
        move_secs = self._network_secs("all-to-all", exchanged, result_bytes * self._sent_share)

        # Operations other than products read and write the kept result, too.
        passed_bytes = _KEPT_PASSES * result_bytes if forward_runs == 1 else 0
        return secs + self._times(0, passed_bytes, (forward_runs + 1) * move_secs)

    def stage_shifts(self, sizes: Mapping[str, float]) -> Times:
        """Returns the time of the moves between a pipeline's stages."""
        if self.stages == 1:
            return Times()
        axes = names_of(self._partitioning.axes("R"))
        shift_secs = self._network_secs("collective-permute", axes, self.shift_bytes(sizes))
        return self._times(0, 0, self.num_shifts * shift_secs)

    def update(self, spec: TensorSpec) -> Times:
        """Returns the time of the update of a weight.

        An update may be split over more axes than the weight, which is then gathered.
        """
        # The split of the weight is by its letters, and of its update by their lowercase forms.
        sizes = sizes_of(spec)
        weight_axes = self._split(spec.dims)
        update_axes = self._split(spec.dims.lower())

        gathered = [axis for axis in update_axes if axis not in weight_axes]
        weight_bytes = FLOAT32_BYTES * self._elements(spec.dims, sizes, weight_axes)
        gather_secs = self._network_secs("all-gather", gathered, weight_bytes)

        # A stage adds to its gradients in every tick: a product's result, read and written again.
        elements = self._elements(spec.dims, sizes, update_axes)
        passes = _WEIGHT_PASSES
        if self.stages > 1 and spec.dims.startswith("R"):
            passes += 2 * self._ticks
        return self._times(0, passes * FLOAT32_BYTES * elements, gather_secs)

    def move_to(self, other: "_CoreCosts", sizes: Mapping[str, float]) -> Times:
        """Returns the time to move activations BLM from this table to another one."""
        before = self._split("BLM")
        after = other._split("BLM")

        # An axis that splits a different dim afterwards needs an AllToAll; an axis that no longer
        # splits a dim needs a gather; an axis that splits only afterwards leaves each core a part
        # of its data.
        exchanged = [axis for axis in before if after.get(axis, before[axis]) != before[axis]]
        gathered = [axis for axis in before if axis not in after]
        part_bytes = self.activation_bytes("BLM", sizes)
        whole_bytes = part_bytes * self._num_partitions(gathered)
        network_secs = self._network_secs("all-to-all", exchanged, part_bytes)
        network_secs += self._network_secs("all-gather", gathered, whole_bytes)
        return self._times(0, 0, network_secs)

    def _einsum(self, einsum: Einsum, is_lookup: bool, shares_left: bool = False) -> Times:
        """Returns the times of one einsum, whose left factor is not moved if possible.

        With `shares_left`, gathering the left factor is part of another einsum.
        """
        left = self._split(einsum.left)
        right = self._split(einsum.right)
        result = self._split(einsum.result)

        # In a 2-D product, an axis splits the same dim of the right factor and of the result, but a
        # different dim of the left factor, which is gathered.
        gathered_left = [
            axis
            for axis, letter in left.items()
            if letter != right.get(axis, letter) and right[axis] == result.get(axis)
        ]

        # The letter that each axis splits while the product is computed: the left factor decides.
        kept_left = {axis: letter for axis, letter in left.items() if axis not in gathered_left}
        split = {**result, **right, **kept_left}
        gathered = [axis for axis, letter in right.items() if split[axis] != letter]

        # A sum over a split letter is over the partitions along its axis. If that axis splits the
        # result elsewhere, each partition needs a part of the sum alone.
        result_letters = einsum.result.upper()
        summed = [axis for axis, letter in split.items() if letter not in result_letters]
        scattered = [axis for axis in summed if axis in result]
        reduced = [axis for axis in summed if axis not in result]

        # A core reads its parts of the factors after gathering, and writes the result.
        scalar_bytes = self._scalar_bytes
        left_bytes = scalar_bytes * self._elements(einsum.left, einsum.sizes, split)
        right_bytes = scalar_bytes * self._elements(einsum.right, einsum.sizes, split)
        result_bytes = scalar_bytes * self._elements(result_letters, einsum.sizes, split)
        if gathered and not is_lookup:
            right_bytes *= self._sent_share
        if gathered_left:
            left_bytes *= self._sent_share

        # A reduce-scatter leaves a part of the result to each core of the group.
        part_bytes = result_bytes / self._num_partitions(scattered)
        network_secs = self._network_secs("all-gather", gathered, right_bytes)
        if not shares_left:
            network_secs += self._network_secs("all-gather", gathered_left, left_bytes)
        network_secs += self._network_secs("reduce-scatter", scattered, part_bytes)
        network_secs += self._network_secs("all-reduce", reduced, part_bytes)

        # A lookup reads as many rows as it writes. A product has two operations for each scalar of
        # the space of all its letters.
        if is_lookup:
            return self._times(0, 2 * min(right_bytes, result_bytes), network_secs)
        flops = 2 * self._elements(einsum.letters, einsum.sizes, split)
        return self._times(flops, left_bytes + right_bytes + result_bytes, network_secs)

    def _times(self, flops: float, num_bytes: float, network_secs: float) -> Times:
        """Returns the roofline of one operation: the longer of compute and memory, then network."""
        rates = self._network.generation
        compute_secs = flops / rates.peak_flops
        memory_secs = num_bytes / rates.memory_bytes_per_sec
        step_secs = max(compute_secs, memory_secs) + network_secs
        return Times(compute_secs, memory_secs, network_secs, step_secs)

    def _network_secs(self, kind: str, axes: Sequence[str], num_bytes: float) -> float:
        """Returns the time of a collective among the cores along `axes`."""
        if not axes:
            return 0.0
        return num_bytes * self._secs_per_byte(kind, tuple(axes))

    def _collective_secs_per_byte(self, kind: str, axes: tuple[str, ...]) -> float:
        """Returns the time of a collective of one byte among the cores along `axes`."""
        mesh = self._partitioning.mesh
        secs = networks.secs_per_byte(self._network, mesh, kind, axes)

        is_tpu = isinstance(self._network, Torus)
        if is_tpu and mesh.num_partitions >= _SUMMED_FROM.get(kind, math.inf):
            secs *= 2
        return secs
