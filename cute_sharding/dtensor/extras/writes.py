"""In-place ops on views of a DTensor, where the view could not be had without communication: they
reach the tensor that was viewed.

Whatever writes to a copy (:mod:`.copies`), by whatever alias (a detached tensor, ``.data``, a view
as other numbers), what it holds is taken back: by the redistribution that leads there, or by the
exchange of a movement op run backward. The former seldom communicates: what was moved is a replica,
mostly, of which each device takes its part.

What was moved twice stays one tensor: copies with the same placements are written to together. One
that was made before its source was written to is stale, and was brought up to date before the op
read it. Whether it is is known alike on every rank, so that these exchanges meet. In a program that
AOTAutograd traces all this becomes part of the graph. Of what a graph writes to its inputs it is
done after the graph has run (:func:`before_program`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from cute_sharding.dtensor.answer.answers import Prepare
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
    """What ``op`` has written, also in what the tensors that it wrote to were moved from.

    Where it wrote to several that are of one tensor, they are written to again, one after the
    other.

    Raises:
        RuntimeError: what was written cannot be taken there, or not be written again.
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
            _written(memory)
    if again:
        _write_again(op, args, kwargs)


def before_program(tensors: Sequence[Any]) -> Callable[[], None]:
    """What is to be called after a compiled program that writes to these of its inputs: it writes
    to local tensors, and no op of DTensors' tells of it.

    Raises:
        RuntimeError: what it is going to write cannot be taken to what was moved.
    """
    tensors = [tensor for tensor in tensors if may_be_told(tensor._local_tensor)]
    memories = [_memory(tensor) for tensor in tensors]
    for tensor, memory in zip(tensors, memories):
        for copy in way_back(memory):
            copy.check("a compiled program", tensor)
    if _are_of_one(memories):
        raise RuntimeError(
            "a compiled program writes to several of its inputs that are views of one tensor and "
            "copies of it, and a write to one would not reach the others. Take these views inside "
            "the program, of that tensor."
        )

    def after() -> None:
        with torch.no_grad():
            for memory in memories:
                _written(memory)

    return after


def _are_of_one(memories: Sequence[Any]) -> bool:
    """Whether several of what was written to have one source: each then has its own part of what
    was written.
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
    """Whether some other operand lies in memory that the op writes to, to its first list."""
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
    """Bring the copies among the arguments up to date, and write to those again that the op writes
    to, one after the other.
    """
    several = args[0] if args and isinstance(args[0], (list, tuple)) else []
    copies = [len(way_back(_memory(tensor))) > 0 for tensor in several]
    others = sum(isinstance(arg, (list, tuple)) for arg in args) > 1
    row = OF_TORCH.get(registry.name_of(op))
    # What lies in no copy has been written to already, and so before the others.
    in_any_order = row and row.commutes and not _reads_what_it_writes(args, kwargs)
    if (
        torch.Tag.nondeterministic_seeded in op.tags
        or not several
        or any(argument.is_out for argument in op._schema.arguments)
        or (others and False in copies and not in_any_order)
    ):
        raise RuntimeError(
            f"{registry.name_of(op)} writes at once to several views of one tensor that are copies "
            "of it, and cannot write to them one after the other. Write to one at a time."
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
    """Runs an op that writes to tensors which have to be redistributed first, on local tensors as
    they are; what it wrote to the copies is taken back.

    A tensor that is pending stays so, whatever is written to it: one device then has all of the
    sum, and the others nothing. Others may share its memory, for whom it is pending.

    Attributes:
        op: the op.
        function: that, or what runs in its place.
        given, wanted: the op on the specs of the tensors, and on those that it needs.
        prepare: what its local arguments are made into before.
    """

    op: Any
    function: Callable[..., Any]
    given: OpSchema
    wanted: OpSchema
    prepare: Prepare | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given, wanted = self.given.args_schema, self.wanted.args_schema
        several = _of_one_memory(self.op, args)
        for i in range(several):
            self._write(*[[_only(x, i, several) for x in some] for some in (args, given, wanted)])
        return None if several else self._write(args, given, wanted, **kwargs)

    def _write(
        self, args: Sequence[Any], given: Sequence[Any], wanted: Sequence[Any], **kwargs: Any
    ) -> Any:
        """The op on these local tensors, which have those specs and are to have these."""
        moved_args = [*map(_moved, args, given, wanted)]
        moved_kwargs = {name: self._moved_keyword(name, x) for name, x in kwargs.items()}
        ready = moved_args if self.prepare is None else self.prepare(moved_args)
        results = self.function(*ready, **moved_kwargs)
        for i, name in _places_written(self.op):
            if i < len(args):
                _take_back(args[i], moved_args[i], given[i], wanted[i])
            elif name in kwargs:
                specs = self.given.kwargs_schema[name], self.wanted.kwargs_schema[name]
                _take_back(kwargs[name], moved_kwargs[name], *specs)
        return results

    def _moved_keyword(self, name: str, local: Any) -> Any:
        """What the op gets as that argument; of ``out=`` only how long it is matters."""
        spec: Any = self.given.kwargs_schema.get(name)
        to: Any = self.wanted.kwargs_schema.get(name)
        if (
            isinstance(spec, DTensorSpec)
            and op_schemas.is_out(self.op, name)
            and tuple(spec.placements) != tuple(to.placements)
            and all(isinstance(p, Replicate) for p in to.placements)
        ):
            return local.new_empty(tuple(to.shape))
        return _moved(local, spec, to)


def _of_one_memory(op: Any, args: Sequence[Any]) -> int:
    """How many tensors an op writes to that takes them in lists, where one that it writes to is in
    the memory of another's operands: what each is moved to would not have what is written to the
    other, and they are written to one after the other. Else 0.
    """
    written = [args[i] for i, _ in _places_written(op) if i < len(args)]
    several = max([len(some) for some in written if isinstance(some, (list, tuple))], default=0)
    of = [_memories(args, i, several) for i in range(several)]
    to = [_memories(written, i, several) for i in range(several)]
    met = any(to[i] & of[j] for i in range(several) for j in range(several) if i != j)
    return several if met else 0


def _memories(args: Sequence[Any], i: int, several: int) -> set[int]:
    """In which memories those tensors are of the lists of so many that are at that place."""
    locals = [x[i] for x in args if isinstance(x, (list, tuple)) and len(x) == several]
    tensors = [collective_ops.in_flight(x) for x in locals if isinstance(x, torch.Tensor)]
    return {id(local_tensors.storage_of(x)) for x in tensors if memory_of(x) is not None}


def _only(arg: Any, i: int, several: int) -> Any:
    """Of a list of so many what is at that place, as a list."""
    return arg[i : i + 1] if isinstance(arg, (list, tuple)) and len(arg) == several else arg


def _moved(local: Any, spec: Any, to: Any) -> Any:
    """What is given to the op as an argument, a tensor or a list of them."""
    if not isinstance(spec, (list, tuple)):
        return _moved([local], [spec], [to])[0]
    moving = _places_moved(spec, to)
    moved = redistribute_all([Wanted(local[i], spec[i], to[i]) for i in moving], counted=False)
    result = list(local)
    for i, x in zip(moving, moved):
        result[i] = x
    return result


def _take_back(local: Any, wrote: Any, spec: Any, to: Any) -> None:
    """Have an argument, a tensor or a list of them, be what was written to what it was moved to."""
    if not isinstance(spec, (list, tuple)):
        local, wrote, spec, to = [local], [wrote], [spec], [to]
    moving = _places_moved(spec, to)
    pending = {i: _finished(spec[i], to[i]) for i in moving}
    back = []
    for i in moving:
        placed = [Replicate() if m in pending[i] else p for m, p in enumerate(spec[i].placements)]
        back.append(Wanted(wrote[i], to[i], tensor_specs.placed_as(spec[i], tuple(placed))))
    for i, value in zip(moving, redistribute_all(back, counted=False)):
        local[i].copy_(_contributed(value, spec[i].mesh, pending[i]))


def _places_moved(specs: Sequence[Any], wanted: Sequence[Any]) -> list[int]:
    """Which of the tensors have to be redistributed."""
    return [
        i
        for i, (spec, to) in enumerate(zip(specs, wanted))
        if isinstance(spec, DTensorSpec) and tuple(spec.placements) != tuple(to.placements)
    ]


def _finished(spec: DTensorSpec, to: DTensorSpec) -> dict[int, Partial]:
    """What is pending of a tensor and no longer of what it is redistributed to."""
    return {
        m: placement
        for m, (placement, finished) in enumerate(zip(spec.placements, to.placements))
        if isinstance(placement, Partial) and not isinstance(finished, Partial)
    }


# What devices but the first add to a reduction, where it is not what the first adds.
_NOTHING = {"sum": 0, "product": 1, "bxor": 0}


def _contributed(value: torch.Tensor, mesh: Any, pending: dict[int, Partial]) -> torch.Tensor:
    """This rank's contribution to reductions, of which ``value`` is to come: of sums one device has
    all, and the others nothing. That is exact, also of integers.
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
    """Where among the op's arguments, and by which names, those are that it writes to."""
    return [
        (i, argument.name)
        for i, argument in enumerate(op._schema.arguments)
        if op_schemas.is_written(op, argument)
    ]


def _memory(tensor: Any) -> Any:
    return local_tensors.storage_of(collective_ops.in_flight(tensor._local_tensor))


def _written(memory: Any, by: Copy | None = None) -> None:
    """Something was written to ``memory``: its copies are stale, but for ``by``, from which
    it was written, and what could be told the same; and its source is told.
    """
    outdate(memory, by)
    copy = copy_in(memory)
    moved = None if copy is None else copy.moved()
    if copy is not None and moved is not None:
        copy.take_back(moved)
        _written(local_tensors.storage_of(copy.source), copy)
