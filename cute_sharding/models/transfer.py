"""Tensors of a program brought into those of another one's ranks, each of which says by itself what
it makes of them: an engine's own loader, recorded.

What ranks say is plain data. Tensors that are made of equal ones in an equal way have one *form*,
as the layers of a model do, so what is planned grows with the forms and not with the names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple, TypeAlias

from cute_sharding._words import counted
from cute_sharding.exchange import Bundle, Mesh, Placed
from cute_sharding.models.buckets import Bucket
from cute_sharding.models.plan import Member, PackedPlan
from cute_sharding.models.refit import Refit
from cute_sharding.models.tensor import PlacedTensor
from cute_sharding.relations.relation import Piece, Relation, read_once
from cute_sharding.sharding.rows import count_rows


class Form(NamedTuple):
    """How some results are made of some operands, both numbered from 0.

    Attributes:
        shapes, dtypes: of the results.
        pieces: of a relation; constants are operands below 0.
        constants: their values.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    pieces: tuple[Piece, ...]
    constants: tuple[Any, ...] = ()


class Made(NamedTuple):
    """Results of a rank that share operands, with all of these.

    Attributes:
        names: of the results.
        form: the number of their form.
        operands: the numbers of what they are made of.
    """

    names: tuple[str, ...]
    form: int
    operands: tuple[int, ...]


class Need(NamedTuple):
    """All that a rank makes."""

    forms: tuple[Form, ...]
    made: tuple[Made, ...]


# What ranks make, each different need with the ranks that have it.
Needs: TypeAlias = "Sequence[tuple[Sequence[int], Need]]"


@dataclass(frozen=True)
class AgreedBundle(Bundle):
    """A bundle of which ranks have told one another how much they receive.

    Attributes:
        most: the bytes that the busiest rank receives.
    """

    most: int = 0

    @property
    def is_free(self) -> bool:
        return not self.most

    @property
    def received_bytes(self) -> int:
        return self.most


@dataclass(frozen=True, eq=False)
class Transfer(PackedPlan):
    """Results of ranks made of operands.

    Attributes:
        operands: what there is, on its meshes.
        results: what is made; each on the ranks that make the same.
        made: which results are made of which operands: the members.
        together: which members go together, with what the busiest rank receives of each.
        memory_limit: the most bytes of buffers on a rank, or None.
    """

    operands: tuple[PlacedTensor, ...]
    results: tuple[PlacedTensor, ...]
    made: tuple[Member, ...]
    together: tuple[Bucket, ...]
    memory_limit: int | None = None

    @property
    def members(self) -> tuple[Member, ...]:
        return self.made

    @property
    def packed(self) -> tuple[Bucket, ...]:
        return self.together

    @property
    def targets(self) -> tuple[PlacedTensor, ...]:
        return self.results

    @cached_property
    def unread(self) -> dict[str, int]:
        """How many elements of an operand no rank reads, where there are some."""
        read: dict[int, list[Piece]] = {}
        for member in self.members:
            assert isinstance(member.exchange.relation, Relation)
            for i, some in member.exchange.relation.by_source.items():
                if i >= 0:
                    read.setdefault(member.operands[i], []).extend(some)
        known: dict[tuple[Piece, ...], int] = {}
        found = {}
        for k, operand in enumerate(self.operands):
            pieces = tuple([each._replace(source=0, target=0) for each in read.get(k, ())])
            if pieces not in known:
                known[pieces] = count_rows(read_once(pieces))
            left = prod(operand.placed.shape) - known[pieces]
            if left:
                found[operand.name] = left
        return found

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data: sizes in bytes."""
        return {
            "operands": [each.to_dict() for each in self.operands],
            "results": [
                {**each.to_dict(), "ranks": [*each.placed.mesh.ranks]} for each in self.results
            ],
            "members": [
                {
                    "operands": [self.operands[k].name for k in member.operands],
                    "results": [*member.results],
                    "dtype": member.dtype,
                }
                for member in self.members
            ],
            "buckets": [[*each.members] for each in self.packed],
            "memory_limit": self.memory_limit,
            "unread_elements": dict(self.unread),
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        sides = (
            sorted({rank for each in side for rank in each.placed.mesh.ranks})
            for side in (self.operands, self.results)
        )
        before, after = (Mesh((len(ranks),), ranks) for ranks in sides)
        many = len({each.name for each in self.results})
        yield (
            f"load of {counted(len(self.operands), 'tensor')} into {many}, from {before} to {after}"
        )
        for kind, names, operands in self._kinds():
            times = f"{len(names)} x " if len(names) > 1 else ""
            yield f"  {times}{names[0]} {kind.placed.shape} {kind.dtype} of {_some(operands)}"
        if self.unread:
            yield f"  not read: {_some([*self.unread])}"
        yield f"in all: {counted(self.collectives, 'exchange')}"

    def _kinds(self) -> Iterator[tuple[PlacedTensor, list[str], list[str]]]:
        """Results that lie alike and are made alike: the first, their names, and what it is of."""
        found: dict[Any, tuple[PlacedTensor, list[str], list[str]]] = {}
        for member in self.members:
            operands = [self.operands[k].name for k in member.operands]
            for i, k in enumerate(member.results):
                key = member.exchange, member.dtype, i
                each = self.results[k]
                found.setdefault(key, (each, [], operands))[1].append(each.name)
        seen: dict[Any, tuple[PlacedTensor, list[str], list[str]]] = {}
        for each, names, operands in found.values():
            seen.setdefault((names[0], each.placed.shape), (each, names, operands))
        yield from seen.values()


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return (", ".join(names[:4]) or "constants") + more


# -- joining ---------------------------------------------------------------------------------------


class JoinedNeeds(NamedTuple):
    """The needs of all ranks as members of one plan.

    Attributes:
        results: what is made, in order.
        members: of what.
        of_need: for each need, the names and numbers of its results.
    """

    results: tuple[PlacedTensor, ...]
    members: tuple[Member, ...]
    of_need: tuple[dict[str, int], ...]


def join_needs(operands: Sequence[PlacedTensor], needs: Needs) -> JoinedNeeds:
    """What ranks need of the operands, as the members of one plan. Ranks whose results have the
    same names share members, so that what several need is sent by all who have it.

    >>> form = Form(((2, 6),), ("float32",), (Piece(0, 0, 12, 0, ((12, 1, 1),)),))
    >>> need = Need((form,), (Made(("w",), 0, (0,)),))
    >>> operand = PlacedTensor.of((4, 6), (2,), "S(0)", name="weight")
    >>> joined = join_needs([operand], [((2, 3), need)])
    >>> joined.members[0].exchange.received_by(2), joined.of_need
    (12, ({'w': 0},))
    """
    slots: dict[tuple[str, ...], list[tuple[int, Made]]] = {}
    for i, (_, need) in enumerate(needs):
        for made in need.made:
            slots.setdefault(made.names, []).append((i, made))
    lies: dict[PlacedTensor, int] = {}
    kinds = [lies.setdefault(each, len(lies)) for each in operands]
    known: dict[Any, Refit] = {}
    results: list[PlacedTensor] = []
    members: list[Member] = []
    of_need: list[dict[str, int]] = [{} for _ in needs]
    for names, parts in sorted(slots.items(), key=lambda slot: _first(slot[1])):
        read = list(dict.fromkeys(k for _, made in parts for k in made.operands))
        places = {k: i for i, k in enumerate(read)}
        forms = [(i, made.form, tuple([places[k] for k in made.operands])) for i, made in parts]
        key = tuple(forms), tuple([kinds[k] for k in read])
        if key not in known:
            known[key] = _refit([operands[k] for k in read], needs, forms)
        first = len(results)
        for (i, _, _), start in zip(forms, range(0, len(forms) * len(names), len(names))):
            for j, name in enumerate(names):
                of_need[i][name] = len(results)
                results.append(replace(known[key].results[start + j], name=name))
        members += [
            each._replace(
                operands=tuple([read[k] for k in each.operands]),
                results=tuple([first + k for k in each.results]),
            )
            for each in known[key].members
        ]
    return JoinedNeeds(tuple(results), tuple(members), tuple(of_need))


def _first(parts: Sequence[tuple[int, Made]]) -> int:
    return min([k for _, made in parts for k in made.operands], default=-1)


def _refit(
    operands: Sequence[PlacedTensor],
    needs: Needs,
    forms: Sequence[tuple[int, int, tuple[int, ...]]],
) -> Refit:
    """The results of several needs, made of the same operands."""
    results: list[PlacedTensor] = []
    pieces: list[Piece] = []
    constants: list[Any] = []
    for i, number, places in forms:
        ranks, need = needs[i]
        form, mesh = need.forms[number], Mesh((len(ranks),), ranks)
        first, before = len(results), len(constants)
        for shape, dtype in zip(form.shapes, form.dtypes):
            results.append(PlacedTensor(Placed(shape, mesh, ((),) * len(shape)), dtype))
        constants += form.constants
        for each in form.pieces:
            source = places[each.source] if each.source >= 0 else each.source - before
            pieces.append(each._replace(source=source, target=each.target + first))
    shapes = [tuple([each.placed.shape for each in side]) for side in (operands, results)]
    relation = Relation(shapes[0], shapes[1], tuple(pieces), tuple(constants))
    return Refit(relation, tuple(operands), tuple(results))
