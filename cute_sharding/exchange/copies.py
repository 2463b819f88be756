"""Strided copies between a tensor and a buffer, or two tensors: loops with a step on
either side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

from cute_sharding._memory import remembered
from cute_sharding.layout.layout import row_major
from cute_sharding.relations.moves import Link
from cute_sharding.sharding.meeting import Run, turns_of_loops

# A position in a tensor, or a step: rows of each dim. A flat buffer is a tensor of one dim.
Vector: TypeAlias = "tuple[int, ...]"


class Copy(NamedTuple):
    """``y[y_start + sum(i * dy)] = x[x_start + sum(i * dx)]`` for every index i of ``sizes``."""

    sizes: tuple[int, ...]
    x: Vector
    dx: tuple[Vector, ...]
    y: Vector
    dy: tuple[Vector, ...]

    @property
    def flipped(self) -> Copy:
        """The copy from y to x."""
        return Copy(self.sizes, self.y, self.dy, self.x, self.dx)


def flat(vector: Vector, strides: Sequence[int]) -> int:
    """A position or a step in elements, by the strides of the tensor's dims."""
    return sum([rows * stride for rows, stride in zip(vector, strides)])


def copy_of(link: Link, runs: Sequence[Run]) -> Copy:
    """The copy from a link's source to its target of the box of one run of each dim."""
    source, target = (_by_dim([pair[side].dim for pair in link.pairs]) for side in (0, 1))
    loops = [
        (d, *loop)
        for d, run in enumerate(runs)
        for loop in (*run.loops, (run.length, 1, 1))
        if loop[0] != 1
    ]

    def step(d: int, rows: int, dims: Sequence[int]) -> Vector:
        return tuple([rows if i == d else 0 for i in dims])

    return Copy(
        tuple([n for _, n, _, _ in loops]),
        tuple([runs[d].x for d in source]),
        tuple([step(d, dx, source) for d, _, dx, _ in loops]),
        tuple([runs[d].y for d in target]),
        tuple([step(d, dy, target) for d, _, _, dy in loops]),
    )


def _by_dim(dims: Sequence[int | None]) -> list[int]:
    """The indices of the dims, sorted by dim; None is left out."""
    return [i for _, i in sorted([(d, i) for i, d in enumerate(dims) if d is not None])]


def pack_copy(copy: Copy, at: int) -> Copy:
    """The same elements of x, to consecutive positions of a flat buffer from ``at`` on."""
    steps, below = [], 1
    for size in reversed(copy.sizes):
        steps.append((below,))
        below *= size
    return Copy(copy.sizes, copy.x, copy.dx, (at,), tuple(reversed(steps)))


def as_it_lies(copy: Copy, shape: tuple[int, ...], at: int) -> Copy:
    """The same elements of x, to a flat buffer that has the elements of y, a tensor of that shape,
    row-major from ``at`` on.
    """
    strides = row_major(shape)
    steps = tuple([(flat(step, strides),) for step in copy.dy])
    return Copy(copy.sizes, copy.x, copy.dx, (at + flat(copy.y, strides),), steps)


def fold(copies: Sequence[Copy]) -> list[Copy]:
    """The same copies, to places that do not overlap, as fewer copies: those of one form that are a
    step apart become turns of a loop.
    """
    before, after = list(copies), _fold_once(copies)
    while len(after) < len(before):
        before, after = after, _fold_once(after)
    return after


def _fold_once(copies: Sequence[Copy]) -> list[Copy]:
    # If sizes do not divide, whole and short blocks alternate, so each form is folded by itself.
    forms: dict[tuple[Any, ...], list[Copy]] = {}
    for copy in copies:
        forms.setdefault((copy.sizes, copy.dx, copy.dy), []).append(copy)
    return [loop for alike in forms.values() for loop in _loops(alike)]


def _loops(alike: Sequence[Copy]) -> Iterator[Copy]:
    for first, count, step in turns_of_loops(alike, _step_of_copies):
        yield (
            first
            if step is None
            else Copy(
                (count, *first.sizes), first.x, (step[0], *first.dx), first.y, (step[1], *first.dy)
            )
        )


def _step_of_copies(last: Copy, following: Copy) -> tuple[Vector, Vector] | None:
    delta = (minus(following.x, last.x), minus(following.y, last.y))
    # torch has no negative strides.
    return None if any(rows < 0 for vector in delta for rows in vector) else delta


def minus(a: Vector, b: Vector) -> Vector:
    return tuple([p - q for p, q in zip(a, b)])


@remembered
def fills(copies: tuple[Copy, ...], shape: tuple[int, ...]) -> bool:
    """Whether there is one copy, and it fills a tensor y of that shape from its first element to
    its last.
    """
    if len(copies) != 1 or prod(copies[0].sizes) != prod(shape):
        return False
    return run_of([copies[0].flipped], row_major(shape)) == 0


def in_place(copies: Sequence[Copy], strides: Sequence[int]) -> bool:
    """Whether every element of x, flat by ``strides``, is copied to the same position of the buffer
    y: then x can be used as the buffer.
    """
    return all(
        flat(copy.x, strides) == copy.y[0]
        and all(flat(a, strides) == b[0] for a, b in zip(copy.dx, copy.dy))
        for copy in copies
    )


def run_of(copies: Sequence[Copy], strides: Sequence[int]) -> int | None:
    """The start of the copied elements of x, one copy after the other, as one run in a tensor of
    these strides; None: they are no run.

    >>> rows = Copy((2, 3), (1, 0), ((1, 0), (0, 1)), (0,), ((3,), (1,)))
    >>> run_of([rows], (3, 1)), run_of([rows], (4, 1))
    (3, None)
    """
    start = at = flat(copies[0].x, strides)
    for copy in copies:
        below = 1
        for size, step in zip(reversed(copy.sizes), reversed(copy.dx)):
            if flat(step, strides) != below:
                return None
            below *= size
        if flat(copy.x, strides) != at:
            return None
        at += below
    return start


def cut_up(copy: Copy, most: int) -> Iterator[Copy]:
    """The same copy, in its order, as copies of at most ``most`` elements.

    >>> rows = Copy((2, 3), (0,), ((3,), (1,)), (0,), ((3,), (1,)))
    >>> [(piece.sizes, piece.x) for piece in cut_up(rows, 2)]
    [((2,), (0,)), ((1,), (2,)), ((2,), (3,)), ((1,), (5,))]
    """
    if prod(copy.sizes) <= most:
        yield copy
        return
    (first, *rest), inner = copy.sizes, prod(copy.sizes[1:])
    together = max(most // inner, 1)
    for k in range(0, first, together):
        x, y = _onward(copy.x, copy.dx[0], k), _onward(copy.y, copy.dy[0], k)
        if inner > most:
            yield from cut_up(Copy(tuple(rest), x, copy.dx[1:], y, copy.dy[1:]), most)
        else:
            yield Copy((min(together, first - k), *rest), x, copy.dx, y, copy.dy)


def _onward(start: Vector, step: Vector, times: int) -> Vector:
    return tuple([a + times * b for a, b in zip(start, step)])
