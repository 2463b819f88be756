"""Which mesh dim cuts which name of a signature, and what it costs to bring the operands there."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product, starmap
from math import floor, prod
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

from cute_sharding._memory import remembered
from cute_sharding.exchange import Exchange
from cute_sharding.exchange.network import Chosen, Network
from cute_sharding.exchange.placed import Placed, local_elements, received, rows_of_devices
from cute_sharding.exchange.plan import collectives, received_by
from cute_sharding.exchange.planner import plan_steps
from cute_sharding.exchange.step import of_blocks
from cute_sharding.propagation.solver import Cost, least
from cute_sharding.relations.moves import Link, Move, Rows, Window
from cute_sharding.relations.signature import (
    NOT_FOLDED,
    ONE,
    Folding,
    Linear,
    Reads,
    Signature,
)
from cute_sharding.sharding.rows import Cut, Run, are_even, chains_of, rows_held

# -- operands --------------------------------------------------------------------------------------
# The operands of an op, and the cost of bringing them to other placements.

# What one mesh dim does to one tensor: a cut; the op of a pending reduction; or None, where all
# devices have the same.
Part: TypeAlias = "Cut | str"


class Operand(NamedTuple):
    """An operand of an op: its global shape, and what each mesh dim does to it.

    Attributes:
        shape: in elements.
        parts: for each mesh dim a cut, (dim, split factor); the op of a pending reduction, such as
            "sum"; or None, where all devices have the same.
        itemsize: of an element, in bytes, or relative to that of other operands.

    >>> Operand((8, 8), ((0, 1), "sum")).parts  # Shard(0) on one mesh dim, Partial on the other
    ((0, 1), 'sum')
    """

    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    itemsize: int = 1


def cuts_of(parts: Sequence[Part]) -> tuple[Cut, ...]:
    """The cuts, with None for pending reductions."""
    return tuple([None if isinstance(part, str) else part for part in parts])


@remembered
def received_for(
    operand: Operand, target: tuple[Part, ...], mesh: tuple[int, ...], chosen: Chosen = None
) -> int:
    """How many elements the busiest device receives when an operand is redistributed to ``target``,
    by the plan that would run if process groups over several mesh dims existed. (If the cost
    depended on the groups, it would change with ``prepare_groups``; DTensor caches answers.) A
    replicated tensor becomes a pending one for nothing. ``chosen``: the network, if it is not the
    default.

    >>> received_for(Operand((8, 8), ((1, 1),)), (None,), (4,))
    48
    """
    return moved_for(operand, target, mesh, chosen)[0]


@remembered
def moved_for(
    operand: Operand, target: tuple[Part, ...], mesh: tuple[int, ...], chosen: Chosen = None
) -> tuple[int, int]:
    """:func:`received_for`, and in how many collectives.

    >>> moved_for(Operand((8, 8), ("sum", (1, 1))), (None, None), (2, 4))
    (64, 2)
    """
    if operand.parts == target:
        return 0, 0
    source, wanted = _ends(operand, target, mesh)
    network = Network.of_programs(mesh, chosen)
    if source.pending == wanted.pending and network.is_flat:  # one exchange of what is missing
        elements = received(operand.shape, source.chains, wanted.chains, mesh)
        return elements, int(elements > 0)
    steps = plan_steps(source, wanted, network)
    return received_by(steps), collectives(steps)


@remembered
def seconds_for(
    operand: Operand, target: tuple[Part, ...], mesh: tuple[int, ...], chosen: Chosen = None
) -> float:
    """The seconds of :func:`moved_for` on the network, if elements have the operand's bytes.

    >>> round(seconds_for(Operand((8, 8), ((1, 1),)), (None,), (4,), "flat:1e-6,1e-9"), 12)
    2.048e-06
    """
    if operand.parts == target:
        return 0.0
    steps = plan_steps(*_ends(operand, target, mesh), Network.of_programs(mesh, chosen))
    network = Network.of_elements(mesh, chosen, operand.itemsize)
    return float(sum(step.seconds(network) for step in steps))


def _ends(
    operand: Operand, target: tuple[Part, ...], mesh: tuple[int, ...]
) -> tuple[Placed, Placed]:
    """From where to where an operand is brought: a replica is already what may be pending."""
    source = _placed(operand.shape, operand.parts, mesh)
    wanted = _placed(operand.shape, target, mesh)
    return source, replace(
        wanted, pending=tuple([each for each in wanted.pending if each in source.pending])
    )


def _placed(shape: tuple[int, ...], parts: Sequence[Part], mesh: tuple[int, ...]) -> Placed:
    """A tensor of that shape on which each mesh dim does what its part says."""
    pending = [(m, p) for m, p in enumerate(parts) if isinstance(p, str) and mesh[m] > 1]
    return Placed.numbered(shape, mesh, chains_of(cuts_of(parts), len(shape), mesh), tuple(pending))


@remembered
def owed_for(shape: tuple[int, ...], parts: tuple[Part, ...], mesh: tuple[int, ...]) -> int:
    """The least that each device will have to receive for what is pending of a tensor: its block,
    of each other device, as in a reduce-scatter.

    >>> owed_for((8, 8), ("sum",), (4,)), owed_for((8, 8), ((0, 1), "sum"), (2, 4))
    (48, 24)
    """
    devices = prod([n for part, n in zip(parts, mesh) if isinstance(part, str)])
    if devices == 1:
        return 0
    return of_blocks(devices, -(-local_elements(shape, cuts_of(parts), mesh) // devices))


# -- assign ----------------------------------------------------------------------------------------
# Which mesh dim cuts which name of a signature.
#
# Each mesh dim has one of three roles. It cuts one name by one split factor, in all tensors that
# have the name (and the other tensors are replicated on it); or it keeps one operand's pending
# reduction pending in the result; or it does nothing. With such roles a device has the same rows of
# a name in all operands, whatever the mesh dims before have cut, and the results hold these rows
# too. No choice needs further proof; choices differ only in cost.

ALL = -1  # stands for all operands whose reductions stay pending together


class Assignment(NamedTuple):
    """The parts of each operand and each result, on each mesh dim, and how many elements the
    busiest device receives on the way.

    Attributes:
        operands: the parts that each operand must have, as in :class:`Operand`. An operand that
            the op does not read keeps its own; if the op reads only sizes, those of the sizes.
        results: the parts of each result.
        received: in elements.
        differ: whether averages weighted by shares are pending over blocks of unequal sizes.

    >>> from cute_sharding.relations import parse
    >>> matmul = parse("m k, k n -> m n", (2, 2))
    >>> rows = Operand((8, 8), ((0, 1),))  # Shard(0) on a mesh of four
    >>> found: Assignment = assign(matmul, [rows, Operand((8, 8), (None,))], (4,))
    >>> found
    Assignment(operands=(((0, 1),), (None,)), results=(((0, 1),),), received=0, differ=False)

    >>> mean, rows = parse("m n -> n", (2,)), Operand((5, 8), ((0, 1),))  # three rows and two
    >>> assign(mean, [rows], (2,), reduce="avg", shares=True)
    Assignment(operands=(((0, 1),),), results=(('avg',),), received=0, differ=True)
    """

    operands: tuple[tuple[Part, ...], ...]
    results: tuple[tuple[Part, ...], ...]
    received: int
    differ: bool = False


class _Choice(NamedTuple):
    """The role of one mesh dim: the name that it cuts and the split factor; or the operand whose
    reduction stays pending (ALL: all that stay pending together) and its op; or neither.
    """

    name: str | None = None
    split_factor: int = 1
    pending: int | None = None
    op: str = ""


def assign(
    signature: Signature,
    operands: Sequence[Operand],
    mesh: Sequence[int],
    *,
    spare: bool = False,
    compared: list[Assignment] | None = None,
    **how: Any,
) -> Assignment:
    """One that receives nothing; or the assignment that receives the fewest bytes, with the least
    for what stays pending (:func:`.signatures.owed_for`). Of several, one that receives the fewest
    now, then one with the fewest reductions pending, then one that holds the fewest elements on
    each device.

    Args:
        signature: for operands with as many dims as these.
        operands: the tensors, with the placements that they have.
        mesh: the mesh's sizes.
        reduce: the reduction that a cut of a contracted name leaves pending; None: contracted
            names must not be cut.
        linear: the operands whose pending reductions may stay; positions: of sums and averages.
        filled: the names of which every device must have rows; True: all names but those whose rows
            read several.
        spare: whether, of sharded operands, mesh dims that cannot keep any cut may cut a free name
            instead, if fewer elements are received then: each device receives a part and not the
            whole.
        empty: whether the op's result on no rows is neutral for the pending reduction.
        assume_rows: whether to assume that every device has rows of each name that is cut.
        shares: whether averages of blocks of any sizes may be pending, weighted by their shares.
        network: for which redistributions are planned, if it is not the default.
        compared: a list to which all assignments are added that the search compares.
        results: their shapes; by default by the sizes of names in operands.
        itemsizes: of an element of each result, as of operands; by default 1.
        folding: the states over folded names.
        weighs_picks: whether the reduction of picked rows counts: the next op has to do it.
        exchanges: whether devices may exchange halos. Otherwise names of which rows read several
            are cut only into blocks of equal size; such that none reads another device's rows.

    Raises:
        ValueError: the operands do not fit the signature.

    >>> from cute_sharding.relations import parse
    >>> matmul = parse("m k, k n -> m n", (2, 2))
    >>> found = assign(matmul, [Operand((8, 8), ((1, 1),)), Operand((8, 8), ((0, 1),))], (4,))
    >>> found.results, found.received  # both are cut along k: a sum is pending
    ((('sum',),), 0)

    >>> softmax, rows = parse("m [n] -> m [n]", (2,)), Operand((8, 8), ((1, 1), None))
    >>> assign(softmax, [rows], (2, 2)).received  # half of all elements, on each device
    32
    >>> found = assign(softmax, [rows], (2, 2), spare=True)
    >>> found.results, found.received  # all of a quarter of the rows
    ((((0, 1), (0, 1)),), 8)
    """
    question = _asked(signature, operands, mesh, **how)
    if compared is not None:
        return _search(question, spare, compared)[1]
    return _assign(question, spare)[1]


def assignments(
    signature: Signature,
    operands: Sequence[Operand],
    mesh: Sequence[int],
    *,
    candidates: Sequence[Collection[tuple[Part, ...]]] = (),
    reduce: str | None = "sum",
    **how: Any,
) -> Iterator[Assignment]:
    """The assignments that a plan of more than this op may want, wherever the operands lie: all by
    plain cuts, and those in which some operand with strided cuts stays in the parts of a candidate.

    Args:
        candidates: for each operand, parts in which it may lie: they say which reductions may be
            pending, and which strided cuts there are.
        how: as in :func:`assign`.

    >>> from cute_sharding.relations import parse
    >>> matmul, x = parse("m k, k n -> m n", (2, 2)), Operand((8, 8), (None,))
    >>> for found in assignments(matmul, [x, x], (4,), candidates=[[((1, 2),)], []]):
    ...     print(*found.operands, "->", *found.results)
    ((0, 1),) (None,) -> ((0, 1),)
    ((1, 1),) ((0, 1),) -> ('sum',)
    (None,) ((1, 1),) -> ((1, 1),)
    (None,) (None,) -> (None,)
    ((1, 2),) ((0, 2),) -> ('sum',)
    """
    question = _asked(signature, operands, mesh, reduce=reduce, **how)
    signature = question.signature
    read = [
        name
        for i, names in enumerate(signature.operands)
        if i not in signature.unread
        for name in names
        if _may_be_cut(signature, name, reduce) and question.sizes.get(name, 1) > 1
    ]
    cuts = [*map(_Choice, dict.fromkeys(read))]
    some = [(i, parts) for i, each in enumerate(candidates) for parts in each]
    tried: set[tuple[_Choice, ...]] = set()
    for choices in chain(
        product(
            *[
                [*cuts, *_left_pending(question, {parts[m] for _, parts in some}), _Choice()]
                if n > 1
                else [_Choice()]
                for m, n in enumerate(mesh)
            ]
        ),
        _choices_of(signature, [each for each in some if _is_strided(each[1])]),
    ):
        found = None if choices in tried else _weigh(question, choices)
        tried.add(choices)
        if found is not None:
            yield found[1]


def _left_pending(question: _Question, parts: Collection[Part]) -> list[_Choice]:
    """The choices that leave the pending ones of these parts pending."""
    linear = question.linear
    who = [ALL] if linear.together else list(linear.operands or ())
    ops = sorted({part for part in parts if isinstance(part, str) and part in linear.kept})
    return [_Choice(pending=i, op=op) for i in who for op in ops]


def _choices_of(
    signature: Signature, some: Sequence[tuple[int, tuple[Part, ...]]]
) -> Iterator[tuple[_Choice, ...]]:
    """The choices by which operands stay in these parts."""
    for i, parts in some:
        names, cuts = signature.operands[i], cuts_of(parts)
        cut = {names[each[0]] for each in cuts if each is not None}
        if i not in signature.unread and cuts == parts and not cut & signature.whole:
            yield tuple([_Choice() if c is None else _Choice(names[c[0]], c[1]) for c in cuts])


def _is_strided(parts: Sequence[Part]) -> bool:
    return any(isinstance(part, tuple) and part[1] > 1 for part in parts)


def _may_be_cut(signature: Signature, name: str, reduce: str | None) -> bool:
    return (
        name != ONE
        and name not in signature.whole
        and (reduce is not None or not signature.contracted(name))
    )


def _asked(
    signature: Signature,
    operands: Sequence[Operand],
    mesh: Sequence[int],
    *,
    linear: Linear | Sequence[int] = (),
    results: Sequence[tuple[int, ...] | None] | None = None,
    itemsizes: Sequence[int] = (),
    reduce: str | None = "sum",
    filled: bool | frozenset[str] = False,
    shares: bool = False,
    empty: bool = False,
    assume_rows: bool = False,
    network: Chosen = None,
    folding: Folding = NOT_FOLDED,
    weighs_picks: bool = False,
    exchanges: bool = True,
) -> _Question:
    return _Question(
        signature.fitted([operand.shape for operand in operands]),
        tuple(operands),
        tuple(mesh),
        reduce,
        _with_positions(linear, len(operands)),
        filled,
        shares,
        empty,
        assume_rows,
        network,
        results and tuple(results),
        tuple(itemsizes),
        folding,
        weighs_picks,
        exchanges,
    )


def _with_positions(linear: Linear | Sequence[int], count: int) -> Linear:
    """``linear`` with the positions of its operands, of ``count``."""
    if not isinstance(linear, Linear):
        return Linear(tuple(linear))
    all_of_them = tuple(range(count))
    return linear._replace(operands=all_of_them) if linear.operands is None else linear


@dataclass(frozen=True)
class _Question:
    """The arguments of :func:`assign`."""

    signature: Signature
    operands: tuple[Operand, ...]
    mesh: tuple[int, ...]
    reduce: str | None
    linear: Linear
    filled: bool | frozenset[str]
    shares: bool
    empty: bool
    assume_rows: bool
    network: Chosen
    made: Sequence[tuple[int, ...] | None] | None
    itemsizes: tuple[int, ...]
    folding: Folding = NOT_FOLDED
    weighs_picks: bool = False
    exchanges: bool = True

    @cached_property
    def sizes(self) -> dict[str, int]:
        """How many rows each name has. (If the operands have only rows that its rows read, the
        results say.)
        """
        found = self.signature.sizes([operand.shape for operand in self.operands])
        count = len(self.operands)
        for k, (shape, names) in enumerate(zip(self.made or (), self.signature.results)):
            read = self.signature.read_by(count + k)
            for d, (n, name) in enumerate(zip(shape or (), names)):
                if d not in read:
                    found.setdefault(name, n)
        return found

    @cached_property
    def filled_names(self) -> frozenset[str]:
        """The names of which every device must have rows. (If it is all names, then not those whose
        rows read several: a device without windows computes one of zeros.)
        """
        if isinstance(self.filled, frozenset):
            return self.filled
        tensors = (*self.signature.operands, *self.signature.results)
        every = frozenset(chain(*tensors)) if self.filled else frozenset()
        return every - self.signature.in_halos.keys()

    @cached_property
    def shapes(self) -> Sequence[tuple[int, ...] | None]:
        """The shapes of the results; None for one that is left out."""
        if self.made:
            return self.made
        return [tuple([self.sizes.get(name, 1) for name in x]) for x in self.signature.results]


@remembered
def _assign(question: _Question, spare: bool) -> tuple[Cost, Assignment]:
    return _search(question, spare)


def _search(
    question: _Question, spare: bool, compared: list[Assignment] | None = None
) -> tuple[Cost, Assignment]:
    signature, operands, mesh = question.signature, question.operands, question.mesh
    options = [
        [
            choice
            for choice in _options(signature, operands, m, question.reduce, question.linear)
            if question.exchanges
            or choice.name not in signature.in_halos
            or _is_even(choice.name, question.sizes, [choice], [n])
        ]
        for m, n in enumerate(mesh)
    ]
    whole = [_Choice()] * len(mesh)  # always allowed

    def cheapest(question: _Question, options: list[list[_Choice]]) -> tuple[Cost, Assignment]:
        def weighed(choices: Sequence[_Choice]) -> tuple[Cost, Assignment] | None:
            found = _weigh(question, choices)
            if compared is not None and found is not None:
                compared.append(found[1])
            return found

        return least(options, weighed, whole)

    found = cheapest(question, options)
    # Of operands that are not sharded the results are whole: all that read them have them.
    is_sharded = any(isinstance(part, tuple) for operand in operands for part in operand.parts)
    if spare and is_sharded and found[0].received:
        # Only if each device gets rows: on no rows some kernels fail and others are wrong.
        cuts = _spare_cuts(signature, operands)
        may_move = {None, *signature.folded, *question.folding.rows, *signature.in_halos}
        if question.weighs_picks:
            may_move |= signature.picked
        wider = [
            [*some, *cuts]
            if n > 1 and all(each.pending is None and each.name in may_move for each in some)
            else some
            for some, n in zip(options, mesh)
        ]
        filled = question.filled_names | replace(question, filled=True).filled_names
        moved = cheapest(replace(question, filled=filled), wider)
        found = min(found, moved, key=itemgetter(0))
    return found


def _weigh(question: _Question, choices: Sequence[_Choice]) -> tuple[Cost, Assignment] | None:
    """The cost and the assignment of these choices; None if they are not allowed."""
    signature, operands, mesh = question.signature, question.operands, question.mesh
    linear = question.linear
    if not _allowed(question, choices):
        return None
    carried = _carried(question, choices)
    targets = tuple([_of_operand(question, i, choices, carried) for i in range(len(operands))])
    moved = [
        (operand, target)
        for i, (operand, target) in enumerate(zip(operands, targets))
        if i not in signature.sized
    ]
    if any(starmap(_changes_reduction, moved)):
        return None
    if linear.alone and _changes_more(choices, operands, targets):
        return None
    by = question.network
    elements = [received_for(operand, target, mesh, by) for operand, target in moved]
    received = sum([operand.itemsize * n for (operand, _), n in zip(moved, elements)])
    states = state_moves(signature, operands, targets, mesh, question.folding, question.shapes)
    of_states = [received_for(state, to, mesh, by) for state, to in states]
    received += sum([state.itemsize * n for (state, _), n in zip(states, of_states)])
    # An operand of which only sizes are read will meet the result, so its redistribution counts.
    later = sum(
        operands[i].itemsize * received_for(operands[i], targets[i], mesh, by)
        for i in signature.sized
    )
    results = tuple(
        [_of_result(question, k, choices, targets, carried) for k in range(len(signature.results))]
    )
    itemsizes = question.itemsizes or (1,) * len(results)
    halos = _halos_received(question, targets, results)
    received += sum([itemsize * n for _, itemsize, n in halos])
    if states:
        i, turns = signature.of_fold, question.folding.turns
        own = local_elements(operands[i].shape, cuts_of(targets[i]), mesh) if turns else 0
        later += turns * operands[i].itemsize * own
    # The gradient adds to as many rows of others as are read here.
    later += sum([itemsize * n for i, itemsize, n in halos if i < len(operands)])
    pending = sum(isinstance(part, str) for parts in results for part in parts)
    held = sum(local_elements(operand.shape, cuts_of(target), mesh) for operand, target in moved)
    differ = question.shares and any(
        len(_rows(name, question.sizes, choices, mesh)) > 1
        for name in _contracted(signature, choices)
    )
    owed = sum(
        [
            itemsize * owed_for(x, parts, mesh)
            for x, parts, itemsize in zip(question.shapes, results, itemsizes)
            if x is not None
        ]
    )
    if signature.picked & _contracted(signature, choices):
        owed *= question.weighs_picks
    elif not received + later:
        owed = 0  # an op that needs no communication has none
    cost = Cost(received + later + owed, received, pending, held)
    moving = sum(elements) + sum(of_states) + sum([n for *_, n in halos])
    return cost, Assignment(targets, results, moving, differ)


def _halos_received(
    question: _Question,
    targets: tuple[tuple[Part, ...], ...],
    results: tuple[tuple[Part, ...], ...],
) -> list[tuple[int, int, int]]:
    """For each tensor with a halo: its number, with results after operands, the bytes of an
    element, and how many are received.
    """
    operands, signature = question.operands, question.signature
    sizes = [*[each.itemsize for each in operands], *(question.itemsizes or (1,) * len(results))]
    shapes = (*[each.shape for each in operands], *question.shapes)
    return [
        (i, sizes[i], halo.received_elements)
        for i, halo in halos_of(signature, shapes, (*targets, *results), question.mesh).items()
        if i not in signature.sized and halo.received_elements
    ]


def state_moves(
    signature: Signature,
    operands: Sequence[Operand],
    targets: Sequence[tuple[Part, ...]],
    mesh: Sequence[int],
    folding: Folding,
    results: Sequence[tuple[int, ...] | None] = (),
) -> list[tuple[Operand, tuple[Part, ...]]]:
    """Each state of an op that folds, pending on the mesh dims that cut folded names, and where it
    is needed: on all of their devices. None if no mesh dim has to combine any. ``results``: their
    shapes.

    >>> from cute_sharding.relations import parse
    >>> softmax, rows = parse("m (n) -> m (n)", (2,)), Operand((8, 64), ((1, 1),), 4)
    >>> states = Folding("softmax", ("max", "sum"))
    >>> state_moves(softmax, [rows], [rows.parts], (4,), states)[0]
    (Operand(shape=(8, 1), parts=('max',), itemsize=4), (None,))
    """
    if not signature.folded or not folding.states:
        return []
    i = signature.of_fold
    x, parts = operands[i], targets[i]
    of_rows, folds = state_of(signature, x.shape, parts, mesh)
    if not any(folds):
        return []
    found = []
    for state in folding.states:
        if isinstance(state, str):
            op, shape, lying = state, of_rows, parts
        else:
            op, k = state
            shape = tuple(results[k] or ())
            lying = _like_operands(signature, targets, signature.results[k])
        combined: Part = op
        if op == "gather":  # one behind the other
            shape = prod([n for n, fold in zip(mesh, folds) if fold]), *shape
            lying = tuple([(p[0] + 1, *p[1:]) if isinstance(p, tuple) else p for p in lying])
            combined = 0, 1
        before = tuple([combined if fold else part for fold, part in zip(folds, lying)])
        after = tuple([None if fold else part for fold, part in zip(folds, lying)])
        found.append((Operand(shape, before, folding.itemsize(x.itemsize)), after))
    return found


def _like_operands(
    signature: Signature, targets: Sequence[tuple[Part, ...]], names: Sequence[str]
) -> tuple[Part, ...]:
    """The cuts of a tensor with these names, where operands are cut as in ``targets``."""

    def on(m: int) -> Part:
        for i, (given, parts) in enumerate(zip(signature.operands, targets)):
            part = parts[m]
            if isinstance(part, tuple) and i not in signature.unread and given[part[0]] in names:
                return names.index(given[part[0]]), part[1]
        return None

    return tuple(map(on, range(len(targets[signature.of_fold]))))


def state_of(
    signature: Signature, shape: Sequence[Any], parts: Sequence[Part], mesh: Sequence[int]
) -> tuple[tuple[Any, ...], list[bool]]:
    """The shape of a state of the first operand with folded dims, which has ``shape`` and
    ``parts``; and for each mesh dim whether its devices combine states. A folded dim of several
    rows for each row of its name has a state for each row of the name; if each device has all of
    some, there is nothing to combine.

    >>> from cute_sharding.relations import parse
    >>> groups = parse("n (g*4) -> n (g*4)", (2,))
    >>> state_of(groups, (2, 16), ((1, 1),), (4,)), state_of(groups, (2, 16), ((1, 1),), (8,))
    (((2, 4), [False]), ((2, 4), [True]))
    """
    i = signature.of_fold
    names = signature.operands[i]
    rows = signature.per_row([*[()] * i, shape])[i]
    found = tuple(
        [
            n if name not in signature.folded else row if name in signature.in_groups else 1
            for name, n, row in zip(names, shape, rows)
        ]
    )

    def combines(d: int) -> bool:
        cuts = [
            (part[1], n) for part, n in zip(parts, mesh) if isinstance(part, tuple) and part[0] == d
        ]
        return names[d] in signature.folded and not (
            names[d] in signature.in_groups and are_even(rows[d], cuts)
        )

    return found, [isinstance(part, tuple) and combines(part[0]) for part in parts]


@remembered
def halos_of(
    signature: Signature,
    shapes: tuple[tuple[int, ...] | None, ...],
    parts: tuple[tuple[Part, ...], ...],
    mesh: tuple[int, ...],
    fill: float = 0,
) -> dict[int, Exchange]:
    """For each tensor of which rows of a cut name read several, the exchange by which each device
    gets the rows that its own read; for a result, the exchange by which what they add to rows goes
    to the devices that have these.

    Args:
        shapes, parts: of the operands, when the halos are exchanged, and then of the results.
        fill: the value of rows before the first and after the last.

    >>> from cute_sharding.relations import parse
    >>> pool, rows = parse("n y*1:3 -> n y", (2,)), (((1, 1),), ((1, 1),))
    >>> halos_of(pool, ((2, 8), (2, 6)), rows, (2,))[0].received_elements
    2
    """
    found = dict[int, Exchange]()
    if not signature.halos:
        return found
    tensors = (*signature.operands, *signature.results)
    cuts, sizes = dict[int, tuple[str, int]](), dict[str, int]()
    for i, (names, shape, some) in enumerate(zip(tensors, shapes, parts)):
        read = signature.read_by(i)
        for d, name in enumerate(names):
            if shape is not None and name in signature.in_halos and d not in read:
                sizes[name] = shape[d]
                cuts.update(
                    {
                        m: (name, part[1])
                        for m, part in enumerate(some)
                        if isinstance(part, tuple) and part[0] == d and mesh[m] > 1
                    }
                )
    over = {name for name, _ in cuts.values()}
    for i, (names, shape, some) in enumerate(zip(tensors, shapes, parts)):
        read = {d: reads for d, reads in signature.read_by(i).items() if names[d] in over}
        if shape is None or not read:
            continue
        dims = {names[d]: d for d in read}
        windows = [
            (dims[cuts[m][0]], cuts[m][1]) if m in cuts and cuts[m][0] in dims else part
            for m, part in enumerate(cuts_of(some))
        ]
        move = halo_of(shape, {d: (reads, sizes[names[d]]) for d, reads in read.items()}, fill)
        chains = [chains_of(tuple(each), len(shape), mesh) for each in (cuts_of(some), windows)]
        halo = Exchange.on_mesh(move, mesh, chains[:1], chains[1:])
        found[i] = halo if i < len(signature.operands) else halo.turned(adds=True)
    return found


def halo_of(shape: tuple[int, ...], read: dict[int, tuple[Reads, int]], fill: float = 0) -> Move:
    """The map from a tensor to the rows that windows read: for each dim of ``read`` which rows,
    and the number of windows.
    """
    pairs, onto = [], list(shape)
    for d, n in enumerate(shape):
        if d not in read:
            pairs.append((Rows(d), Rows(d)))
            continue
        reads, onto[d] = read[d]
        first = floor(reads.first)
        before, after = max(-first, 0), max(first, 0)
        rows = (Run(before, after, (), n - after),) if n > after else ()
        window = Window(None, reads.size, reads.step, reads.first - first)
        pairs.append((Rows(d, rows), Rows(d, form=window)))
    return Move((shape,), (tuple(onto),), (Link(0, 0, tuple(pairs)),), fill)


def _spare_cuts(signature: Signature, operands: tuple[Operand, ...]) -> list[_Choice]:
    """Plain cuts of free names, of the operands for which elements may have to be received."""
    names = {
        name: None
        for i, (operand, names) in enumerate(zip(operands, signature.operands))
        if i not in signature.unread | signature.sized and any(operand.parts)
        for name in names
    }
    return [
        _Choice(name)
        for name in names
        if name != ONE
        and name not in signature.whole | signature.folded
        and not signature.contracted(name)
    ]


def _options(
    signature: Signature,
    operands: tuple[Operand, ...],
    m: int,
    reduce: str | None,
    linear: Linear,
) -> list[_Choice]:
    """The choices for one mesh dim: what it does to one of the operands already, or nothing."""
    found: dict[_Choice, None] = {}
    for i, (operand, names) in enumerate(zip(operands, signature.operands)):
        if i in signature.unread:
            continue
        part = operand.parts[m]
        if isinstance(part, str):
            if i not in (linear.operands or ()) or part not in linear.kept:
                continue
            if not linear.together:
                found[_Choice(pending=i, op=part)] = None
            elif all(operands[k].parts[m] == part for k in linear.operands or ()):
                found[_Choice(pending=ALL, op=part)] = None
        elif part is not None:
            name = names[part[0]]
            if _may_be_cut(signature, name, reduce):
                found[_Choice(name, part[1])] = None
                if name in signature.in_halos:
                    found[_Choice(name)] = None
    found[_Choice()] = None
    return list(found)


def _allowed(question: _Question, choices: Sequence[_Choice]) -> bool:
    """Whether the reductions left pending are right for blocks of these sizes. An average needs
    blocks of equal size, or weights by share; a maximum, for example, needs blocks with rows.
    """
    signature, sizes, mesh = question.signature, question.sizes, question.mesh
    reduce = question.reduce
    names = _contracted(signature, choices)
    if not (reduce == "sum" or (reduce == "avg" and question.shares)):
        rows = [_rows(name, sizes, choices, mesh) for name in names]
        is_neutral = question.empty or question.assume_rows
        if any(0 in some for some in rows) and not is_neutral:
            return False
        if reduce == "avg" and any(len(some) > 1 for some in rows):
            return False
    cut = {choice.name for choice in choices if choice.name is not None}
    if not question.assume_rows and any(
        0 in _rows(name, sizes, choices, mesh) for name in cut & question.filled_names
    ):
        return False
    for name, read in signature.in_halos.items():
        if not question.exchanges and not _is_even(name, sizes, choices, mesh):
            return False
        cuts = tuple([(each.split_factor, n) for each, n in _cutting(name, choices, mesh)])
        if any(reads.overlap for reads in read) and not are_together(sizes[name], cuts):
            return False
    kinds = {reduce} if names else set()
    return len(kinds | {choice.op for choice in choices if choice.pending is not None}) <= 1


# Beyond so many devices no strided cuts of windows are examined.
_MOST = 256


@remembered
def are_together(n: int, cuts: tuple[tuple[int, int], ...]) -> bool:
    """Whether successive cuts of (split factor, devices) are known to leave each device rows of
    ``n`` that follow on one another.

    >>> are_together(8, ((2, 2),)), are_together(8, ((2, 2), (1, 2))), are_together(8, ((2, 4),))
    (False, True, False)
    """
    if all(factor == 1 for factor, _ in cuts):
        return True
    if prod([parts for _, parts in cuts]) > _MOST:
        return False
    return all(
        len(held) <= 1 and not any(run.loops for run in held)
        for at in product(*[range(parts) for _, parts in cuts])
        for held in (rows_held(n, tuple([(*cut, k) for cut, k in zip(cuts, at)])),)
    )


def _contracted(signature: Signature, choices: Sequence[_Choice]) -> set[str]:
    """The contracted names that are cut."""
    return {
        choice.name
        for choice in choices
        if choice.name is not None and signature.contracted(choice.name)
    }


def _changes_reduction(operand: Operand, target: tuple[Part, ...]) -> bool:
    """Whether the operand would have to change the op of a pending reduction: a pending sum cannot
    become a pending maximum.
    """
    return any(
        isinstance(part, str) and isinstance(wanted, str) and part != wanted
        for part, wanted in zip(operand.parts, target)
    )


def _changes_more(
    choices: Sequence[_Choice],
    operands: Sequence[Operand],
    targets: Sequence[tuple[Part, ...]],
) -> bool:
    """Whether an operand whose reduction stays pending has to be redistributed."""
    return any(
        operand.parts != target
        for choice in choices
        if choice.pending is not None
        for i, (operand, target) in enumerate(zip(operands, targets))
        if choice.pending in (i, ALL)
    )


def _rows(
    name: str, sizes: dict[str, int], choices: Sequence[_Choice], mesh: tuple[int, ...]
) -> frozenset[int]:
    """The numbers of rows of the name that devices have."""
    cuts = [(choice.split_factor, n, False) for choice, n in _cutting(name, choices, mesh)]
    return rows_of_devices(sizes[name], tuple(cuts))


def _cutting(
    name: str | None, choices: Sequence[_Choice], mesh: Sequence[int]
) -> list[tuple[_Choice, int]]:
    """The choices that cut a name, each with the number of devices on its mesh dim."""
    return [(choice, n) for choice, n in zip(choices, mesh) if choice.name == name]


def _is_even(
    name: str, sizes: dict[str, int], choices: Sequence[_Choice], mesh: Sequence[int]
) -> bool:
    """Whether these choices cut the name into blocks of equal size. Then a name with several rows
    for each row of this one is cut into equal blocks by the same split factor too.
    """
    cuts = [(choice.split_factor, n) for choice, n in _cutting(name, choices, mesh)]
    return are_even(sizes[name], cuts)


def _carried(question: _Question, choices: Sequence[_Choice]) -> frozenset[str]:
    """The names of which several rows fold to one, and no such rows are on several devices."""
    names = question.signature.folded & question.signature.in_groups
    return frozenset([n for n in names if _is_even(n, question.sizes, choices, question.mesh)])


def _kept_whole(signature: Signature, position: int, carried: frozenset[str]) -> frozenset[str]:
    """The names that no mesh dim cuts in this tensor, though it does in others: several rows there
    fold to one row here, and some are on several devices. ``carried``: those of which none are.
    """
    several = {
        ((*signature.operands, *signature.results)[position][d])
        for at, d, _ in signature.grouped
        if at == position
    }
    return (signature.folded & signature.in_groups) - carried - several


def _of_operand(
    question: _Question, i: int, choices: Sequence[_Choice], carried: frozenset[str]
) -> tuple[Part, ...]:
    signature, linear, parts = question.signature, question.linear, question.operands[i].parts
    if i in signature.unread:
        return parts
    names, read = signature.operands[i], signature.read_by(i)
    whole = _kept_whole(signature, i, carried)
    result: list[Part] = []
    for choice, own in zip(choices, parts):
        if choice.name is not None and choice.name in names:
            d = names.index(choice.name)
            # The halo's exchange starts from any cut of the dim.
            is_cut = question.exchanges and d in read and own is not None and own[0] == d
            cut = own if is_cut else (d, choice.split_factor)
            result.append(None if choice.name in whole else cut)
        elif choice.pending == i or (choice.pending == ALL and i in (linear.operands or ())):
            result.append(choice.op)
        elif i in signature.added and (
            choice.pending is not None
            or (choice.name is not None and signature.contracted(choice.name))
        ):
            result.append(choice.op or "sum")
        else:
            result.append(None)
    return tuple(result)


def _of_result(
    question: _Question,
    k: int,
    choices: Sequence[_Choice],
    targets: Sequence[tuple[Part, ...]],
    carried: frozenset[str],
) -> tuple[Part, ...]:
    signature, position = question.signature, len(question.operands) + k
    names, read = signature.results[k], signature.read_by(position)
    whole, result = _kept_whole(signature, position, carried), list[Part]()
    for m, choice in enumerate(choices):
        if choice.pending is not None:
            result.append(choice.op)
        elif choice.name is None:
            result.append(None)
        elif choice.name in names:
            d = names.index(choice.name)
            # A gradient lies as what it is a gradient of.
            cuts = [
                targets[i][m]
                for i, dim, reads in sorted(signature.halos)
                if i < len(targets)
                and dim == d
                and reads == read.get(d)
                and signature.operands[i][dim] == choice.name
            ]
            cut = cuts[0] if cuts else (d, choice.split_factor)
            result.append(None if choice.name in whole else cut)
        else:
            result.append(None if choice.name in signature.folded else question.reduce)
    return tuple(result)
