"""A program as a value: what each op can do, and how its values may lie between ops."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

# How a value lies: all placements on its mesh. What it says is the recorder's affair; here two of
# them are equal or not.
Placing: TypeAlias = Hashable


class Price(NamedTuple):
    """What a choice costs.

    Attributes:
        received: the bytes that the busiest device receives.
        collectives: their number.
        seconds: by a network.
        held: the bytes that a device holds of weights whose placings are chosen.

    >>> Price(8, 1).plus(Price(4, 2))
    Price(received=12, collectives=3, seconds=0.0, held=0)
    >>> Price(12, 3).minus(Price(4, 2)).received
    8
    """

    received: int = 0
    collectives: int = 0
    seconds: float = 0.0
    held: int = 0

    def plus(self, other: Price) -> Price:
        """Both."""
        received, collectives, seconds, held = other
        return Price(
            self.received + received,
            self.collectives + collectives,
            self.seconds + seconds,
            self.held + held,
        )

    def minus(self, other: Price) -> Price:
        """This one without the other, which is part of it."""
        received, collectives, seconds, held = other
        return Price(
            self.received - received,
            self.collectives - collectives,
            self.seconds - seconds,
            self.held - held,
        )


class ValueMove(NamedTuple):
    """A value of a kind that is brought from one placing to another."""

    kind: Hashable
    source: Placing
    target: Placing


class OpWay(NamedTuple):
    """One of the ways in which an op can run.

    Attributes:
        operands: how each operand lies when the op runs.
        results: how each result then lies.
        price: of what the op itself exchanges, such as states of a fold.
    """

    operands: tuple[Placing, ...]
    results: tuple[Placing, ...]
    price: Price = Price()


@dataclass(frozen=True)
class Op:
    """An op of a program.

    Attributes:
        operands: the numbers of the values that it reads; one may be read twice.
        results: the numbers of the values that it makes.
        ways: what it can do. The first is what it does without a plan.
        kind: ops of one kind take the same way, as ops do that a run cannot tell apart.
        as_lies: positions of operands that are read as they lie, since the op writes to them or
            returns a view of them.
        call: ops of one call run at once, one behind the other here; None: it runs by itself.
        what: the op's name and its line, for people.
    """

    operands: tuple[int, ...]
    results: tuple[int, ...]
    ways: tuple[OpWay, ...]
    kind: Hashable = None
    as_lies: frozenset[int] = frozenset()
    what: str = ""
    call: Hashable = None


@dataclass(frozen=True)
class FreeValues:
    """Values that are given, and lie alike, but whose placing is chosen: a weight, and what an
    optimizer keeps for it.

    Attributes:
        values: their numbers.
        placings: how they may lie. The first is that of the program.
    """

    values: tuple[int, ...]
    placings: tuple[Placing, ...]


@dataclass(frozen=True)
class Program:
    """Ops in the order in which they run, and what it costs to bring their values elsewhere.

    Attributes:
        ops: each value is made by one op, given or free.
        given: how the values lie that no op makes: weights and inputs.
        free: of other values that no op makes, how they may lie.
        moves: for each kind of value, what it costs to bring it from one placing to another; what
            is not listed is not possible. From a placing to itself it costs nothing.
        kinds: for each value its kind, a key of ``moves``.
        fixed: values that stay as their op makes them, such as views and what is written in place;
            no value that is given or free moves either. Others may be brought elsewhere as soon as
            they are made.
        sizes: for each kind of value, the bytes that the fullest device holds in each placing.
        kept: values that are held to the end, such as weights and what the program returns.
        within: for a value that has no memory of its own, such as a view, or what an op that
            writes in place returns, the value in whose memory it is. It is fixed.
        alone: values to which a device may write without an op, so that no copy outlives its
            reader.
        shared: the part of the price of several moves that is saved if they run at once, in fewer
            collectives; None: nothing is.

    A value is brought elsewhere where it is made, once and for good; and, for an op that needs it
    otherwise, as a copy that all later readers share, unless the value is ``alone``. Before a call,
    all copies that are missing are made at once; after it, all results are brought elsewhere.
    """

    ops: tuple[Op, ...]
    given: Mapping[int, Placing]
    moves: Mapping[Hashable, Mapping[tuple[Placing, Placing], Price]]
    kinds: Mapping[int, Hashable]
    fixed: frozenset[int] = frozenset()
    sizes: Mapping[Hashable, Mapping[Placing, int]] = field(default_factory=dict)
    kept: frozenset[int] = frozenset()
    within: Mapping[int, int] = field(default_factory=dict)
    alone: frozenset[int] = frozenset()
    free: tuple[FreeValues, ...] = ()
    shared: Callable[[Sequence[ValueMove]], Price] | None = None

    def at_once(self, moves: Sequence[ValueMove]) -> Price:
        """The price of moves that run at once."""
        price = Price()
        for kind, source, target in moves:
            price = price.plus(self.moves[kind][source, target])
        return price.minus(self.shared(moves)) if self.shared and len(moves) > 1 else price

    def received(self, value: int, before: Placing, after: Placing) -> int:
        """The bytes of bringing a value from one placing to another."""
        return 0 if before == after else self.moves[self.kinds[value]][before, after].received


@dataclass(frozen=True)
class Solved:
    """How a program runs at the least price.

    Attributes:
        ways: for each op the number of its way.
        lies: for each value how it lies after it is made, and brought elsewhere if it is.
        made: for each value that an op makes, how the op makes it.
        price: of all.
        weight: of ``price``, as :func:`solve` weighs it.
        least: no choice has a lower one: equal to it if this is the optimum. (Of single ops, which
            take few copies each, as if these travelled one by one.)
        peak: the bytes that the fullest device holds at most, of all values at once.
    """

    ways: tuple[int, ...]
    lies: Mapping[int, Placing]
    made: Mapping[int, Placing]
    price: Price
    least: float
    weight: float
    peak: int = 0
