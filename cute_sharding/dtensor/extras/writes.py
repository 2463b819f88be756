"""In-place ops on views of a DTensor that need communication: their writes reach the tensor that
was viewed.

After any write to a copy (:mod:`.copies`), through any alias (a detached tensor, ``.data``, a view
as another dtype), its elements are taken back to the source: by the redistribution back, or by the
exchange of a movement op run backward. The redistribution seldom communicates: the copy is mostly a
replica, and each device takes its part.

A tensor that was moved twice stays one tensor: copies with the same placements are written to
together. A copy that was made before its source was written to is stale, and was brought up to date
before the op read it. All ranks agree on whether it is, so these exchanges meet. In a program that
AOTAutograd traces, all this becomes part of the graph. For a graph's writes to its inputs, it runs
after the graph (:func:`before_program`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from cute_sharding.dtensor.extras.copies import (
    Copy,
    copy_in,
    may_be_told,
    outdate,
    way_back,
)
from cute_sharding.dtensor.extras.memory import is_followed, memory_of
from cute_sharding.dtensor.replaced import (
    collective_ops,
    local_tensors,
    op_schemas,
    registry,
    tensor_specs,
)
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec, Partial, Replicate
from cute_sharding.dtensor.run.lists import Wanted, redistribute_all
from cute_sharding.dtensor.run.ranks import on_each_rank, place
from cute_sharding.relations.table import OF_TORCH


def reach(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Take the writes of ``op`` back to the sources of the tensors that it wrote to.

    If it wrote to several copies of one tensor, it writes to them again, one after the other.

    Raises:
        RuntimeError: a write cannot be taken back, or not be repeated.
    """
    written = [
        tensor
        for tensor in _written_by(op, args, kwargs)
        if may_be_told(tensor._local_tensor) and is_followed(tensor._local_tensor)
    ]
    if not written:
        return
    memories = [_memory(tensor) for tensor in written]
    for tensor, memory in zip(written, memories):
        for copy in way_back(memory):
            copy.check(registry.name_of(op), tensor)
    again = _are_of_one(memories)
    for memory in memories:
        if not again or not way_back(memory):
            _record_write(memory)
    if again:
        _write_again(op, args, kwargs)


def before_program(tensors: Sequence[Any]) -> Callable[[], None]:
    """Check a compiled program's writes to these inputs, and return a function to call after it: it
    writes to local tensors, without an op on DTensors.

    Raises:
        RuntimeError: a write cannot be taken back to the source.
    """
    tensors = [tensor for tensor in tensors if may_be_told(tensor._local_tensor)]
    memories = [_memory(tensor) for tensor in tensors]
    for tensor, memory in zip(tensors, memories):
        for copy in way_back(memory):
            copy.check("a compiled program", tensor)
    if _are_of_one(memories):
        raise RuntimeError(
            "a compiled program writes to several inputs that are one tensor or its views. The "
            "views are copies, and a write to one input would not reach the other inputs. Pass "
            "only the tensor, and take the views inside the program."
        )

    def after() -> None:
        with torch.no_grad():
            for memory in memories:
                _record_write(memory)

    return after


def _are_of_one(memories: Sequence[Any]) -> bool:
    """Whether several of the memories that were written to have one source: each then has only its
    own part of the writes.
    """
    ways = {id(memory): _way_of(memory) for memory in memories}
    passed = [place for way in ways.values() for place in way]
    return len(ways) > 1 and any(
        len(way) > 1 and any(passed.count(place) > 1 for place in way) for way in ways.values()
    )


def _way_of(memory: Any) -> list[int]:
    """That memory, and those on the way to the tensor that was moved first, by number."""
    back = [local_tensors.storage_of(copy.source) for copy in way_back(memory)]
    return [id(memory), *map(id, back)]


def _reads_what_it_writes(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether another operand shares memory with the first list, which the op writes to."""
    first, *others = [
        {
            place
            for leaf in local_tensors.leaves(arg)
            if tensor_specs.is_dtensor(leaf) and memory_of(leaf._local_tensor) is not None
            for place in _way_of(_memory(leaf))
        }
        for arg in (*args, kwargs)
    ]
    return any(not first.isdisjoint(other) for other in others)


def _write_again(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Bring the copies among the arguments up to date, and repeat the op on those that it writes
    to, one after the other.
    """
    several = args[0] if args and isinstance(args[0], (list, tuple)) else []
    copies = [len(way_back(_memory(tensor))) > 0 for tensor in several]
    others = sum(isinstance(arg, (list, tuple)) for arg in args) > 1
    row = OF_TORCH.get(registry.name_of(op))
    # Tensors that are no copies have been written to already, and so before the others.
    in_any_order = row and row.commutes and not _reads_what_it_writes(args, kwargs)
    if (
        torch.Tag.nondeterministic_seeded in op.tags
        or not several
        or any(argument.is_out for argument in op._schema.arguments)
        or (others and False in copies and not in_any_order)
    ):
        raise RuntimeError(
            f"{registry.name_of(op)} cannot write to several views of one tensor, or to a tensor "
            "and its views, in one call, because the views are copies. Write to one tensor or view "
            "at a time."
        )
    for leaf in local_tensors.leaves(args, kwargs):
        if tensor_specs.is_dtensor(leaf) and memory_of(leaf._local_tensor) is not None:
            for copy in reversed(way_back(_memory(leaf))):
                copy.refresh()
    for i, is_copy in enumerate(copies):
        if is_copy:
            op(
                *[
                    arg[i : i + 1]
                    if isinstance(arg, (list, tuple)) and len(arg) == len(several)
                    else arg
                    for arg in args
                ],
                **kwargs,
            )


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
        for i, name in _places_written(self.op):
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
    written = [args[i] for i, _ in _places_written(op) if i < len(args)]
    several = max([len(some) for some in written if isinstance(some, (list, tuple))], default=0)
    of = [_memories(args, i, several) for i in range(several)]
    to = [_memories(written, i, several) for i in range(several)]
    met = any(to[i] & of[j] for i in range(several) for j in range(several) if i != j)
    return several if met else 0


def _memories(args: Sequence[Any], i: int, several: int) -> set[int]:
    """The memories of the i-th tensors of all lists with ``several`` elements."""
    locals = [x[i] for x in args if isinstance(x, (list, tuple)) and len(x) == several]
    tensors = [collective_ops.in_flight(x) for x in locals if isinstance(x, torch.Tensor)]
    return {id(local_tensors.storage_of(x)) for x in tensors if memory_of(x) is not None}


def _element(arg: Any, i: int, several: int) -> Any:
    """The i-th element, as a list, of a list with ``several`` elements; other values unchanged."""
    return arg[i : i + 1] if isinstance(arg, (list, tuple)) and len(arg) == several else arg


def _redistribute(local: Any, spec: Any, to: Any) -> Any:
    """The redistributed argument for the op, a tensor or a list of tensors."""
    if not isinstance(spec, (list, tuple)):
        return _redistribute([local], [spec], [to])[0]
    moving = _places_moved(spec, to)
    moved = redistribute_all([Wanted(local[i], spec[i], to[i]) for i in moving], counted=False)
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
        back.append(Wanted(wrote[i], to[i], tensor_specs.placed_as(spec[i], tuple(placed))))
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


def _written_by(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The DTensors that the op writes to."""
    found = []
    for i, name in _places_written(op):
        value = kwargs.get(name, args[i] if i < len(args) else None)
        some = value if isinstance(value, (list, tuple)) else [value]
        found += [tensor for tensor in some if tensor_specs.is_dtensor(tensor)]
    return found


@cache
def _places_written(op: Any) -> list[tuple[int, str]]:
    """(position, name) of the op's arguments that it writes to."""
    return [
        (i, argument.name)
        for i, argument in enumerate(op._schema.arguments)
        if op_schemas.is_written(op, argument)
    ]


def _memory(tensor: Any) -> Any:
    return local_tensors.storage_of(collective_ops.in_flight(tensor._local_tensor))


def _record_write(memory: Any, by: Copy | None = None) -> None:
    """Record a write to ``memory``: its copies become stale, except ``by``, from which it was
    written, and those that can be updated from it; and its source is updated.
    """
    outdate(memory, by)
    copy = copy_in(memory)
    moved = None if copy is None else copy.moved()
    if copy is not None and moved is not None:
        copy.take_back(moved)
        _record_write(local_tensors.storage_of(copy.source), copy)
