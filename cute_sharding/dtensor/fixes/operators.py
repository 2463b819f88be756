"""The ops of Python's operators on bits (``__and__``, ``__ilshift__``, ...), run under their other
names (``bitwise_and``, ``bitwise_left_shift_``, ...).

torch's dispatcher takes an op whose name ends in ``_`` for one that writes to its first argument,
and returns that argument: ``x >> 2`` is ``x``, and so is ``x & y`` in inference mode, where torch
does not decompose such an op first. And those that do write (``x &= y``) have no rule that keeps
the placements of ``x``.
"""

from __future__ import annotations

from typing import Any

import torch

from cute_sharding.dtensor.replaced.registry import overload

__all__ = ["OPERATORS"]

_OVERLOADS = {
    "and": ("bitwise_and", "Scalar"),
    "or": ("bitwise_or", "Scalar"),
    "xor": ("bitwise_xor", "Scalar"),
    "lshift": ("bitwise_left_shift", "Tensor_Scalar"),
    "rshift": ("bitwise_right_shift", "Tensor_Scalar"),
}
_NAMES = {
    f"__{before}{operator}__.{kind}": f"{op}{after}.{named}"
    for operator, (op, of_numbers) in _OVERLOADS.items()
    for before, after in (("", ""), ("i", "_"))
    for kind, named in (("Tensor", "Tensor"), ("Scalar", of_numbers))
}


def _by_its_other_name(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    other: Any = overload(_NAMES[f"{op._opname}.{op._overloadname}"])
    found: torch.Tensor = other(*args, **kwargs)
    return found


OPERATORS = dict.fromkeys(_NAMES, _by_its_other_name)
