"""OneFlow's states of a tensor along a mesh axis, and how linear operators transform them.

In each state, a device along the axis has

        S(i)  its part of the tensor, split along dim i,
        B     the whole tensor (broadcast),
        P     a term of the tensor, which is the sum of all terms (partial; see partial.py).

An operator's signature is the states of its operands and of its result. It is computed without
communication; any other combination needs a conversion first. With several axes, a tensor has a
state for each axis, and signatures hold along each axis separately. The names and the tables come
from "How to Go beyond Data Parallelism and Model Parallelism: Starting from GShard".
"""

from __future__ import annotations

from collections.abc import Sequence

BROADCAST = "B"
PARTIAL = "P"


def split(dim: int) -> str:
    """Returns the state of a tensor split along a dim."""
    return f"S({dim})"


def all_states(rank: int) -> list[str]:
    """Returns the possible states of a tensor of this rank along an axis, splits first."""
    return [*map(split, range(rank)), BROADCAST, PARTIAL]


def einsum_state(equation: str, states: Sequence[str]) -> str | None:
    """Returns the state of tf.einsum's result along an axis, given the operands' states.

    Returns None if the devices cannot compute the result without communication. The equation, such
    as "AK,KB->AB", may have any number of operands. Raises ValueError if the equation does not name
    the result's letters, if the numbers of states and operands differ, or if an operand cannot have
    its state.
    """
    inputs, arrow, result = equation.partition("->")
    if not arrow:
        raise ValueError(f"{equation!r}: expected the result's letters after ->, as in AK,KB->AB.")
    operands = inputs.split(",")
    if len(operands) != len(states):
        raise ValueError(f"{equation!r} has {len(operands)} operands, got states {tuple(states)}.")
    for dims, state in zip(operands, states, strict=True):
        if state not in all_states(len(dims)):
            known = ", ".join(all_states(len(dims)))
            raise ValueError(f"{equation!r}: operand {dims!r} has state {state!r}; known: {known}.")

    # An einsum is linear in each operand, so it maps an operand's terms to the result's terms.
    if PARTIAL in states:
        others = list(states)
        others.remove(PARTIAL)
        return PARTIAL if set(others) <= {BROADCAST} else None

    # If a letter splits one operand, the devices need only the same part of all other operands.
    letters = "".join(map(_split_letter, operands, states))
    if not letters:
        return BROADCAST
    letter = letters[0]
    if set(letters) != {letter}:
        return None
    for dims, state in zip(operands, states, strict=True):
        if letter in dims and state == BROADCAST:
            return None

    # The sum over a split letter yields one term of the result per device.
    return split(result.index(letter)) if letter in result else PARTIAL


def _split_letter(dims: str, state: str) -> str:
    """Returns the letter that a state splits; an empty text for B and P."""
    return dims[int(state[2:-1])] if state.startswith("S") else ""
