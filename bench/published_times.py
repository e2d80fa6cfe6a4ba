"""Times of a layer of a published shape, and the tables that compare them.

E experts, C rows of an expert, M model, H hidden.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence

from bench import published_shapes
from bench.balanced_layer import BalancedLayer
from bench.published_shapes import PRODUCTS, Shape
from xla_spmd.files import table


class Pass(enum.Enum):
    """A pass of the layer."""

    FORWARD = "forward"
    BACKWARD = "backward"  # Its time is the difference of the other two.
    BOTH = "both"

    def gflop(self, layer: BalancedLayer) -> float:
        """Returns the work of the experts' products."""
        forward = published_shapes.gflop(layer, is_forward=True)
        backward = published_shapes.gflop(layer, is_forward=False)
        match self:
            case Pass.FORWARD:
                return forward
            case Pass.BACKWARD:
                return backward
            case Pass.BOTH:
                return forward + backward


@dataclasses.dataclass(frozen=True)
class Times:
    """The seconds of a layer's passes."""

    forward: float
    both: float

    def of(self, part: Pass) -> float:
        """Returns the seconds of a part."""
        match part:
            case Pass.FORWARD:
                return self.forward
            case Pass.BACKWARD:
                return self.both - self.forward
            case Pass.BOTH:
                return self.both


@dataclasses.dataclass(frozen=True)
class Round:
    """The medians of a round, in seconds."""

    ours: Mapping[str, Times]  # By dispatch.
    torch: Times | None  # None without PyTorch.
    products: Mapping[str, Sequence[float]]  # By library: one product of each of PRODUCTS.

    def products_secs(self, library: str, part: Pass) -> float:
        """Returns the seconds of all products of a part of the work."""
        times = Times(
            forward=self._sum(library, lambda product: product.is_forward),
            both=self._sum(library, lambda product: True),
        )
        return times.of(part)

    def _sum(self, library: str, counts: Callable[[published_shapes.Product], bool]) -> float:
        secs = zip(PRODUCTS, self.products[library], strict=True)
        return sum(product.times * taken for product, taken in secs if counts(product))


def described(shape: Shape, layer: BalancedLayer) -> str:
    """Returns the layer, its share of the shape, and the published results, in words."""
    whole = shape.layer
    tokens = f"{layer.tokens}"
    if layer.tokens < whole.tokens:
        tokens += f" of {whole.tokens}"
    experts = f"{layer.E}"
    if layer.E < whole.E:
        experts += f" of {whole.E}"
    lines = [
        f"{shape.name}: M={layer.M}, H={layer.H}, {experts} experts, {layer.K} for each token, "
        f"{tokens} tokens, {layer.rows} rows for each expert"
    ]

    gflop = Pass.BOTH.gflop(whole)
    for figure in shape.figures:
        secs = figure.record.measured_secs
        lines.append(
            f"published for the whole shape in bfloat16: {1e3 * secs:.2f} ms, "
            f"{gflop / secs / 1e3:.0f} TFLOP/s; {figure.machine}; {figure.record.source}"
        )
    if shape.note:
        lines.append(shape.note)
    return "\n".join(lines)


def text(shape: Shape, layer: BalancedLayer, rounds: Sequence[Round]) -> str:
    """Returns the tables of the layer's times and of its products' rates."""
    rows = []
    for number, timed in enumerate(rounds, 1):
        for dispatch, part in itertools.product(timed.ours, Pass):
            row = {"round": str(number), "dispatch": dispatch, "pass": part.value}
            rows.append(row | _cells(layer, timed, dispatch, part) | _published(shape, part))
    layers = table.text([list(rows[0]), *(list(row.values()) for row in rows)])
    return f"{layers}\n\n{_products_text(layer, rounds)}"


def _cells(layer: BalancedLayer, timed: Round, dispatch: str, part: Pass) -> dict[str, str]:
    """Returns our time and rate, and their ratios to the products' and the peer's."""
    gflop = part.gflop(layer)
    ours = timed.ours[dispatch].of(part)
    cells = {"ours s": f"{ours:.3g}", "GFLOP/s": f"{gflop / ours:.0f}"}

    for library in timed.products:
        share = timed.products_secs(library, part) / ours
        cells[f"of {library}'s rate"] = f"{share:.0%}"
    if timed.torch is not None:
        torch = timed.torch.of(part)
        cells |= {"torch s": f"{torch:.3g}", "torch / ours": f"{torch / ours:.2f}"}
    return cells


def _published(shape: Shape, part: Pass) -> dict[str, str]:
    """Returns the first published time of the whole shape; empty without one."""
    if not shape.figures:
        return {}
    first = shape.figures[0]
    both = first.record.measured_secs

    if part is Pass.BOTH:
        secs = both
    elif first.forward_secs is None:
        return {"published ms": "-"}
    else:
        secs = Times(first.forward_secs, both).of(part)
    return {"published ms": f"{1e3 * secs:.2f}"}


def _products_text(layer: BalancedLayer, rounds: Sequence[Round]) -> str:
    """Returns a table of the products' rates alone, of the rounds' medians."""
    sizes = {"C": layer.rows, "M": layer.M, "H": layer.H}
    libraries = list(rounds[0].products)
    rows = [("product", "sizes", "times", *(f"{library} GFLOP/s" for library in libraries))]
    for index, product in enumerate(PRODUCTS):
        rates = []
        for library in libraries:
            secs = statistics.median(timed.products[library][index] for timed in rounds)
            rates.append(f"{published_shapes.product_gflop(layer) / secs:.0f}")

        factors, _ = product.equation.split("->")
        left, right = (factor.removeprefix("E") for factor in factors.split(","))
        shapes = (" x ".join(str(sizes[letter]) for letter in factor) for factor in (left, right))
        rows.append((product.equation, ", ".join(shapes), str(product.times), *rates))
    return table.text(rows)
