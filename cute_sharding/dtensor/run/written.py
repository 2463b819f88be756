"""Ops that write to tensors which have to be redistributed first: what they write to the
redistributed copies is taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cute_sharding.dtensor.replaced import communication, local_tensors, op_schemas, tensor_specs
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec, Partial, Replicate
from cute_sharding.dtensor.run.groups import on_each_rank, place
from cute_sharding.dtensor.run.lists import LocalMove, redistribute_all


@dataclass(frozen=True)
class TakingBack:
    """Runs an op that writes to tensors which have to be redistributed first, on the local tensors;
    and takes what it wrote to the redistributed copies back.

    A tensor that is pending stays pending after any write: one device gets the whole sum, and the
    others nothing. Other tensors may share its memory, for which it is pending.

    Attributes:
        op: the op.
        function: the op, or the function in its place.
        given, wanted: the op on the specs of the tensors, and on the specs that it needs.
        made: the spec of what the function returns, if that is new, to be written to the first
            argument; None if the function itself writes.
    """

    op: Any
    function: Callable[..., Any]
    given: OpSchema
    wanted: OpSchema
    made: DTensorSpec | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given, wanted = self.given.args_schema, self.wanted.args_schema
        several = _of_one_memory(self.op, args)
        for i in range(several):
            self._write(
                *[[_element(x, i, several) for x in some] for some in (args, given, wanted)]
            )
        return None if several else self._write(args, given, wanted, **kwargs)

    def _write(
        self, args: Sequence[Any], given: Sequence[Any], wanted: Sequence[Any], **kwargs: Any
    ) -> Any:
        """Run the op on these local tensors, redistributed from the first specs to the second."""
        moved_args = [*map(_redistribute, args, given, wanted)]
        moved_kwargs = {name: self._moved_keyword(name, x) for name, x in kwargs.items()}
        results = self.function(*moved_args, **moved_kwargs)
        if self.made is not None:
            _write_to([args[0]], [results], [given[0]], [self.made], [0])
            return args[0]
        for i, name in op_schemas.places_written(self.op):
            if i < len(args):
                _take_back(args[i], moved_args[i], given[i], wanted[i])
            elif name in kwargs:
                specs = self.given.kwargs_schema[name], self.wanted.kwargs_schema[name]
                _take_back(kwargs[name], moved_kwargs[name], *specs)
        return results

    def _moved_keyword(self, name: str, local: Any) -> Any:
        """The value of that keyword argument for the op; of ``out=`` only the size matters."""
        spec: Any = self.given.kwargs_schema.get(name)
        to: Any = self.wanted.kwargs_schema.get(name)
        if (
            isinstance(spec, DTensorSpec)
            and op_schemas.is_out(self.op, name)
            and tuple(spec.placements) != tuple(to.placements)
            and all(isinstance(p, Replicate) for p in to.placements)
        ):
            return local.new_empty(tuple(to.shape))
        return _redistribute(local, spec, to)


def _of_one_memory(op: Any, args: Sequence[Any]) -> int:
    """The number of tensors in the lists that an op writes to, if one of these shares memory with
    an operand of another: its redistributed copy would not have the write to the other, so they are
    written to one after the other. Else 0.
    """
    written = [args[i] for i, _ in op_schemas.places_written(op) if i < len(args)]
    several = max([len(some) for some in written if isinstance(some, (list, tuple))], default=0)
    of = [_memories(args, i, several) for i in range(several)]
    to = [_memories(written, i, several) for i in range(several)]
    met = any(to[i] & of[j] for i in range(several) for j in range(several) if i != j)
    return several if met else 0


def _memories(args: Sequence[Any], i: int, several: int) -> set[int]:
    """The memories of the i-th tensors of all lists with ``several`` elements."""
    locals = [x[i] for x in args if isinstance(x, (list, tuple)) and len(x) == several]
    tensors = [communication.in_flight(x) for x in locals if isinstance(x, torch.Tensor)]
    return {
        id(local_tensors.storage_of(x)) for x in tensors if local_tensors.memory_of(x) is not None
    }


def _element(arg: Any, i: int, several: int) -> Any:
    """The i-th element, as a list, of a list with ``several`` elements; other values unchanged."""
    return arg[i : i + 1] if isinstance(arg, (list, tuple)) and len(arg) == several else arg


def _redistribute(local: Any, spec: Any, to: Any) -> Any:
    """The redistributed argument for the op, a tensor or a list of tensors."""
    if not isinstance(spec, (list, tuple)):
        return _redistribute([local], [spec], [to])[0]
    moving = _places_moved(spec, to)
    moved = redistribute_all([LocalMove(local[i], spec[i], to[i]) for i in moving], counted=False)
    result = list(local)
    for i, x in zip(moving, moved):
        result[i] = x
    return result


def _take_back(local: Any, wrote: Any, spec: Any, to: Any) -> None:
    """Update an argument, a tensor or a list of tensors, from its redistributed copy."""
    if not isinstance(spec, (list, tuple)):
        local, wrote, spec, to = [local], [wrote], [spec], [to]
    _write_to(local, wrote, spec, to, _places_moved(spec, to))


def _write_to(
    local: Sequence[Any],
    wrote: Sequence[Any],
    spec: Sequence[Any],
    to: Sequence[Any],
    moving: Sequence[int],
) -> None:
    """Write these elements of ``wrote``, with the specs ``to``, to the tensors ``local``."""
    pending = {i: _reductions_done(spec[i], to[i]) for i in moving}
    back = []
    for i in moving:
        placed = [Replicate() if m in pending[i] else p for m, p in enumerate(spec[i].placements)]
        back.append(LocalMove(wrote[i], to[i], tensor_specs.placed_as(spec[i], tuple(placed))))
    for i, value in zip(moving, redistribute_all(back, counted=False)):
        local[i].copy_(_contributed(value, spec[i].mesh, pending[i]))


def _places_moved(specs: Sequence[Any], wanted: Sequence[Any]) -> list[int]:
    """The indices of the tensors that have to be redistributed."""
    return [
        i
        for i, (spec, to) in enumerate(zip(specs, wanted))
        if isinstance(spec, DTensorSpec) and tuple(spec.placements) != tuple(to.placements)
    ]


def _reductions_done(spec: DTensorSpec, to: DTensorSpec) -> dict[int, Partial]:
    """The pending reductions of a tensor, by mesh dim, that its redistribution finishes."""
    return {
        m: placement
        for m, (placement, finished) in enumerate(zip(spec.placements, to.placements))
        if isinstance(placement, Partial) and not isinstance(finished, Partial)
    }


# The contribution to a reduction of all devices but the first, if it differs from the first's.
_NOTHING = {"sum": 0, "product": 1, "bxor": 0}


def _contributed(value: torch.Tensor, mesh: Any, pending: dict[int, Partial]) -> torch.Tensor:
    """This rank's contribution to reductions that have to give ``value``: for sums one device has
    all of it, and the others nothing. That is exact, also for integers.
    """
    for m, placement in pending.items():
        if placement.reduce_op in _NOTHING:
            first = partial(_of_first, mesh, m, _NOTHING[placement.reduce_op])
            value = on_each_rank(first, value)
    return value


def _of_first(mesh: Any, m: int, fill: int, rank: int, x: torch.Tensor) -> torch.Tensor:
    return x if place(mesh, rank)[m] == 0 else torch.full_like(x, fill)
