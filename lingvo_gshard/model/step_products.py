"""The products of a training step's forward pass, found by tracing a task's loss once.

A Record notes the products that layers compute through `Numerics`. The traced graph has the others:
TensorFlow's own products in a user's layer, the scales of norms, convolutions. So every layer is
counted by its operations, whatever the names of its weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from lingvo_gshard.core.base_layer import STACKED, WeightSpec, scope_of
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.numerics import Numerics, Product, Record, Remat
from lingvo_gshard.layers.products import Equation
from lingvo_gshard.layers.repeat import Layers
from lingvo_gshard.model.graph_products import GraphProduct, GraphReader
from lingvo_gshard.model.task import Task
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning
from xla_spmd.mesh import Mesh


@dataclasses.dataclass(frozen=True)
class Place:
    """The layer of a stack that computes a product; all fields are empty outside the stacks."""

    stack: str = ""  # One of Task.STACKS.
    layer: str = ""  # Its scope, such as `encoder/layers_1`; empty for a stack's final norm.
    is_looped: bool = False  # Whether the stack is a LOOP, which runs its blocks one by one.


@dataclasses.dataclass(frozen=True)
class StepProduct:
    """A product of the forward pass, with a weight's elements, or a lookup of rows."""

    # The equation, such as `EGCM,EMH->EGCH`. A lookup has the equation of the product with a
    # one-hot mask.
    equation: Equation
    sizes: Mapping[str, float]  # The size of each letter; without a capacity, C is a mean.
    times: int
    place: Place
    kept_by: Remat  # The most saving Remat that keeps its result for the gradient.
    is_lookup: bool = False  # A lookup reads rows of its right factor, without flops.
    shares_left: bool = False  # An earlier product of the layer has the same left factor.
    weight: WeightSpec | None = None  # The right factor's declaration, if it is known.


def products_of(task: Params, batch: NestedMap) -> list[StepProduct]:
    """Returns the products of a task's loss in training, layer by layer.

    Args:
      task: The settings of the task. Recomputation and pipelines make no difference.
      batch: The TensorSpecs of a batch's features and labels.

    Tokens that take experts without a capacity are counted as if experts had equal numbers of them.
    """
    settings = task.Copy()
    for stack in settings.cls.STACKS:
        settings.Get(stack).Set(remat=Remat.NONE, stages=1, microbatches=1)
    model = settings.Instantiate(Annotator(Partitioning(Mesh.flat(1), ())))

    record = Record()
    reader = _traced(model, batch, record)
    places = _places(model)

    products = [_noted(product, reader, places) for product in record.products]
    lefts = [product.left for product in record.products]
    found = [_found(product, places) for product in reader.products]
    products += _with_inputs(found)
    lefts += [product.left for product in reader.products]
    return _with_shared(products, lefts)


def _traced(model: Task, batch: NestedMap, record: Record) -> GraphReader:
    """Traces the loss; returns a reader of the products that `record` has not noted."""
    args = NestedMap(theta=model.weight_specs, batch=batch)
    specs = args.Flatten()

    def loss(*tensors: tf.Tensor) -> tf.Tensor:
        given = args.Pack(tensors)
        context = Context(Mode.TRAIN, tf.constant([0, 0]), numerics=Numerics(record=record))
        value, _ = model.Loss(given.theta, given.batch.features, given.batch.labels, context)
        return value

    signature = []
    for spec in specs:
        dtype = "float32" if isinstance(spec, WeightSpec) else spec.dtype
        signature.append(tf.TensorSpec(spec.shape, dtype))
    function = tf.function(loss, input_signature=signature, autograph=False, jit_compile=True)
    graph = function.get_concrete_function().graph

    lookups = [product.result for product in record.products if product.result is not None]
    return GraphReader(graph, specs, lookups)


def _places(model: Task) -> list[Place]:
    """Returns the layers of all stacks."""
    places = []
    for name in model.STACKS:
        stack = getattr(model, name)
        in_loop = stack.block if stack.p.layers_as is Layers.LOOP else []
        for layer in stack.traced_layers:
            places.append(Place(name, scope_of(layer.path), layer in in_loop))
        places.append(Place(name))
    return places


def _place_of(scope: str, places: list[Place]) -> Place:
    for place in places:
        if f"{scope}/".startswith(f"{place.layer or place.stack}/"):
            return place
    return Place()


def _noted(product: Product, reader: GraphReader, places: list[Place]) -> StepProduct:
    place = _place_of(product.scope, places)
    equation = Equation.parse(product.equation)
    weight = None
    if equation.has_weight and product.right is not None:
        weight = reader.weight_of(product.right)

    sizes = product.sizes
    if weight is not None:
        equation, sizes = _as_declared(equation, sizes, weight)
    return StepProduct(
        equation=equation,
        sizes=sizes,
        times=product.times,
        place=place,
        # Results outside the stacks are not recomputed.
        kept_by=product.kept_by if place.layer else Remat.BLOCK,
        is_lookup=product.is_lookup,
        weight=weight,
    )


def _found(found: GraphProduct, places: list[Place]) -> StepProduct:
    place = _place_of(found.scope, places)
    return StepProduct(
        equation=Equation.parse(found.equation),
        sizes=found.sizes,
        times=found.times,
        place=place,
        kept_by=Remat.NONE if place.layer else Remat.BLOCK,
        is_lookup=found.is_lookup,
        weight=found.weight,
    )


def _with_inputs(found: list[StepProduct]) -> list[StepProduct]:
    """Returns the products, with the result of each layer's first norm kept by every Remat.

    It stands for the layer's input, which has the same size and which the gradient always needs.
    """
    seen: set[Place] = set()
    marked = []
    for product in found:
        is_scale = bool(product.place.layer) and not product.equation.contracted
        if is_scale and product.place not in seen:
            seen.add(product.place)
            product = dataclasses.replace(product, kept_by=Remat.BLOCK)
        marked.append(product)
    return marked


def _as_declared(
    equation: Equation, sizes: Mapping[str, float], weight: WeightSpec
) -> tuple[Equation, Mapping[str, float]]:
    """Returns an equation with the weight's own letters, in their order.

    A router is declared as `M_`, since it is replicated, and multiplied as `ME`.
    """
    declared = weight.dims.removeprefix(STACKED)
    unsplit = [letter for letter in equation.right if letter not in declared]
    if len(unsplit) == declared.count("_") == 1:
        (letter,) = unsplit
        sizes = {"_" if key == letter else key: size for key, size in sizes.items()}
        equation = Equation.parse(str(equation).replace(letter, "_"))
    if sorted(equation.right) == sorted(declared):
        equation = dataclasses.replace(equation, right=declared)
    return equation, sizes


def _with_shared(products: list[StepProduct], lefts: list[Any]) -> list[StepProduct]:
    """Returns the products, marked if an earlier one of the layer has the same left factor."""
    seen: set[tuple[Place, int]] = set()
    marked = []
    for product, left in zip(products, lefts, strict=True):
        key = (product.place, id(left))
        is_shared = left is not None and bool(product.place.layer) and key in seen
        seen.add(key)
        marked.append(dataclasses.replace(product, shares_left=is_shared))
    return marked
