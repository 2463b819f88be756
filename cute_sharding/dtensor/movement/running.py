"""Running a movement on local tensors: one all-to-all at the most, and copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from typing import Any

import torch

from cute_sharding.dtensor.bookkeeping import watching
from cute_sharding.dtensor.compiled.library import after
from cute_sharding.dtensor.movement.together import result_of
from cute_sharding.dtensor.movement.windows import (
    collapsed,
    expanded,
    put_diagonal,
    triangle_of,
)
from cute_sharding.dtensor.replaced import (
    collective_ops,
    dispatch,
    dispatch_modes,
    process_groups,
)
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec, Placement, Replicate
from cute_sharding.dtensor.run.executor import all_to_all
from cute_sharding.dtensor.run.groups import dims_of_group, group_of
from cute_sharding.dtensor.run.lists import Wanted, redistribute_all
from cute_sharding.dtensor.run.order import laid_out
from cute_sharding.dtensor.run.packing import (
    from_wire,
    own_view,
    packed,
    to_wire,
    unpacked,
)
from cute_sharding.dtensor.run.ranks import all_on_each_rank, on_each_rank, peers, place
from cute_sharding.exchange import Exchange, Part
from cute_sharding.exchange.meetings import side_of
from cute_sharding.exchange.slices import is_view, keeps, slices
from cute_sharding.relations.forms import Diagonal
from cute_sharding.relations.rows import Rows
from cute_sharding.sharding.meeting import rows_held


@dataclass(frozen=True, eq=False)
class Runner:
    """What stands in for the local form of a movement op: called with the op's arguments, in which
    local tensors stand for DTensors.

    Attributes:
        exchange: from the operands' placements to the results'.
        mesh: the DeviceMesh.
        dims: the mesh dims whose ranks exchange.
        specs: of the operands.
        placements: to which these are brought first.
        pending: the reduction that is pending on mesh dims.
        name: of the op.
        note: where its results are views: is told of those that are copies, as ``note(runner, local
            tensor, results)``.
        metas: of the results, which lie in the order of their strides; none: row by row.
    """

    exchange: Exchange
    mesh: Any
    dims: tuple[int, ...]
    specs: tuple[DTensorSpec, ...]
    placements: tuple[tuple[Placement, ...], ...]
    pending: tuple[tuple[int, str], ...]
    name: str
    note: Callable[[Any, torch.Tensor, list[torch.Tensor]], None] | None = None
    metas: Sequence[Any] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = _tensors_of((*args, *kwargs.values()))
        for spec, whole in self._gathered:
            dispatch.observe(spec, whole, self.name)
        operands = self._brought([collective_ops.waited(x) for x in given])
        results = self._views(operands) if self._is_viewed else None
        if results is None:
            part = result_of(self.exchange, given[0], operands)
            results = self.copies(operands) if part is None else [part]
            if self.note is not None:
                self.note(self, given[0], results)
        single = len(results) == 1 and self.name not in LISTS
        return results[0] if single else results

    @cached_property
    def _gathered(self) -> list[tuple[DTensorSpec, DTensorSpec]]:
        """Of each operand of which something is sent, its spec, and to what torch would have
        redistributed it.
        """
        dims = self.exchange.mesh_dims
        found = []
        for spec in self.specs:
            whole = [Replicate() if m in dims else p for m, p in enumerate(spec.placements)]
            if tuple(whole) != tuple(spec.placements):
                found.append((spec, DTensorSpec(self.mesh, tuple(whole), spec.tensor_meta)))
        return found

    def _brought(self, given: list[torch.Tensor]) -> list[torch.Tensor]:
        """The operands where the movement starts."""
        if not self._starts:
            return given
        wanted = [Wanted(given[i], self.specs[i], target) for i, target in self._starts.items()]
        moved = dict(zip(self._starts, redistribute_all(wanted, counted=False)))
        return [moved.get(i, x) for i, x in enumerate(given)]

    @cached_property
    def _starts(self) -> dict[int, DTensorSpec]:
        """Where the movement starts, of each operand that is elsewhere."""
        return {
            i: DTensorSpec(self.mesh, placements, spec.tensor_meta)
            for i, (spec, placements) in enumerate(zip(self.specs, self.placements))
            if placements != tuple(spec.placements)
        }

    # -- without communication ---------------------------------------------------------------------

    @cached_property
    def _is_viewed(self) -> bool:
        """Whether the results are views on each device, and what is written to them reaches all
        that have it: not where they are parts of replicas.
        """
        if self.note is None or self.dims or not is_view(self.exchange):
            return False
        outputs = range(len(self.exchange.move.outputs))
        return not any(turned(_alone(self.exchange, k)).communicates for k in outputs)

    def _views(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of each result the local tensor as a view of the operand's."""

        def view(rank: int, x: torch.Tensor, k: int) -> torch.Tensor:
            return self._finished(_sliced(x, self.exchange, k, place(self.mesh, rank)), k, rank)

        return [
            on_each_rank(lambda rank, x, k=k: view(rank, x, k), operands[0])
            for k in range(len(self.exchange.move.outputs))
        ]

    # -- with copies -------------------------------------------------------------------------------

    @cached_property
    def _part(self) -> Callable[[int], Part]:
        return cache(partial(_part_of, self.exchange, self.mesh, self.dims))

    def copies(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of each result the local tensor, in memory of its own."""
        dtype = operands[0].dtype
        for x in operands[1:]:
            dtype = torch.promote_types(dtype, x.dtype)
        operands = [
            x
            if self._is_as_numbered(x, i, dtype)
            else on_each_rank(lambda rank, local, i=i: self._prepared(local, i, rank, dtype), x)
            for i, x in enumerate(operands)
        ]
        received = self._received(operands)
        every = range(len(self.exchange.move.outputs))
        results = all_on_each_rank(
            lambda rank, got, *locals: [self._result(rank, k, got, locals) for k in every],
            received,
            *operands,
        )
        if dispatch_modes.is_tracing():
            results = [self._after_all(x, k, operands, received) for k, x in enumerate(results)]
        return list(map(laid_out, results, self.metas)) if self.metas else results

    def _after_all(
        self, result: torch.Tensor, k: int, operands: Sequence[torch.Tensor], received: torch.Tensor
    ) -> torch.Tensor:
        """In a graph, a result for which all is needed that any rank's is made of."""
        part = self._part(process_groups.this_rank())
        if self.dims:
            return result if part.unpacks[k] else after(result, received)
        used = {i for i, onto, copies in part.own if onto == k and copies}
        return after(result, *(x for i, x in enumerate(operands) if i not in used))

    def again(self, output: int, source: torch.Tensor) -> torch.Tensor:
        """One of the results, in memory of its own."""
        metas = self.metas[output : output + 1]
        alone = replace(self, exchange=_alone(self.exchange, output), metas=metas)
        return alone.copies([source])[0]

    def back(self, output: int, moved: torch.Tensor, source: torch.Tensor) -> None:
        """Write to the operand, a local tensor, what one of the results, ``moved``, has of it. Its
        other rows stay. All ranks together.
        """
        exchange = turned(_alone(self.exchange, output))
        dims = dims_of_group(self.mesh, exchange.mesh_dims)
        assert dims is not None, "asked when the results' placements were chosen"
        replace(self, exchange=exchange, dims=dims).write(moved, source)

    def _received(self, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        """The receive buffer; where nothing is received, any tensor."""
        if not self.dims:
            return operands[0]
        buffer = on_each_rank(
            lambda rank, *locals: to_wire(packed(self._part(rank), locals)), *operands
        )
        if dispatch_modes.is_tracing():
            packs = self._part(process_groups.this_rank()).packs
            buffer = after(buffer, *(x for x, some in zip(operands, packs) if not some))
        group, width = group_of(self.mesh, self.dims), operands[0].element_size()
        with watching.exchange(lambda: self.exchange.received_elements * width):
            return all_to_all(self._part, buffer, operands[0], group, self.mesh)

    def write(self, operand: torch.Tensor, target: torch.Tensor) -> None:
        """Write to the one result, a local tensor that is there, what the operand has of it. Its
        other rows stay.
        """

        def put(
            rank: int, received: torch.Tensor, x: torch.Tensor, into: torch.Tensor
        ) -> torch.Tensor:
            part, whole = self._part(rank), into
            if into.is_conj() or into.is_neg():
                whole = into.resolve_conj().resolve_neg()
            elif dispatch_modes.is_tracing():
                whole = into.clone()  # to a view of a view no graph can write by strides
            lies, diagonal = whole, self._diagonal
            side = diagonal and side_of(self.exchange.targets[0], diagonal, place(self.mesh, rank))
            if diagonal and side:
                lies = collapsed(whole, diagonal, side)
            unpacked(part, 0, from_wire(received, lies.dtype), [x], into=lies)
            if diagonal and side:
                put_diagonal(whole, lies, diagonal, side)
            if dispatch_modes.is_tracing():
                whole = after(whole, received if self.dims else x, into)
            return into if whole is into else into.copy_(whole)

        on_each_rank(put, self._received([operand]), operand, target)

    @property
    def _diagonal(self) -> Rows | None:
        """The rows of the one result where these are a diagonal of it."""
        pairs = (pair for link in self.exchange.move.links for pair in link.pairs)
        return next((rows for _, rows in pairs if isinstance(rows.form, Diagonal)), None)

    @cached_property
    def _collapsed(self) -> tuple[tuple[Rows, ...], ...]:
        """Of each operand the rows that do not stand for those of the exchange one for one."""
        found = []
        for i in range(len(self.exchange.sources)):
            links = [link for link in self.exchange.move.links if link.source == i]
            pairs = links[0].pairs if links else ()
            found.append(tuple([rows for rows, _ in pairs if rows.form is not None]))
        return tuple(found)

    def _is_as_numbered(self, x: torch.Tensor, i: int, dtype: torch.dtype) -> bool:
        """Whether the operand is a plain tensor that is to be :meth:`_prepared` in no way."""
        is_plain = type(x) is torch.Tensor and x.dtype == dtype and not self._collapsed[i]
        return is_plain and not (x.is_conj() or x.is_neg())

    def _prepared(self, local: torch.Tensor, i: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
        """The operand as the exchange numbers its rows, and of the results' dtype."""
        if local.is_conj() or local.is_neg():
            local = local.resolve_conj().resolve_neg()
        local = local if local.dtype == dtype else local.to(dtype)
        for rows in self._collapsed[i]:
            side = side_of(self.exchange.sources[i], rows, place(self.mesh, rank))
            local = collapsed(local, rows, side)
        return local

    def _result(
        self, rank: int, k: int, received: torch.Tensor, operands: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        part, move = self._part(rank), self.exchange.move
        own = None if move.adds else own_view(part, k, operands)
        if own is None:
            received = from_wire(received, operands[0].dtype)
            fill = self._fill(rank) if part.filled[k] else 0
            found = unpacked(part, k, received, operands, fill=fill, adds=move.adds)
            return self._finished(found, k, rank)
        result = self._finished(own.clone() if move.is_view else own, k, rank)
        return result.clone() if result is own else result

    def _fill(self, rank: int) -> Any:
        """What rows that are made of no row have on a device: where something is pending, so that
        it comes to the fill.
        """
        fill = 0 if self.exchange.move.adds else self.exchange.move.fill
        for m, op in self.pending:
            if op in ("sum", "product") and place(self.mesh, rank)[m]:
                fill = 0 if op == "sum" else 1
        return fill

    @cached_property
    def _expanded(self) -> tuple[tuple[tuple[Rows, ...], tuple[int, ...]], ...]:
        """Of each result the rows for which those of the exchange do not stand one for one, and the
        dims that lie backward.
        """
        found = []
        for k in range(len(self.exchange.targets)):
            links = [link for link in self.exchange.move.links if link.target == k]
            every = [rows for link in links for _, rows in link.pairs]
            backward = [rows.dim for rows in every if rows.backward and rows.dim is not None]
            forms = tuple([rows for rows in every if rows.form is not None])
            found.append((forms, tuple(backward)))
        return tuple(found)

    def _finished(self, target: torch.Tensor, k: int, rank: int) -> torch.Tensor:
        """Rows that lie backward are turned; windows are taken; triangles are cut out."""
        if self.exchange.move.triangle is not None:
            onto, device = self.exchange.targets[k], place(self.mesh, rank)
            held, across = (
                rows_held(onto.shape[d], onto.chain(d, device))
                for d in range(len(onto.shape) - 2, len(onto.shape))
            )
            return triangle_of(target, *self.exchange.move.triangle, held, across)
        forms, backward = self._expanded[k]
        for rows in forms:
            side = side_of(self.exchange.targets[k], rows, place(self.mesh, rank))
            target = expanded(target, rows, side)
        return target.flip(backward) if backward else target


def _tensors_of(arguments: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors among an op's arguments, also those in a list."""
    found: list[torch.Tensor] = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            found.append(argument)
        elif isinstance(argument, (list, tuple)):
            found += [x for x in argument if isinstance(x, torch.Tensor)]
    return found


# Ops that give a list, also of one tensor.
LISTS = frozenset(
    {
        "split.Tensor",
        "split_with_sizes.default",
        "split_with_sizes_copy.default",
        "unbind.int",
    }
)


@lru_cache(maxsize=1 << 12)
def _part_of(exchange: Exchange, mesh: Any, dims: tuple[int, ...], rank: int) -> Part:
    number = exchange.sources[0].mesh.rank
    return exchange.part(number(place(mesh, rank)), [*map(number, peers(mesh, dims, rank))])


def _sliced(x: torch.Tensor, exchange: Exchange, k: int, device: tuple[int, ...]) -> torch.Tensor:
    """What a device needs of its own, by slices of its dims."""
    gone = 0
    steps = slices(exchange, k, device)
    assert steps is not None
    (link,) = [link for link in exchange.move.links if link.target == k]
    for rows, _ in link.pairs:
        if rows.form is not None:
            x = collapsed(x, rows, side_of(exchange.sources[link.source], rows, device))
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


# -- backward -------------------------------------------------------------------------------------


@lru_cache(maxsize=1 << 10)
def comes_back(exchange: Exchange, mesh: Any) -> bool:
    """Whether what is written to the results can be moved to the operand: its ranks have a process
    group together. They are more than those of ``exchange`` where its results cut replicas.
    """
    back = [turned(_alone(exchange, k)) for k in range(len(exchange.move.outputs))]
    return all(dims_of_group(mesh, each.mesh_dims) is not None for each in back)


def _alone(exchange: Exchange, output: int) -> Exchange:
    """The exchange for one of the results."""
    move = exchange.move
    links = [link._replace(target=0) for link in move.links if link.target == output]
    alone = replace(move, outputs=(move.outputs[output],), links=tuple(links))
    return replace(exchange, relation=alone, targets=(exchange.targets[output],))


@lru_cache(maxsize=1 << 10)
def turned(exchange: Exchange) -> Exchange:
    """Of an exchange from one operand to one result, that from the result to the operand."""
    move = exchange.move
    links = [
        link._replace(pairs=tuple([(target, source) for source, target in link.pairs]))
        for link in move.links
    ]
    turned = replace(
        move, inputs=move.outputs, outputs=move.inputs, links=tuple(links), is_view=False
    )
    return replace(exchange, relation=turned, sources=exchange.targets, targets=exchange.sources)
