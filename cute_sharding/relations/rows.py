"""The rows of one tensor dim as an exchange numbers them, and the rows that a device holds.

A movement op maps the rows of a dim by pieces: output row j is input row a·j + b on an interval.
Such a map is a *relation*, a list of :class:`Run`, and so are the rows that a device holds
(sharding/meeting.py). The mapped rows that a device has are the meeting of the two, again strided
runs, whatever the number of rows. A descending map (flip) is an ascending one on rows that are
numbered from the end. :mod:`.forms` has the maps in which several rows of a tensor stand for one of
the exchange, or in which two of its dims share rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cute_sharding._memory import remembered
from cute_sharding.relations.elements import on_both_sides
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
    """How the rows of a tensor's dim map to the rows of an exchange.

    Attributes:
        dim: the tensor's dim; None: no dim, and the exchange has one row, which all devices have.
        runs: x in the exchange, y in the tensor; None: the same.
        backward: the tensor's rows are numbered from the last (in ``runs`` too), also on a device.
        form: another map from the tensor's rows to the exchange's. A device then has each row of
            the exchange once, at y.

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
        """The tensor's dims that give the exchange's rows."""
        own = () if self.dim is None else (self.dim,)
        across = None if self.form is None else getattr(self.form, "across", None)
        return own if across is None else (*own, across)

    @property
    def is_plain(self) -> bool:
        """Whether the exchange's rows are the dim's, one for one and in order."""
        dim, runs, backward, form = self
        return dim is not None and runs is None and form is None and not backward


@remembered
def held_rows(rows: Rows, n: tuple[int, ...], chain: tuple[Any, ...]) -> Runs:
    """The rows of the exchange that a device holds: x in the exchange, y on the device.

    Args:
        n: the number of rows of each of the tensor's dims (``rows.dims``).
        chain: for each of them, how it is cut, with the device's coordinates.
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


@remembered
def needed_rows(
    source: Rows, of: tuple[int, ...], target: Rows, n: tuple[int, ...], chain: tuple[Any, ...]
) -> Runs:
    """:func:`held_rows` of the target, without rows that the source does not have (these are filled
    in). ``of``: the number of rows of the source's dims.
    """
    whole = held_rows(source, of, ((),) * len(of))
    return tuple(join(meet_on_x(list(map(on_both_sides, whole)), held_rows(target, n, chain))))


@remembered
def common_rows(
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
    """The same rows numbered from the last of ``n``; on the device, from the last of ``count``."""
    last = run.y + run.length + sum((c - 1) * dy for c, _, dy in run.loops)
    return Run(n - run.reach, count - last, run.loops, run.length)
