"""Whole tensors, a bucket at a time, for engines that take pairs of a name and a tensor."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from cute_sharding.dtensor import TransferPlan, plan_load

Pairs: TypeAlias = "Iterable[tuple[str, torch.Tensor]]"
# Of each tensor of a bucket: name, shape, dtype, and how rank 0 has it.
Contents: TypeAlias = "tuple[tuple[str, tuple[int, ...], torch.dtype, str], ...]"

BUCKET = 1 << 30


class Stream:
    """Sends the tensors of a trainer to those who want them whole, a bucket at a time: each bucket
    is one planned exchange, in which nobody gathers who does not want the tensor. A rank holds no
    more than a bucket and its buffers.

    In each pass every rank of the group calls one method, the same one each time. Rank 0 of the
    group has tensors to send. A plan is made for each bucket of other names, shapes, dtypes or
    placements than the ones before: in the first pass, as a rule.

    Args:
        group: of all ranks that send or receive, for example from
            :func:`cute_sharding.integrations.groups.join`; by default all of the world.
        bucket_bytes: the most bytes of a bucket; a larger tensor goes by itself.
        device: of the tensors that are received; by default that of the group's backend.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        bucket_bytes: int = BUCKET,
        device: torch.device | str | None = None,
    ) -> None:
        self.group: Any = dist.group.WORLD if group is None else group
        self.bucket_bytes = bucket_bytes
        with_gpus = "nccl" in dist.get_backend(self.group)
        here = torch.device("cuda", torch.cuda.current_device()) if with_gpus else "cpu"
        self.device = torch.device(device or here)
        self._talks_on = torch.device(here)
        self._plans: dict[Contents, TransferPlan] = {}

    def send(self, weights: Pairs) -> None:
        """On a rank that has tensors and wants none. ``weights``: pairs of a name and a DTensor or
        a plain tensor, in the same order on all ranks that send.
        """
        for _ in self._passed(weights, wants=False):
            pass

    def receive(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The whole tensors, on a rank that has none. Take all of them: ranks move together."""
        return self._passed(None, wants=True)

    def whole(self, weights: Pairs) -> Iterator[tuple[str, torch.Tensor]]:
        """The whole tensors, on a rank that has its part of them."""
        return self._passed(weights, wants=True)

    def _passed(self, weights: Pairs | None, *, wants: bool) -> Iterator[tuple[str, torch.Tensor]]:
        filled = iter(()) if weights is None else buckets(weights, self.bucket_bytes)
        while True:
            bucket = next(filled, None)
            contents = self._announced(None if bucket is None else contents_of(bucket))
            if contents is None:
                return
            if contents not in self._plans:
                self._plans[contents] = self._planned(contents, bucket, wants)
            into = self._made(contents, self.device) if wants else None
            self._plans[contents].run(bucket, into=into)
            yield from (into or {}).items()

    def _planned(
        self, contents: Contents, bucket: dict[str, torch.Tensor] | None, wants: bool
    ) -> TransferPlan:
        into = self._made(contents, torch.device("meta"))

        def load(whole: Mapping[str, torch.Tensor]) -> None:
            for name, x in into.items():
                x.copy_(whole[name])

        return plan_load(load if wants else None, into if wants else None, bucket, group=self.group)

    @staticmethod
    def _made(contents: Contents, device: torch.device) -> dict[str, torch.Tensor]:
        return {name: torch.empty(s, dtype=t, device=device) for name, s, t, _ in contents}

    def _announced(self, contents: Contents | None) -> Contents | None:
        """What rank 0 says: torch's own way to broadcast objects asks for ranks of the world."""
        said = pickle.dumps(contents)
        size = torch.tensor([len(said)], device=self._talks_on)
        dist.broadcast(size, group=self.group, group_src=0)
        text = bytearray(said if self.group.rank() == 0 else int(size))
        bits = torch.frombuffer(text, dtype=torch.uint8).to(self._talks_on)
        dist.broadcast(bits, group=self.group, group_src=0)
        return pickle.loads(bytes(bits.tolist()))


def buckets(weights: Pairs, most: int) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors in their order, by whole sizes: as many together as ``most`` bytes hold.

    >>> pairs = [(name, torch.zeros(n)) for name, n in (("a", 2), ("b", 3), ("c", 9), ("d", 1))]
    >>> [[*bucket] for bucket in buckets(pairs, 20)]
    [['a', 'b'], ['c'], ['d']]
    """
    bucket: dict[str, torch.Tensor] = {}
    held = 0
    for name, x in weights:
        size = x.shape.numel() * x.dtype.itemsize
        if bucket and held + size > most:
            yield bucket
            bucket, held = {}, 0
        bucket[name] = x
        held += size
    if bucket:
        yield bucket


def contents_of(bucket: dict[str, torch.Tensor]) -> Contents:
    """What rank 0 says of a bucket.

    >>> contents_of({"a": torch.zeros(2, 3)})
    (('a', (2, 3), torch.float32, ''),)
    """

    def lies(x: torch.Tensor) -> str:
        return f"{x.placements} on {x.device_mesh}" if isinstance(x, DTensor) else ""

    return tuple([(name, tuple(x.shape), x.dtype, lies(x)) for name, x in bucket.items()])
