"""Steps of a compiled program whose sizes are symbolic and do not divide: the collectives that the same steps are where the sizes are numbers, with splits that are expressions.

A rank that compiles for many sizes and one that runs eagerly must meet in the same collectives. Where all cuts are plain blocks the rows of a device are one range, however many mesh dims cut them, and
so are the rows that one device has and another needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from cute_sharding.dtensor import compat
from cute_sharding.dtensor.compat import DTensorSpec, waited
from cute_sharding.dtensor.executor import reduced_with, scaled
from cute_sharding.dtensor.groups import group_of
from cute_sharding.dtensor.ranks import copies_natively, in_order, peers
from cute_sharding.dtensor.symbols import known, symbols_of, unknown
from cute_sharding.layout.size import is_at_most, least, most
from cute_sharding.layout.symbolic import Int
from cute_sharding.redistribution.chains import Device
from cute_sharding.redistribution.exchange import Exchange
from cute_sharding.redistribution.native import Along, room_for
from cute_sharding.redistribution.reduction import Reduction
from cute_sharding.redistribution.step import Step
from cute_sharding.sharding.deal import local_size

Cuts1 = Sequence[tuple[int, int]]


def is_dynamic(steps: Sequence[Step]) -> bool:
    """Whether the steps can be run by :func:`run_dynamic`: all cuts are plain blocks, and no two devices share what a third one needs."""
    for step in steps:
        if any(factor != 1 for chain in (*step.source, *step.target) for _, factor in chain):
            return False
        if isinstance(step, Exchange) and (step.spread or step.rounds > 1):
            return False
        if not isinstance(step, Exchange) or not step.communicates:
            # What a device keeps for itself, or for a reduction, are further cuts of what it has.
            if any(after[: len(before)] != before for before, after in zip(step.source, step.target)):
                return False
    return True


def run_dynamic(steps: Sequence[Step], local: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """The steps on this rank's local tensor, whose global shape is that of ``spec``."""
    mesh = spec.mesh
    with symbols_of(tuple(spec.shape)):
        for step in steps:
            local = _Dynamic(step, known(tuple(spec.shape)), tuple(mesh.get_coordinate()), mesh)(waited(local))  # type: ignore[arg-type]
    return local


class _Range(NamedTuple):
    start: Int
    length: Int

    @property
    def stop(self) -> Int:
        return self.start + self.length


class _Dynamic(NamedTuple):
    """One step on a tensor of symbolic ``shape``, on the device at hand."""

    step: Step
    shape: Sequence[Int]
    device: Device
    mesh: Any

    def __call__(self, local: torch.Tensor) -> torch.Tensor:
        if isinstance(self.step, Reduction):
            return self._reduced(self.step, local)
        if self.step.communicates:
            return self._exchanged(self.step, local)
        return self._kept(local, self.device).clone(memory_format=torch.contiguous_format)

    def _rows(self, dim: int, chain: Cuts1, device: Device) -> _Range:
        """The rows of a dim that a device holds."""
        at = _Range(0, self.shape[dim])
        for m, _ in chain:
            parts = self.step.mesh[m]
            block = -(-at.length // parts)
            at = _Range(at.start + least(device[m] * block, at.length), local_size(at.length, 1, parts, device[m]))  # type: ignore[arg-type]
        return at

    def _kept(self, local: torch.Tensor, receiver: Device) -> torch.Tensor:
        """What ``receiver`` is to have of what this device has, where it is further cuts of it."""
        for d, (before, after) in enumerate(zip(self.step.source, self.step.target)):
            if before != after:
                has, wants = self._rows(d, before, self.device), self._rows(d, after, receiver)
                local = local.narrow(d, unknown(wants.start - has.start), unknown(wants.length))
        return local

    def _common(self, sender: Device, receiver: Device) -> list[tuple[Any, Any, Any]]:
        """Of each dim, the rows that one has and the other needs: where they begin in what the one has, and in what the other will have, and how many they are."""
        found = []
        for d, (before, after) in enumerate(zip(self.step.source, self.step.target)):
            has, wants = self._rows(d, before, sender), self._rows(d, after, receiver)
            if before == after and all(sender[m] == receiver[m] for m, _ in before):
                common = has
            elif _inside(before, after, sender, receiver):
                common = wants
            elif _inside(after, before, receiver, sender):
                common = has
            else:
                start = most(has.start, wants.start)
                common = _Range(start, most(0, least(has.stop, wants.stop) - start))
            found.append((unknown(common.start - has.start), unknown(common.start - wants.start), unknown(common.length)))
        return found

    def _exchanged(self, step: Exchange, local: torch.Tensor) -> torch.Tensor:
        group, how = group_of(self.mesh, step.dims), step.along
        if how is not None and how.gathered is not None and how.scattered is None and self._pads(how, how.gathered, group):
            return self._gathered(how, how.gathered, local, group)
        among = peers(self.mesh, step.dims, compat.this_rank())
        out = [None if peer == self.device or step.message(self.device, peer) is None else self._common(self.device, peer) for peer in among]
        into = [None if peer == self.device or step.message(peer, self.device) is None else self._common(peer, self.device) for peer in among]
        buffers = [_narrowed(local, [(start, length) for start, _, length in box]).reshape(-1) for box in out if box is not None]
        receives = [0 if box is None else _product([length for _, _, length in box]) for box in into]
        sends = [0 if box is None else _product([length for _, _, length in box]) for box in out]
        received = waited(compat.all_to_all(torch.cat(buffers) if buffers else local.new_empty(0), receives, sends, group))
        result = local.new_empty([unknown(self._rows(d, chain, self.device).length) for d, chain in enumerate(step.target)])
        own, at = self._common(self.device, self.device), 0
        _narrowed(result, [(start, length) for _, start, length in own]).copy_(_narrowed(local, [(start, length) for start, _, length in own]))
        for box, size in zip(into, receives):
            if box is not None:
                _narrowed(result, [(start, length) for _, start, length in box]).copy_(received.narrow(0, at, size).view([length for _, _, length in box]))
                at = at + size
        return result

    def _pads(self, how: Along, dim: int, group: Any) -> bool:
        """Whether blocks are made equal, as where the sizes are numbers: see Exchange.natively."""
        if not copies_natively(group, self.mesh) or not in_order(self.mesh, how.mesh_dims):
            return False
        return is_at_most(room_for(self.step.mesh, how, dim), self.shape[dim])

    def _gathered(self, how: Along, dim: int, local: torch.Tensor, group: Any) -> torch.Tensor:
        """An all-gather of blocks that are made equal."""
        (m,) = how.mesh_dims
        n = self._rows(dim, how.base[dim], self.device).length
        rows, missing = -(-n // self.step.mesh[m]), -(-n // self.step.mesh[m]) - local_size(n, 1, self.step.mesh[m], self.device[m])  # type: ignore[arg-type]
        equal = torch.nn.functional.pad(local, [0, 0] * (local.ndim - dim - 1) + [0, unknown(missing)])
        gathered = waited(compat.all_gather(equal, group)).view(self.step.mesh[m], *local.shape[:dim], unknown(rows), *local.shape[dim + 1 :])
        return gathered.movedim(0, dim).flatten(dim, dim + 1).narrow(dim, 0, unknown(n)).contiguous()

    def _reduced(self, step: Reduction, local: torch.Tensor) -> torch.Tensor:
        group, how = group_of(self.mesh, step.dims), step.along
        op, local, finish = scaled(step, local, group, self.mesh)
        if not step.scatters:
            return finish(compat.all_reduce(self._kept(local, self.device), op, group))
        if how is not None and how.scattered is not None and self._pads(how, how.scattered, group):
            return finish(self._scattered(how, how.scattered, op, local, group))
        pieces = [self._kept(local, peer) for peer in peers(self.mesh, step.dims, compat.this_rank())]
        mine = self._kept(local, self.device)
        buffer = torch.cat([piece.reshape(-1) for piece in pieces])
        received = waited(compat.all_to_all(buffer, [mine.numel()] * len(pieces), [piece.numel() for piece in pieces], group))
        result = reduced_with(step.op, received.view(len(pieces), *mine.shape))
        return finish(result / step.parts if op == "avg" else result)

    def _scattered(self, how: Along, dim: int, op: str, local: torch.Tensor, group: Any) -> torch.Tensor:
        """A reduce-scatter of blocks that are made equal."""
        (m,) = how.mesh_dims
        n, parts = self._rows(dim, how.base[dim], self.device).length, self.step.mesh[m]
        rows = -(-n // parts)
        equal = torch.nn.functional.pad(local, [0, 0] * (local.ndim - dim - 1) + [0, unknown(parts * rows - n)])
        blocks = equal.unflatten(dim, (parts, unknown(rows))).movedim(dim, 0).contiguous()
        mine = unknown(local_size(n, 1, parts, self.device[m]))  # type: ignore[arg-type]
        return waited(compat.reduce_scatter(blocks, op, group))[0].narrow(dim, 0, mine).contiguous()


def _inside(outer: Cuts1, inner: Cuts1, first: Device, second: Device) -> bool:
    """Whether the rows of ``second`` under the cuts ``inner`` are among those of ``first`` under ``outer``, as they are cuts of these."""
    return tuple(inner[: len(outer)]) == tuple(outer) and all(first[m] == second[m] for m, _ in outer)


def _narrowed(tensor: torch.Tensor, ranges: Sequence[tuple[Any, Any]]) -> torch.Tensor:
    for dim, (start, length) in enumerate(ranges):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def _product(sizes: Sequence[Any]) -> Any:
    result: Any = 1
    for n in sizes:
        result = result * n
    return result
