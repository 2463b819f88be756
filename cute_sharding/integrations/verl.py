"""A checkpoint engine of verl, of the name ``cute``. To import this module registers it, as verl
does with the module that its config names::

    actor_rollout_ref.rollout.checkpoint_engine.backend=cute
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=cute_sharding.integrations.verl

verl hands whole tensors to its rollouts, so each rollout rank receives whole tensors, a bucket at a
time, from all ranks of the trainer.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from cute_sharding.integrations.groups import join, meeting_place
from cute_sharding.integrations.streams import Pairs, Stream

Meeting = tuple[str, int]


@CheckpointEngineRegistry.register("cute")
class CuteCheckpointEngine(CheckpointEngine):
    """Sends shards where it has them.

    Args:
        bucket_size: the most bytes that a rank receives at once.
        is_master: whether this is rank 0 of the trainer.
        address: of the host of the master, which rollouts can reach; by default the one that Ray
            knows.
        group_backend: of the group of trainer and rollout; None for the default of the device.

    Attributes:
        state: what returns the trainer's weights by name, as DTensors: verl gathers each tensor on
            all ranks of the trainer where it is None. Set it in a worker of the trainer::

                self.checkpoint_engine.state = self.actor.engine.module.state_dict
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        address: str | None = None,
        group_backend: str | None = None,
    ) -> None:
        self.bucket_size, self.is_master = bucket_size, is_master
        self.address, self.group_backend = address, group_backend
        self.state: Callable[[], Mapping[str, torch.Tensor]] | None = None
        self._store: Any = None
        self._stream: Stream | None = None
        self._joined: tuple[Any, ...] | None = None

    def prepare(self) -> dict[str, Any]:
        """Where to meet, from the master."""
        if not self.is_master:
            return {}
        if self._store is None:
            self._store = meeting_place(self.address or _address_of_host())
        return {"meeting": (self._store.host, self._store.port)}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """The trainer first, then the rollout."""
        world = actor_wg_world_size + rollout_world_size
        meeting = metadata[0]["meeting"]

        def told(ranks: range) -> dict[str, list[Any]]:
            same = len(ranks)
            return {
                "rank": [*ranks],
                "world_size": [world] * same,
                "meeting": [meeting] * same,
            }

        return told(range(actor_wg_world_size)), told(range(actor_wg_world_size, world))

    def init_process_group(self, rank: int, world_size: int, meeting: Meeting) -> None:
        """Again only if the group has changed: the plans of the last step are kept."""
        if self._joined == (rank, world_size, meeting):
            return
        self._leave()
        at = self._store or meeting[0]
        group = join(at, meeting[1], rank=rank, size=world_size, backend=self.group_backend)
        self._stream = Stream(group, bucket_bytes=self.bucket_size)
        self._joined = (rank, world_size, meeting)

    def finalize(self) -> None:
        """Nothing: group and plans stay for the next step."""

    async def send_weights(self, weights: Pairs, global_steps: int | None = None) -> None:
        """``weights`` are left alone if the engine has its own ``state``."""
        self._running().send(weights if self.state is None else self.state().items())

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        for pair in self._running().receive():
            yield pair

    def _running(self) -> Stream:
        if self._stream is None:
            raise RuntimeError(
                "the checkpoint engine 'cute' has no group: call init_process_group with what "
                "build_topology returns, on all ranks"
            )
        return self._stream

    def _leave(self) -> None:
        if self._stream is not None:
            dist.destroy_process_group(self._stream.group)
            self._stream = self._joined = None


def _address_of_host() -> str:
    import ray

    return ray.util.get_node_ip_address().strip("[]")
