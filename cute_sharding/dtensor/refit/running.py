"""One rank's part in a refit: from local tensors to local tensors, in one exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from cute_sharding.dtensor.bookkeeping.stats import Moved, Received, count_moves
from cute_sharding.dtensor.replaced import collective_ops, dispatch_modes, process_groups
from cute_sharding.dtensor.run.messages import exchange_buffers
from cute_sharding.dtensor.run.packing import from_wire, in_shape, packed, to_wire, unpacked
from cute_sharding.dtensor.run.ranks import on_each_rank
from cute_sharding.dtensor.run.several_meshes import on_which_group
from cute_sharding.exchange import Part
from cute_sharding.exchange.refit import Refit, Sent


class Ran(NamedTuple):
    """A refit that ran, for :func:`cute_sharding.stats`."""

    refit: Refit

    @property
    def question(self) -> None:
        """torch has no such redistribution."""
        return None

    @property
    def moved(self) -> Moved:
        by_all = sum(map(self.refit.elements_received_by, self.refit.looked_at))
        received = Received(self.refit.received_elements, by_all)
        return Moved(plan=1, collectives=self.refit.collectives, received=received)


class Running:
    """A refit on meshes that have process groups; of each rank the parts are kept.

    Attributes:
        refit: what is moved.
        meshes: the DeviceMeshes of operands and results.
        dtypes: of the results.
    """

    def __init__(self, refit: Refit, meshes: Sequence[Any], dtypes: Sequence[torch.dtype]) -> None:
        self.refit = refit
        self.meshes = sorted(dict.fromkeys(meshes), key=lambda mesh: -mesh.size())
        self.dtypes = tuple(dtypes)
        self._parts: dict[tuple[Sent, int], Part] = {}

    def part(self, sent: Sent, rank: int) -> Part:
        """A rank's part in one of the exchanges."""
        key = sent, rank
        if key not in self._parts:
            self._parts[key] = self.refit.part(sent, rank)
        return self._parts[key]

    def run(
        self, locals_: Sequence[torch.Tensor], into: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        """The local tensors of the results, from those of the operands; without elements on ranks
        outside of a result's mesh. ``into``: what is written to, of each result.

        Raises:
            OtherShape: a local tensor is not of the shape that its placements give.
        """
        given = [
            on_each_rank(lambda rank, x, k=k: self._checked(k, x, rank), collective_ops.waited(x))
            for k, x in enumerate(locals_)
        ]
        results = [
            on_each_rank(lambda rank, x, k=k: self._made(k, x, rank), given[0])
            if x is None or not x.is_contiguous()
            else x
            for k, x in enumerate(into)
        ]
        mode = dispatch_modes.local_tensor_mode()
        if mode is None and process_groups.this_rank() not in self.refit.ranks:
            return results
        values = [torch.tensor([v], dtype=_widest(v)) for v in self.refit.relation.constants]
        operands = [self._sent(sent, given) for sent in self.refit.sent]
        for sent, some, received in zip(self.refit.sent, operands, self._received(operands)):
            results = [
                on_each_rank(_into(partial(self.part, sent), k), received, result, *some, *values)
                for k, result in enumerate(results)
            ]
        count_moves(Ran(self.refit))
        return [
            made if x is None or x is made else on_each_rank(lambda rank, x, y: x.copy_(y), x, made)
            for x, made in zip(into, results)
        ]

    def _checked(self, k: int, local: torch.Tensor, rank: int) -> torch.Tensor:
        operand = self.refit.operands[k]
        shape = operand.placed.local_shape(rank)
        if shape is None:
            return local.new_empty(0)
        local = in_shape(local, shape, operand.name)
        return local.detach().resolve_conj().resolve_neg().contiguous()

    def _made(self, k: int, local: torch.Tensor, rank: int) -> torch.Tensor:
        shape = self.refit.results[k].placed.local_shape(rank)
        return local.new_empty((0,) if shape is None else shape, dtype=self.dtypes[k])

    # -- one exchange ------------------------------------------------------------------------------

    def _received(self, operands: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Of each dtype that is sent, what a rank gets of it: in one exchange, where there are
        several of bytes. ``operands``: for each, with those that are sent in it.
        """
        every = self.refit.sent
        dtypes = [self._dtype(sent, some) for sent, some in zip(every, operands)]
        if self.refit.is_free:
            return [_empty(some[0], dtype) for some, dtype in zip(operands, dtypes)]
        buffers = [
            on_each_rank(
                lambda rank, *xs, sent=sent, dtype=dtype: packed(self.part(sent, rank), xs, dtype),
                *some,
            )
            for sent, some, dtype in zip(every, operands, dtypes)
        ]
        mesh, other = self.meshes[0], self.meshes[-1]
        group = on_which_group(self.refit, mesh, other)
        part: Callable[[int], Part] = self._in_bytes
        if len(every) == 1:
            like, part = buffers[0], partial(self.part, every[0])
            buffer = on_each_rank(lambda rank, x: to_wire(x), like)
        else:
            like = buffer = on_each_rank(lambda rank, *xs: self._side_by_side(rank, xs), *buffers)
        got = exchange_buffers(part, buffer, like, group, mesh)
        return [
            on_each_rank(lambda rank, x, i=i, dtype=dtype: self._apart(rank, i, x, dtype), got)
            for i, dtype in enumerate(dtypes)
        ]

    def _dtype(self, sent: Sent, given: Sequence[torch.Tensor]) -> torch.dtype:
        """In which elements are sent; any, where they are none."""
        found: torch.dtype = getattr(torch, sent.dtype, given[0].dtype)
        return found

    def _sent(self, sent: Sent, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The operands, those of an exchange in its dtype."""
        dtype = self._dtype(sent, given)
        return [
            on_each_rank(lambda rank, x: x.to(dtype), x)
            if k in sent.operands and x.dtype != dtype
            else x
            for k, x in enumerate(given)
        ]

    def _in_bytes(self, rank: int) -> Part:
        """A rank's messages of all dtypes: to each peer one, of these one after the other."""
        parts = [(self.part(sent, rank), sent.itemsize) for sent in self.refit.sent]
        counts: dict[int, list[int]] = {}
        for part, width in parts:
            for peer, *sizes in zip(part.peers, part.sends, part.receives):
                known = counts.get(peer, [0, 0])
                counts[peer] = [n + size * width for n, size in zip(known, sizes)]
        peers = tuple(sorted(counts))
        sends, receives = (tuple([counts[peer][side] for peer in peers]) for side in (0, 1))
        return Part(peers, sends, receives, (), (), (), (), ())

    def _side_by_side(self, rank: int, buffers: Sequence[torch.Tensor]) -> torch.Tensor:
        """Buffers of several dtypes as one of bytes, peer by peer."""
        found: dict[int, list[torch.Tensor]] = {}
        for sent, buffer in zip(self.refit.sent, buffers):
            part = self.part(sent, rank)
            for peer, message in zip(part.peers, buffer.contiguous().split(list(part.sends))):
                found.setdefault(peer, []).append(message.view(torch.uint8))
        messages = [message for peer in sorted(found) for message in found[peer]]
        return torch.cat(messages) if messages else _empty(buffers[0], torch.uint8)

    def _apart(self, rank: int, i: int, received: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Of what a rank was sent the elements of one dtype, peer by peer."""
        every = self.refit.sent
        if len(every) == 1:
            return from_wire(received, dtype)
        parts = [self.part(sent, rank) for sent in every]
        sizes = [
            dict(zip(part.peers, (n * sent.itemsize for n in part.receives)))
            for sent, part in zip(every, parts)
        ]
        found, at = [], 0
        for peer in sorted({peer for of in sizes for peer in of}):
            at += sum(of.get(peer, 0) for of in sizes[:i])
            found.append(received[at : at + sizes[i].get(peer, 0)])
            at += sum(of.get(peer, 0) for of in sizes[i:])
        return torch.cat(found).view(dtype) if found else _empty(received, dtype)


def _empty(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return on_each_rank(lambda rank, x: x.new_empty(0, dtype=dtype), like)


def _into(part: Callable[[int], Part], k: int) -> Callable[..., torch.Tensor]:
    """What writes a result: what the rank keeps, and what it was sent."""

    def written(
        rank: int, received: torch.Tensor, result: torch.Tensor, *sources: torch.Tensor
    ) -> torch.Tensor:
        mine = part(rank)
        if mine.target_shapes[k] is not None:
            unpacked(mine, k, received, sources, into=result)
        return result

    return written


def _widest(value: Any) -> torch.dtype:
    """A dtype that has the number as it is."""
    if isinstance(value, complex):
        return torch.complex128
    return torch.float64 if isinstance(value, float) else torch.int64
