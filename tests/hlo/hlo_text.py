"""Programs from XLA's own text, cut down from those that compilers make."""

import dataclasses

try:
    from jaxlib import _hlo as _parser
except ImportError:  # An older jaxlib has it elsewhere.
    from jaxlib import _jax as _parser

from lingvo_gshard.hlo import hlo_module
from lingvo_gshard.hlo.hlo_module import Module


def module(computations: str, num_partitions: int = 1) -> Module:
    """The program of these computations; instructions run in the order of the text."""
    parsed = _parser.hlo_module_from_text("HloModule cut, is_scheduled=true\n" + computations)
    one = hlo_module.parse(parsed.as_serialized_hlo_module_proto())
    return dataclasses.replace(one, num_partitions=num_partitions)
