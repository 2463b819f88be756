"""Where the placements of a tensor came from. The records of a program have the specs of tensors,
but not the tensors. So the recorded ops are searched backwards for an op that returns a tensor of
the same shape, dtype and placements. The answer is what may have happened.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

from cute_sharding.dtensor.profile.asking import Answered, Ask, schema_of
from cute_sharding.dtensor.profile.gradients import roles_of
from cute_sharding.dtensor.profile.profiler import Call
from cute_sharding.dtensor.replaced import op_schemas
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
)

# The most tensors to look at in one search.
MOST = 256


class Source(NamedTuple):
    """A tensor that an op returns.

    Attributes:
        call: the op.
        spec: the tensor.
        whole: the placements of the tensor without its shards.
        received: the bytes that the busiest rank receives to redistribute it to ``whole``.
    """

    call: Call
    spec: DTensorSpec
    whole: tuple[Placement, ...]
    received: int


class Sharded(NamedTuple):
    """An op that sends nothing, and in which a replicated tensor became sharded because a smaller
    operand is sharded.

    Attributes:
        call: the op.
        large, small: the operands.
        result: the tensor that became sharded.
        whole: the placements of the smaller operand without its shards.
        received: the bytes that the busiest rank receives to redistribute the smaller to ``whole``.
        source: where the smaller operand came from; None: unknown.
    """

    call: Call
    large: DTensorSpec
    small: DTensorSpec
    result: DTensorSpec
    whole: tuple[Placement, ...]
    received: int
    source: Source | None


class Summed(NamedTuple):
    """Where a Partial came from.

    Attributes:
        call: the op that makes the Partial of tensors that are no Partial.
        users: the number of the ops that reduce this Partial, or a tensor that is computed from it.
        grown: the last op before the reduction that makes the Partial larger; None: no op does.
        at: the number of the operand of ``grown`` that is a smaller Partial.
    """

    call: Call
    users: int
    grown: Call | None
    at: int


class _Facts(NamedTuple):
    """An op, with its decision."""

    specs: Sequence[DTensorSpec]
    answered: Answered


class _At(NamedTuple):
    """A tensor that the call of a number, or a later one, reads."""

    spec: DTensorSpec
    number: int
    dims: tuple[int, ...]
    path: tuple[int, ...] = ()


class Flow:
    """The ops of a program, in the order of their first calls.

    Args:
        calls: the ops.
        forward_of: the forward op of a gradient's op.
        sending: the ops that communicate.
    """

    def __init__(
        self,
        calls: Iterable[Call],
        forward_of: Callable[[Call], Call | None],
        sending: Iterable[Call] = (),
    ) -> None:
        self._calls = list(calls)
        self._number = {call: k for k, call in enumerate(self._calls)}
        self._forward_of, self._sending = forward_of, list(sending)
        self._facts: dict[int, _Facts | None] = {}
        self._made: dict[Any, list[int]] = {}  # by result, the ops, in order
        self._read: dict[Any, int] = {}  # by operand and line, the last op
        self._reducing: dict[int, set[Call]] | None = None

    def sharded_by(self, call: Call, least: int | None) -> Sharded | None:
        """The nearest op that sharded a replicated tensor from which an operand is computed.
        ``least``: the bytes that the op receives; a redistribution that receives as many is no
        answer.
        """
        seen: set[Any] = set()
        for start in self._starts(call):
            for at in self._before([start], seen):
                found = self._sharded(at)
                if found is not None and (least is None or _bytes_of(found) < least):
                    return found
        return None

    def summed_by(self, call: Call, spec: DTensorSpec) -> list[Summed]:
        """Where the operands of the op that are such a Partial came from."""
        found = []
        for start in self._starts(call):
            makers = list(self._makers_of_sum([start])) if _key(start.spec) == _key(spec) else []
            if makers:
                number, path = max(makers, key=lambda each: len(self._users().get(each[0], ())))
                users = len(self._users().get(number, ()))
                found.append(Summed(self._calls[number], users, *self._grown(path, spec)))
        return list(dict.fromkeys(found))

    def forward_of(self, call: Call) -> Call | None:
        """The forward op of a gradient's op; None for another op, or if it is unknown."""
        return self._forward_of(call) if call.backward else None

    def operands_of(self, call: Call) -> Sequence[DTensorSpec]:
        """The operands of a recorded op; none if they are unknown."""
        facts = self._facts_of(self._number[call])
        return facts.specs if facts else ()

    def results_of(self, call: Call) -> Sequence[DTensorSpec]:
        """The results of a recorded op; none if they are unknown."""
        facts = self._facts_of(self._number[call])
        return facts.answered.results if facts else ()

    # -- the ops that shard ------------------------------------------------------------------------

    def _sharded(self, at: _At) -> Sharded | None:
        """What ``at.number`` says, if it sharded a replicated operand."""
        facts = self._facts_of(at.number)
        if facts is None or facts.answered.other.received != 0:
            return None
        for before, after in facts.answered.moved:
            dims = [m for m in at.dims if _is_sliced(before, after, m)]
            result = facts.answered.results[0]
            if not dims or tuple(result.shape) != tuple(before.shape):
                continue
            fitting = [
                (spec, since)
                for spec, since in zip(facts.specs, self._since(at.number))
                if _size(spec) < _size(before) and all(_is_shard(spec, m) for m in dims)
            ]
            if not fitting:
                continue
            small, since = max(fitting, key=lambda each: _size(each[0]))
            call = self._calls[at.number]
            ask = Ask(call.settings, None)
            whole = _without(small, dims)
            received = ask.received_to(small, whole)
            if received is not None:
                source = self._source(small, since, dims, ask)
                return Sharded(call, before, small, result, whole, received, source)
        return None

    def _source(
        self, spec: DTensorSpec, number: int, dims: Sequence[int], ask: Ask
    ) -> Source | None:
        """The op that made the tensor from which ops of one tensor, such as views and splits,
        computed this one.
        """
        found = None
        for _ in range(MOST):
            maker = self._maker(spec, number)
            facts = None if maker is None else self._facts_of(maker)
            if maker is None or facts is None or facts.answered.moved:
                break
            placed = [r for r in facts.answered.results if _key(r) == _key(spec)]
            whole = _without(placed[0], dims)
            received = ask.received_to(placed[0], whole)
            if received is not None:
                found = Source(self._calls[maker], placed[0], whole, received)
            if len(facts.specs) != 1:
                break
            spec, number = facts.specs[0], self._since(maker)[0]
        return found

    # -- the ops that make a Partial ---------------------------------------------------------------

    def _users(self) -> dict[int, set[Call]]:
        """For each op that makes a Partial, the ops that reduce it, or what is computed from it."""
        if self._reducing is None:
            self._reducing = {}
            for call in self._sending:
                number = self._number.get(call)
                facts = None if number is None else self._facts_of(number)
                reduced = {
                    _key(before)
                    for before, after in (facts.answered.moved if facts else ())
                    if any(map(_is_reduced, before.placements, after.placements))
                }
                starts = [at for at in self._starts(call) if _key(at.spec) in reduced]
                for maker, _ in self._makers_of_sum(starts):
                    self._reducing.setdefault(maker, set()).add(call)
        return self._reducing

    def _makers_of_sum(self, starts: Sequence[_At]) -> Iterator[tuple[int, tuple[int, ...]]]:
        """The ops that make the Partial, each with the ops after it, the nearest first."""
        sums = [
            at._replace(dims=tuple([m for m in at.dims if _is_sum(at.spec, m)])) for at in starts
        ]
        for at in self._before([at for at in sums if at.dims], set(), sums=True):
            facts = self._facts_of(at.number)
            if facts and not any(_is_sum(spec, m) for spec in facts.specs for m in at.dims):
                yield at.number, at.path

    def _grown(self, path: Sequence[int], spec: DTensorSpec) -> tuple[Call | None, int]:
        """The op nearest to the reduction that makes the Partial larger, and its operand."""
        dims = [m for m in range(len(spec.placements)) if _is_sum(spec, m)]
        for number in path:
            facts = self._facts_of(number)
            for k, each in enumerate(facts.specs if facts else ()):
                if _size(each) < _size(spec) and any(_is_sum(each, m) for m in dims):
                    return self._calls[number], k
        return None, -1

    # -- the search --------------------------------------------------------------------------------

    def _before(
        self, starts: Sequence[_At], seen: set[Any], *, sums: bool = False
    ) -> Iterator[_At]:
        """The ops from which the tensors came, the nearest first: each with the mesh dims on which
        its result is sharded or a Partial. A tensor that an op redistributes is not followed.
        """
        waiting = deque(starts)
        while waiting and len(seen) < MOST:
            at = waiting.popleft()
            maker = self._maker(at.spec, at.number)
            if maker is None or (maker, at.dims) in seen:
                continue
            seen.add((maker, at.dims))
            found = _At(at.spec, maker, at.dims, (*at.path, maker))
            yield found
            facts = self._facts_of(maker)
            if facts is None or (not sums and self._sharded(found) is not None):
                continue
            for spec, since in zip(facts.specs, self._since(maker)):
                if any(spec is before for before, _ in facts.answered.moved):
                    continue
                dims = [
                    m for m in at.dims if _is_sum(spec, m) or (not sums and _is_placed(spec, m))
                ]
                if dims:
                    waiting.append(_At(spec, since, tuple(dims), found.path))

    def _starts(self, call: Call) -> list[_At]:
        """The operands of an op that are sharded or Partial, those that are redistributed first."""
        number = self._number.get(call)
        facts = None if number is None else self._facts_of(number)
        if number is None or facts is None:
            return []
        moved = [before for before, _ in facts.answered.moved]
        every = sorted(
            zip(facts.specs, self._since(number)),
            key=lambda each: not any(each[0] is spec for spec in moved),
        )
        placed = [
            (spec, at, tuple([m for m in range(spec.mesh.ndim) if _is_placed(spec, m)]))
            for spec, at in every
        ]
        return [_At(spec, at, dims) for spec, at, dims in placed if dims]

    def _since(self, number: int) -> list[int]:
        """For each operand of an op, the op before which it was made: the op itself, or the forward
        op if a gradient's op saved this operand.
        """
        facts = self._facts_of(number)
        specs = facts.specs if facts else ()
        of = self.forward_of(self._calls[number])
        forward = None if of is None else self._number.get(of)
        saved = None if forward is None else self._facts_of(forward)
        if forward is None or saved is None:
            return [number] * len(specs)
        roles = roles_of(specs, saved.specs, saved.answered.results)
        return [number if role is None or role.operand is None else forward for role in roles]

    def _maker(self, spec: DTensorSpec, number: int) -> int | None:
        """The last op before the call that returns such a tensor. A tensor that a later op of its
        own line reads is not known to another line.
        """
        if not self._read:
            self._look_at_all()
        key, line = _key(spec), _line(self._calls[number])
        made = self._made.get(key, [])
        for maker in reversed(made[: bisect_left(made, number)]):
            of = _line(self._calls[maker])
            if of == line or self._read.get((key, of), -1) <= maker:
                return maker
        return None

    def _look_at_all(self) -> None:
        """Note which ops return and read which tensors, except replicated ones."""
        for number, call in enumerate(self._calls):
            facts = self._facts_of(number) if _is_placed_at_all(call) else None
            for result in facts.answered.results if facts else ():
                self._made.setdefault(_key(result), []).append(number)
            for spec in facts.specs if facts else ():
                self._read[_key(spec), _line(call)] = number

    def _facts_of(self, number: int) -> _Facts | None:
        """The op and its decision; None if its rule gives none."""
        if number not in self._facts:
            self._facts[number] = _facts(self._calls[number])
        return self._facts[number]


def _facts(call: Call) -> _Facts | None:
    schema = schema_of(call)
    specs = [] if schema is None else op_schemas.specs_of(schema)
    if schema is None:
        return None
    try:
        answered = Ask(call.settings, None)(schema)
    except Exception:  # after any error of the rule, its results are unknown
        return None
    return _Facts(specs, answered) if answered.results else None


def _is_placed_at_all(call: Call) -> bool:
    """Whether an operand is sharded or a Partial, or is unknown."""
    schema = schema_of(call)
    return schema is None or any(
        _is_placed(spec, m) for spec in op_schemas.specs_of(schema) for m in range(spec.mesh.ndim)
    )


def _line(call: Call) -> Any:
    return call.place, call.backward


def _key(spec: DTensorSpec) -> Any:
    meta: Any = spec.tensor_meta
    return tuple(spec.shape), tuple(spec.placements), meta.dtype, spec.mesh


def _size(spec: DTensorSpec) -> int:
    return prod(spec.shape)


def _bytes_of(found: Sharded) -> int:
    return found.received if found.source is None else min(found.received, found.source.received)


def _is_sum(spec: DTensorSpec, m: int) -> bool:
    return isinstance(spec.placements[m], Partial)


def _is_shard(spec: DTensorSpec, m: int) -> bool:
    return isinstance(spec.placements[m], (Shard, StridedShard))


def _is_placed(spec: DTensorSpec, m: int) -> bool:
    return not isinstance(spec.placements[m], Replicate)


def _is_reduced(before: Placement, after: Placement) -> bool:
    return isinstance(before, Partial) and not isinstance(after, Partial)


def _is_sliced(before: DTensorSpec, after: DTensorSpec, m: int) -> bool:
    return isinstance(before.placements[m], Replicate) and _is_shard(after, m)


def _without(spec: DTensorSpec, dims: Sequence[int]) -> tuple[Placement, ...]:
    return tuple([Replicate() if m in dims else p for m, p in enumerate(spec.placements)])
