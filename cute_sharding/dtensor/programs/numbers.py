"""Which value of a program a DTensor is, and which op of it a call is.

Values are numbered by what they are made of: a value that is given has a number for its spec, and
the result of an op a number for the op, its arguments and the numbers of its operands. So a call is
recognized by itself, without a position in a program that could be lost: in another order, once
more for a checkpoint, on one rank alone, or beside ops that no plan knows. What a call does is then
the same on all ranks, since it depends on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias
from weakref import ref

import torch
from torch.distributed.tensor import DTensor

from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec
from cute_sharding.dtensor.run.placements import text

# An op with its arguments: the number of each DTensor, and other arguments as they are.
Key: TypeAlias = "tuple[Hashable, ...]"

# Arguments by which calls are not told apart: where a dry run has other ones than a run.
_UNTOLD = (torch.device, torch.layout, torch.Generator)

_PLAIN = frozenset((int, bool, str, type(None), torch.dtype))

# Numbers that a graph leaves open have no hash, and are told by their text. No plan has them.
_OPEN = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Float(str):
    """A float that an op is given, as text: nan is not equal to itself, and 1.0 would be 1."""

    __slots__ = ()


class _Place(ref):
    """A weak reference that says for which place it stands."""

    __slots__ = ("place",)
    place: int


# What is known of a tensor that has no number.
_NOWHERE: tuple[Any, Any, None] = (lambda: None, None, None)


class Numbers:
    """The numbers of the DTensors that are alive, until they become others, as by ``x.data = y``.

    Only what was put is remembered: torch swaps no tensors to which there are references, as it
    does with the weights of a module that is brought to another dtype or device.
    """

    def __init__(self) -> None:
        of: dict[int, tuple[_Place, DTensorSpec, int]] = {}

        def forget(dead: Any) -> None:
            found = of.get(dead.place)
            if found is not None and found[0] is dead:
                del of[dead.place]

        self._of, self._forget = of, forget

    def get(self, tensor: DTensor) -> int | None:
        """The number of a tensor; None if it has none."""
        place, spec, number = self._of.get(id(tensor), _NOWHERE)
        return number if place() is tensor and spec is tensor._spec else None

    def values(self) -> list[int]:
        """The numbers of all tensors that are alive."""
        return [number for *_, number in self._of.values()]

    def put(self, tensor: DTensor, number: int) -> None:
        """Number a tensor, for as long as it is alive."""
        place = _Place(tensor, self._forget)
        place.place = id(tensor)
        self._of[place.place] = place, tensor._spec, number


def key_of(func: Any, args: Sequence[Any], kwargs: Any, number: Callable[[DTensor], Any]) -> Key:
    """What tells a call from all others: ``number`` of each DTensor, and all other arguments that
    are no plain tensors.
    """
    named = [(name, _told(value, number)) for name, value in kwargs.items()] if kwargs else ()
    return func, tuple([_told(arg, number) for arg in args]), tuple(named)


def value_text(number: int) -> str:
    """A value as an argument: ``%3`` is the value 3, and no integer that an op is given."""
    return f"%{number}"


def _told(arg: Any, number: Callable[[DTensor], Any]) -> Hashable:
    if type(arg) in _PLAIN:  # most that are no tensors
        return arg
    if isinstance(arg, torch.Tensor):
        return value_text(number(arg)) if isinstance(arg, DTensor) else None
    if isinstance(arg, (list, tuple)):
        return tuple([_told(each, number) for each in arg])
    if isinstance(arg, _UNTOLD):
        return None
    if isinstance(arg, float):
        return Float(arg)
    return repr(arg) if isinstance(arg, _OPEN) else arg


def without_floats(told: Any) -> Any:
    """A key as if all floats were one. Optimizers compute floats from the number of the step, and
    where values should lie hardly depends on them.
    """
    if isinstance(told, tuple):
        return tuple(map(without_floats, told))
    return Float() if isinstance(told, Float) else told


def given_key(tensor: DTensor) -> Key:
    """What tells a value that is given from others: its spec."""
    spec = tensor._spec
    mesh = spec.mesh
    return (
        tuple([repr(n) if isinstance(n, _OPEN) else n for n in spec.shape]),
        str(tensor.dtype),
        text(spec.placements),
        tuple(mesh.shape),
        mesh.mesh_dim_names or (),
    )


def is_same(func: Any, operand: DTensor, result: Any) -> bool:
    """Whether the result of a view is its operand as another tensor, as what autograd makes of a
    tensor that it has saved, or a slice of all rows, which a graph takes where a program does not.
    """
    return (
        isinstance(result, DTensor)
        and func._schema._is_view_op()
        and result._spec == operand._spec
        and _is_later(result) == _is_later(operand)
    )


def _is_later(tensor: DTensor) -> tuple[bool, bool]:
    """Whether elements are to be conjugated, or negated, by what reads them."""
    local = tensor._local_tensor
    return local.is_conj(), local.is_neg()
