"""The rows of one tensor dim as an exchange numbers them, and those of them that a device holds.

A movement op maps the rows of a dim by pieces: output row j is input row a·j + b on an interval.
Such a map is a *relation*, a list of :class:`Run`, as are the rows that a device holds
(sharding/meeting.py): so what a device has of the mapped rows is their meeting, in strided
runs again, whatever the number of rows. A map that runs downward (flip) is one that runs upward on
rows that are numbered from the end. Where several rows of a tensor stand for one of the exchange,
or two of its dims are about the same rows, see :mod:`.forms`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from cute_sharding.relations.elements import alone
from cute_sharding.relations.forms import Form
from cute_sharding.sharding.meeting import (
    Run,
    Runs,
    count_rows,
    join,
    meet_on_x,
    rows_held,
)

ALONE: Runs = (Run(0, 0, (), 1),)


class Rows(NamedTuple):
    """How the rows of an exchange are those of a tensor's dim.

    Attributes:
        dim: the tensor's dim; None: it has none, and the exchange one row, which all devices have.
        runs: x in the exchange, y in the tensor; None: the same.
        backward: the tensor's rows are numbered from the last (in ``runs`` too), and lie so on a
            device.
        form: how else the tensor's rows stand for those of the exchange, each of which then
            lies on a device once, where y says.

    >>> from cute_sharding.relations.rows import held_rows
    >>> from cute_sharding.sharding.meeting import Run
    >>> shifted = Rows(0, (Run(0, 1, (), 7),))  # row j of the exchange is row j + 1 of eight
    >>> held_rows(shifted, (8,), (((1, 2, 1),),))  # on the second of two devices
    (Run(x=3, y=0, loops=(), length=4),)
    """

    dim: int | None
    runs: Runs | None = None
    backward: bool = False
    form: Form | None = None

    @property
    def dims(self) -> tuple[int, ...]:
        """The tensor's dims that the exchange's rows are made of."""
        own = () if self.dim is None else (self.dim,)
        across = None if self.form is None else getattr(self.form, "across", None)
        return own if across is None else (*own, across)

    @property
    def is_plain(self) -> bool:
        """Whether the exchange's rows are those of the dim, one for one and in order."""
        dim, runs, backward, form = self
        return dim is not None and runs is None and form is None and not backward


@lru_cache(maxsize=1 << 14)
def held_rows(rows: Rows, n: tuple[int, ...], chain: tuple[Any, ...]) -> Runs:
    """What a device holds of the exchange's rows: x in the exchange, y on the device.

    Args:
        n: the rows of each of the tensor's dims (``rows.dims``).
        chain: for each of them how these are cut, with the device's coordinates.
    """
    if rows.dim is None:
        return ALONE
    if rows.form is not None:
        return rows.form.held(n, chain)
    found = rows_held(n[0], chain[0])
    if rows.backward:
        found = tuple(join([_turned(run, n[0], count_rows(found)) for run in found]))
    if rows.runs is None:
        return found
    return tuple(join(meet_on_x([run.flipped() for run in rows.runs], found)))


@lru_cache(maxsize=1 << 14)
def needed_rows(
    source: Rows, of: tuple[int, ...], target: Rows, n: tuple[int, ...], chain: tuple[Any, ...]
) -> Runs:
    """:func:`held_rows` of the target, but for rows that are no row of the source, dims of ``of``
    rows: what comes from nowhere is filled in.
    """
    whole = held_rows(source, of, ((),) * len(of))
    return tuple(join(meet_on_x(list(map(alone, whole)), held_rows(target, n, chain))))


@lru_cache(maxsize=1 << 14)
def between(
    source: Rows,
    of: tuple[int, ...],
    had: tuple[Any, ...],
    target: Rows,
    n: tuple[int, ...],
    wanted: tuple[Any, ...],
) -> Runs:
    """The rows that one device holds and another needs: x on the one, y on the other."""
    return tuple(join(meet_on_x(held_rows(source, of, had), held_rows(target, n, wanted))))


def _turned(run: Run, n: int, count: int) -> Run:
    """The same rows, numbered from the last of ``n``; on the device, from the last of ``count``."""
    last = run.y + run.length + sum((c - 1) * dy for c, _, dy in run.loops)
    return Run(n - run.reach, count - last, run.loops, run.length)
