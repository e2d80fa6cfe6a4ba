"""Programs in XLA's own text, shortened from compilers' output."""

import dataclasses

try:
    from jaxlib import _hlo as _parser
except ImportError:  # An older jaxlib has it in another module.
    from jaxlib import _jax as _parser

from xla_spmd.hlo import hlo_module
from xla_spmd.hlo.hlo_module import Module


def module(computations: str, num_partitions: int = 1) -> Module:
    """Returns the program of these computations. Instructions run in the order of the text."""
    parsed = _parser.hlo_module_from_text("HloModule cut, is_scheduled=true\n" + computations)
    one = hlo_module.parse(parsed.as_serialized_hlo_module_proto())
    return dataclasses.replace(one, num_partitions=num_partitions)
