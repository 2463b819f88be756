"""Runs a movement on local tensors: at most one all-to-all, and copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch

from cute_sharding._memory import remembered
from cute_sharding.dtensor.replaced import communication, observing
from cute_sharding.dtensor.run.groups import (
    all_on_each_rank,
    dims_of_group,
    group_of,
    numbers,
    on_each_rank,
    only_rank,
    place,
)
from cute_sharding.dtensor.run.packing import (
    begin,
    complete,
    exchange_messages,
    exchange_of_this_rank,
    from_wire,
    make_of_pieces,
    own_view,
    unpack,
)
from cute_sharding.exchange import Exchange, Part
from cute_sharding.exchange.exchange import is_view, keeps, slices
from cute_sharding.exchange.flow import Side, side_of
from cute_sharding.relations.moves import Diagonal, Fold, Rows, Window, held_rows
from cute_sharding.sharding.rows import Runs, count_rows, rows_held

# -- windows ---------------------------------------------------------------------------------------
# What a device computes alone if rows of a tensor are not the rows of the exchange one for one
# (relations/moves.py): windows, folds and diagonals, and their sums back to the rows; triangles of
# matrices of which it has some rows and columns.


def collapse(local: torch.Tensor, rows: Rows, side: Side) -> torch.Tensor:
    """An operand's local tensor with the exchange's rows: for windows and folds the sum of their
    rows, for a diagonal its elements (a view if the device has consecutive rows and columns).
    """
    assert rows.dim is not None and rows.form is not None
    return _COLLAPSED[type(rows.form)](local, rows, side)


def expand(local: torch.Tensor, rows: Rows, side: Side) -> torch.Tensor:
    """A result's local tensor from the exchange's rows: windows (a view if they begin one step
    apart), folds, or a diagonal among zeros.
    """
    assert rows.dim is not None and rows.form is not None
    return _EXPANDED[type(rows.form)](local, rows, side)


def _held(side: Side) -> list[Runs]:
    return list(map(rows_held, side.sizes, side.chains))


def places_of(wanted: torch.Tensor, runs: Runs) -> torch.Tensor:
    """The local positions of the rows with these numbers, on a device with the rows ``runs``."""
    numbers, order = numbers_of(runs, wanted.device).sort()
    return order[torch.searchsorted(numbers, wanted)]


# -- windows, and folds ----------------------------------------------------------------------------


def _of_windows(rows: torch.Tensor, of: Rows, side: Side) -> torch.Tensor:
    assert of.dim is not None and isinstance(of.form, Window)
    if of.form.across is None:  # the rows stay side by side
        return rows
    dim, window, (windows, within) = of.dim, of.form, _held(side)
    counts = count_rows(windows), count_rows(within)
    if 0 in counts:
        return rows.new_empty((*rows.shape[:dim], counts[0], *rows.shape[dim + 1 :], counts[1]))
    step = window.evenly(windows, within)
    if step is not None:
        return rows.unfold(dim, counts[1], step)
    index = _index_of_windows(windows, within, window, held_rows(of, *side), rows.device)
    taken = rows.index_select(dim, index.reshape(-1))
    return taken.unflatten(dim, tuple(index.shape)).movedim(dim + 1, -1).contiguous()


def _sum_of_windows(local: torch.Tensor, of: Rows, side: Side) -> torch.Tensor:
    assert of.dim is not None and isinstance(of.form, Window)
    if of.form.across is None:
        return local
    dim, window, (windows, within) = of.dim, of.form, _held(side)
    shape = list(local.shape[:-1])
    shape[dim] = count_rows(held_rows(of, *side))
    if 0 in local.shape:
        return local.new_zeros(shape)
    step = window.evenly(windows, within)
    if step is not None:
        return torch.ops.aten.unfold_backward(local, shape, dim, count_rows(within), step)
    index = _index_of_windows(windows, within, window, held_rows(of, *side), local.device)
    flat = local.movedim(-1, dim + 1).flatten(dim, dim + 1)
    return local.new_zeros(shape).index_add_(dim, index.reshape(-1), flat)


def _index_of_windows(
    windows: Runs, within: Runs, window: Window, rows: Runs, device: torch.device
) -> torch.Tensor:
    """For each window, the local positions of its rows."""
    numbers = numbers_of(windows, device).unsqueeze(-1) * window.step + numbers_of(within, device)
    return places_of(numbers, rows)


def _index_of_fold(of: Rows, side: Side, device: torch.device) -> torch.Tensor:
    """For each row of a fold, the local position of the row that it is taken from."""
    assert isinstance(of.form, Fold)
    numbers = numbers_of(_held(side)[0], device)
    found = torch.zeros_like(numbers)
    for start, stop, a, b in of.form.pieces:
        found = torch.where((numbers >= start) & (numbers < stop), numbers * a + b, found)
    return places_of(found, held_rows(of, *side))


def _of_fold(rows: torch.Tensor, of: Rows, side: Side) -> torch.Tensor:
    assert of.dim is not None
    return rows.index_select(of.dim, _index_of_fold(of, side, rows.device))


def _sum_of_fold(local: torch.Tensor, of: Rows, side: Side) -> torch.Tensor:
    assert of.dim is not None
    shape = list(local.shape)
    shape[of.dim] = count_rows(held_rows(of, *side))
    index = _index_of_fold(of, side, local.device)
    return local.new_zeros(shape).index_add_(of.dim, index, local)


# -- diagonals, and triangles ----------------------------------------------------------------------


def _offset(form: Diagonal, side: Side) -> int | None:
    """The number of the diagonal in the local tensor; None if the device's rows have gaps."""
    firsts = []
    for some in _held(side):
        if len(some) > 1 or any(run.loops for run in some):
            return None
        firsts.append(some[0].x if some else 0)
    return form.right - form.down + firsts[0] - firsts[1]


def _crossings(of: Rows, side: Side, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The local positions of a diagonal's elements, in both dims."""
    assert isinstance(of.form, Diagonal)
    numbers = numbers_of(held_rows(of, *side), device)
    rows, columns = _held(side)
    return places_of(numbers + of.form.down, rows), places_of(numbers + of.form.right, columns)


def _of_diagonal(local: torch.Tensor, of: Rows, side: Side) -> torch.Tensor:
    assert of.dim is not None and isinstance(of.form, Diagonal)
    place = of.dim - (of.form.across < of.dim)
    offset = _offset(of.form, side)
    if offset is not None:
        return local.diagonal(offset, of.dim, of.form.across).movedim(-1, place)
    matrices = local.movedim((of.dim, of.form.across), (0, 1))
    return matrices[_crossings(of, side, local.device)].movedim(0, place)


def _into_diagonal(rows: torch.Tensor, of: Rows, side: Side) -> torch.Tensor:
    assert of.dim is not None and isinstance(of.form, Diagonal)
    place = of.dim - (of.form.across < of.dim)
    sizes = [count_rows(some) for some in _held(side)]
    elements = rows.movedim(place, 0)
    result = rows.new_zeros((*sizes, *elements.shape[1:]))
    offset = _offset(of.form, side)
    if offset is not None:
        result.diagonal(offset).copy_(elements.movedim(0, -1))
    else:
        result[_crossings(of, side, rows.device)] = elements
    return result.movedim((0, 1), (of.dim, of.form.across)).contiguous()


def put_diagonal(local: torch.Tensor, elements: torch.Tensor, of: Rows, side: Side) -> None:
    """Write the elements of a diagonal, from :func:`collapse`, to their places. If they are a view
    of the local tensor, nothing is left to do.
    """
    assert of.dim is not None and isinstance(of.form, Diagonal)
    if _offset(of.form, side) is None:
        place = of.dim - (of.form.across < of.dim)
        matrices = local.movedim((of.dim, of.form.across), (0, 1))
        matrices[_crossings(of, side, local.device)] = elements.movedim(place, 0)


def triangle_of(
    matrices: torch.Tensor, is_lower: bool, diagonal: int, rows: Runs, columns: Runs
) -> torch.Tensor:
    """The tril or triu of matrices of which a device has these rows and columns."""
    if all(len(some) <= 1 and not any(run.loops for run in some) for some in (rows, columns)):
        below = (rows[0].x if rows else 0) - (columns[0].x if columns else 0)
        return (matrices.tril if is_lower else matrices.triu)(diagonal + below)
    above = numbers_of(columns, matrices.device) - numbers_of(rows, matrices.device).unsqueeze(-1)
    return matrices.masked_fill(above > diagonal if is_lower else above < diagonal, 0)


def numbers_of(rows: Runs, device: torch.device) -> torch.Tensor:
    """The global number of each row, in the device's order."""
    numbers = torch.empty(count_rows(rows), dtype=torch.int64, device=device)
    for run in rows:
        x, y = (torch.full((), start, device=device) for start in (run.x, run.y))
        for count, dx, dy in (*run.loops, (run.length, 1, 1)):
            turns = torch.arange(count, device=device)
            x, y = x.unsqueeze(-1) + turns * dx, y.unsqueeze(-1) + turns * dy
        numbers[y.reshape(-1)] = x.reshape(-1)
    return numbers


_Local = Callable[[torch.Tensor, Rows, Side], torch.Tensor]
_COLLAPSED: dict[type, _Local] = {
    Window: _sum_of_windows,
    Fold: _sum_of_fold,
    Diagonal: _of_diagonal,
}
_EXPANDED: dict[type, _Local] = {Window: _of_windows, Fold: _of_fold, Diagonal: _into_diagonal}


# -- moving ----------------------------------------------------------------------------------------
# Runs a movement on local tensors: at most one all-to-all, and copies.


@dataclass(frozen=True, eq=False)
class Movement:
    """A map from the operands' local tensors to the results'.

    Attributes:
        exchange: from the operands' placements to the results'.
        mesh: the DeviceMesh.
        dims: the mesh dims whose ranks exchange rows.
        pending: the pending reductions, by mesh dim.
    """

    exchange: Exchange
    mesh: Any
    dims: tuple[int, ...]
    pending: tuple[tuple[int, str], ...] = ()

    @classmethod
    def on(
        cls, exchange: Exchange, mesh: Any, pending: tuple[tuple[int, str], ...] = ()
    ) -> Movement | None:
        """The movement on a mesh; None if the ranks that exchange have no common group."""
        dims = dims_of_group(mesh, exchange.mesh_dims)
        return None if dims is None else cls(exchange, mesh, dims, pending)

    # -- without communication ---------------------------------------------------------------------

    @cached_property
    def _is_viewed(self) -> bool:
        """Whether the results are views on each device, and a write to one reaches all devices that
        have the rows (it does not if results are parts of replicas).
        """
        if self.dims or not is_view(self.exchange):
            return False
        outputs = range(len(self.exchange.targets))
        return not any(_turn(self.exchange, k).communicates for k in outputs)

    def views(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """The results' local tensors as views of the operand's; None if they are no views."""
        if not self._is_viewed:
            return None

        def view(rank: int, x: torch.Tensor, k: int) -> torch.Tensor:
            return self._finished(_slice(x, self.exchange, k, place(self.mesh, rank)), k, rank)

        return [
            on_each_rank(lambda rank, x, k=k: view(rank, x, k), operands[0])
            for k in range(len(self.exchange.move.outputs))
        ]

    # -- with copies -------------------------------------------------------------------------------

    @cached_property
    def _part(self) -> Callable[[int], Part]:
        """Each rank's part."""
        return cache(lambda rank: self.exchange.part(*numbers(self.mesh, rank, self.dims)))

    def __call__(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results' local tensors, in memory of their own."""
        operands = self._all_prepared(operands)
        rank = only_rank()
        if rank is not None:
            return self._moved_alone(rank, operands)
        received = self.received(operands)
        return all_on_each_rank(self._results, received, *operands)

    def start(
        self, operands: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor | None], Callable[[], list[torch.Tensor]]]:
        """Send what others need, and copy what this rank keeps, in a program that is not traced.

        Returns:
            for each result its memory, if it has all but the rows of others, else None; and a
            function that waits for these rows and gives the results. The operands may change before
            it is called.
        """
        operands = self._all_prepared(operands)
        rank, dtype, adds = communication.this_rank(), operands[0].dtype, self.exchange.move.adds
        received = self.received(operands, async_op=True)
        part, every = self._part(rank), range(len(self.exchange.move.outputs))
        fills = [self._fill(rank) if part.filled[k] else 0 for k in every]
        begun = [begin(part, k, operands, fill=fills[k], adds=adds) for k in every]

        def results() -> list[torch.Tensor]:
            got = from_wire(communication.wait_for(received), dtype)
            for k in every:
                if part.unpacks[k] is None:
                    begun[k] = got.view(part.target_shape(k))
                complete(part, k, got, begun[k], adds=adds)
            return [self._finished(x, k, rank) for k, x in enumerate(begun)]

        is_known = [self._is_as_it_is[k] and part.unpacks[k] is not None for k in every]
        return [x if known else None for x, known in zip(begun, is_known)], results

    def _all_prepared(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        dtype = operands[0].dtype
        for x in operands[1:]:
            dtype = torch.promote_types(dtype, x.dtype)
        return [
            x
            if self._is_as_numbered(x, i, dtype)
            else on_each_rank(lambda rank, local, i=i: self._prepared(local, i, rank, dtype), x)
            for i, x in enumerate(operands)
        ]

    @cached_property
    def _back(self) -> Callable[[int], Movement]:
        """The movement from a single result back to the operand."""

        def back(output: int) -> Movement:
            found = Movement.on(_turn(self.exchange, output), self.mesh)
            assert found is not None, "asked when the results' placements were chosen"
            return found

        return cache(back)

    def turned(self, output: int) -> Movement:
        """The movement from a single result back to the operand."""
        return self._back(output)

    def back(self, output: int, moved: torch.Tensor, source: torch.Tensor) -> None:
        """Write the rows of one result, ``moved``, back to ``source``, the operand's local tensor;
        its other rows stay. All ranks together.
        """
        self.start_back(output, moved, source)()

    def start_back(
        self, output: int, moved: torch.Tensor, source: torch.Tensor, *, async_op: bool = False
    ) -> Callable[[], None]:
        """As :meth:`back`, up to the start of the collective, which may go on with ``async_op``;
        and a function that waits for it and writes.
        """
        back = self.turned(output)
        received = back.received([moved], async_op=async_op)
        return lambda: back._write(communication.wait_for(received), moved, source)

    def received(self, operands: Sequence[torch.Tensor], *, async_op: bool = False) -> torch.Tensor:
        """The receive buffer, which may not have arrived with ``async_op``; any tensor if nothing
        is received.
        """
        if not self.dims:
            return operands[0]
        group = group_of(self.mesh, self.dims)
        with self._told(operands[0]):
            return exchange_messages(self._part, operands, group, async_op=async_op)

    def _told(self, operand: torch.Tensor) -> AbstractContextManager[Any]:
        """A context in which observers see what the busiest rank receives."""
        exchange, itemsize = self.exchange, operand.element_size()
        return observing.exchange(lambda: exchange.received_elements * itemsize)

    def _write(self, received: torch.Tensor, operand: torch.Tensor, target: torch.Tensor) -> None:
        """Write the operand's rows, own and received ones, to the single result's existing local
        tensor; its other rows stay.
        """

        def put(
            rank: int, received: torch.Tensor, x: torch.Tensor, into: torch.Tensor
        ) -> torch.Tensor:
            part, whole = self._part(rank), into
            if into.is_conj() or into.is_neg():
                whole = into.resolve_conj().resolve_neg()
            lies, diagonal = whole, self._diagonal
            side = diagonal and side_of(self.exchange.targets[0], diagonal, place(self.mesh, rank))
            if diagonal and side:
                lies = collapse(whole, diagonal, side)
            unpack(part, 0, from_wire(received, lies.dtype), [x], into=lies)
            if diagonal and side:
                put_diagonal(whole, lies, diagonal, side)
            return into if whole is into else into.copy_(whole)

        on_each_rank(put, received, operand, target)

    @property
    def _diagonal(self) -> Rows | None:
        """The rows of the single result if they are a diagonal of it."""
        pairs = (pair for link in self.exchange.move.links for pair in link.pairs)
        return next((rows for _, rows in pairs if isinstance(rows.form, Diagonal)), None)

    @cached_property
    def _collapsed(self) -> tuple[tuple[Rows, ...], ...]:
        """For each operand, the rows that are not the rows of the exchange one for one."""
        found = []
        for i in range(len(self.exchange.sources)):
            links = [link for link in self.exchange.move.links if link.source == i]
            pairs = links[0].pairs if links else ()
            found.append(tuple([rows for rows, _ in pairs if rows.form is not None]))
        return tuple(found)

    def _is_as_numbered(self, x: torch.Tensor, i: int, dtype: torch.dtype) -> bool:
        """Whether the operand is a plain tensor that needs nothing of :meth:`_prepared`."""
        is_plain = type(x) is torch.Tensor and x.dtype == dtype and not self._collapsed[i]
        return is_plain and not (x.is_conj() or x.is_neg())

    def _prepared(self, local: torch.Tensor, i: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
        """The operand in the results' dtype, with its rows as the exchange numbers them."""
        if local.is_conj() or local.is_neg():
            local = local.resolve_conj().resolve_neg()
        local = local if local.dtype == dtype else local.to(dtype)
        for rows in self._collapsed[i]:
            side = side_of(self.exchange.sources[i], rows, place(self.mesh, rank))
            local = collapse(local, rows, side)
        return local

    def _moved_alone(self, rank: int, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's local tensors of the results, in a program that is not traced. Send buffer
        and results are mostly concatenations of pieces.
        """
        part = self._part(rank)
        *pieces, sent = part.joined(*[x.stride() for x in operands])
        received = operands[0]
        if self.dims:
            with self._told(received):
                group = group_of(self.mesh, self.dims)
                received = exchange_of_this_rank(part, operands, sent, group)
        received = from_wire(received, operands[0].dtype)
        is_view = self.exchange.move.is_view
        return [
            self._result(rank, k, received, operands)
            if some is None or not is_view
            else self._finished(make_of_pieces(some, received, operands), k, rank)
            for k, some in enumerate(pieces)
        ]

    def _results(
        self, rank: int, received: torch.Tensor, *operands: torch.Tensor
    ) -> list[torch.Tensor]:
        received = from_wire(received, operands[0].dtype)
        every = range(len(self.exchange.move.outputs))
        return [self._result(rank, k, received, operands) for k in every]

    def _result(
        self, rank: int, k: int, received: torch.Tensor, operands: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """This rank's local tensor of a result."""
        part, move = self._part(rank), self.exchange.move
        own = None if move.adds else own_view(part, k, operands)
        if own is None:
            fill = self._fill(rank) if part.filled[k] else 0
            found = unpack(part, k, received, operands, fill=fill, adds=move.adds)
            return self._finished(found, k, rank)
        result = self._finished(own.clone() if move.is_view else own, k, rank)
        return result.clone() if result is own else result

    def _fill(self, rank: int) -> Any:
        """The value of filled rows on a device: if a reduction is pending, such that the devices'
        values reduce to the fill.
        """
        fill = 0 if self.exchange.move.adds else self.exchange.move.fill
        for m, op in self.pending:
            if op in ("sum", "product") and place(self.mesh, rank)[m]:
                fill = 0 if op == "sum" else 1
        return fill

    @cached_property
    def _expanded(self) -> tuple[tuple[tuple[Rows, ...], tuple[int, ...]], ...]:
        """For each result, the rows that are not the rows of the exchange one for one, and the dims
        in which rows are reversed.
        """
        found = []
        for k in range(len(self.exchange.targets)):
            links = [link for link in self.exchange.move.links if link.target == k]
            every = [rows for link in links for _, rows in link.pairs]
            backward = [rows.dim for rows in every if rows.backward and rows.dim is not None]
            forms = tuple([rows for rows in every if rows.form is not None])
            found.append((forms, tuple(backward)))
        return tuple(found)

    @cached_property
    def _is_as_it_is(self) -> tuple[bool, ...]:
        """For each result, whether :meth:`_finished` has nothing to do."""
        if self.exchange.move.triangle is not None:
            return (False,) * len(self.exchange.targets)
        return tuple([not (forms or backward) for forms, backward in self._expanded])

    def _finished(self, target: torch.Tensor, k: int, rank: int) -> torch.Tensor:
        """The result after windows are taken, reversed rows turned, or triangles cut out."""
        if self._is_as_it_is[k]:
            return target
        if self.exchange.move.triangle is not None:
            onto, device = self.exchange.targets[k], place(self.mesh, rank)
            held, across = map(rows_held, onto.shape[-2:], onto.held_on(device)[-2:])
            return triangle_of(target, *self.exchange.move.triangle, held, across)
        forms, backward = self._expanded[k]
        for rows in forms:
            side = side_of(self.exchange.targets[k], rows, place(self.mesh, rank))
            target = expand(target, rows, side)
        return target.flip(backward) if backward else target


def _slice(x: torch.Tensor, exchange: Exchange, k: int, device: tuple[int, ...]) -> torch.Tensor:
    """The part of its own local tensor that a device needs, as slices of the dims."""
    gone = 0
    steps = slices(exchange, k, device)
    assert steps is not None
    (link,) = [link for link in exchange.move.links if link.target == k]
    for rows, _ in link.pairs:
        if rows.form is not None:
            x = collapse(x, rows, side_of(exchange.sources[link.source], rows, device))
    for d, (first, count, step, is_kept) in enumerate(steps):
        at = d - gone
        if keeps(exchange, link, d):
            continue
        if not is_kept:
            x, gone = x.select(at, first), gone + 1
        elif (first, count, step) != (0, x.shape[at], 1):
            last = first + max(count - 1, 0) * step
            x = x.narrow(at, first, last + 1 - first if count else 0)
            x = x if step == 1 else x[(slice(None),) * at + (slice(None, None, step),)]
    onto = [target.dim for _, target in link.pairs if target.dim is not None]
    return x if onto == sorted(onto) else x.permute([onto.index(d) for d in sorted(onto)])


@remembered
def _turn(exchange: Exchange, output: int) -> Exchange:
    """The exchange from one result back to the operand."""
    return exchange.of_result(output).turned()


@remembered
def comes_back(exchange: Exchange, mesh: Any) -> bool:
    """Whether writes to the results can be moved back to the operand: the ranks have a common
    process group. If results shard replicas, these are more ranks than those of ``exchange``.
    """
    back = [_turn(exchange, k) for k in range(len(exchange.targets))]
    return all(Movement.on(each, mesh) is not None for each in back)
