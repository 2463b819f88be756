"""The side of a trainer: each of its ranks sends from its own shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)

from cute_sharding.dtensor import TransferPlan, plan_load
from cute_sharding.integrations.groups import join
from cute_sharding.integrations.vllm import NAME


@dataclass
class CuteTrainerInitInfo(TrainerInitInfo):
    """What a rank of the trainer says, each the same but for its rank in the trainer.

    Attributes:
        master_address, master_port: where the group meets; rank 0 listens there.
        trainers: how many ranks the trainer has. They come first in the group.
        world_size: how many ranks trainer and workers have together.
        group_backend: of the group; None for the default of the device.
        names: ``"checkpoint"`` if the trainer's weights have the names and shapes of the model's
            checkpoint; ``"transformers"`` if they have those of the class of transformers.
    """

    backend: ClassVar[str] = NAME

    master_address: str
    master_port: int
    trainers: int
    world_size: int
    group_backend: str | None = None
    names: str = "checkpoint"


class ShardedSource(WeightSource):
    """The weights of a trainer as they are: DTensors of any placements, and plain tensors.

    Args:
        weights: a module, or what returns the weights by name when they are sent.
    """

    def __init__(self, weights: torch.nn.Module | Callable[[], Mapping[str, torch.Tensor]]) -> None:
        self.state = weights.state_dict if isinstance(weights, torch.nn.Module) else weights

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, x.dtype, tuple(x.shape)) for name, x in self.state().items()]


class CuteTrainerWeightTransferEngine(TrainerWeightTransferEngine[CuteTrainerInitInfo]):
    """Sends by a plan, which the first ``send_weights`` makes together with the workers."""

    init_info_cls = CuteTrainerInitInfo
    group: Any = None
    plan: TransferPlan | None = None

    @classmethod
    def trainer_init(
        cls,
        init_info: CuteTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> CuteTrainerWeightTransferEngine:
        if not isinstance(source, ShardedSource):
            raise TypeError(
                f"the engine {NAME!r} sends shards, which {type(source).__name__} does not give: "
                "pass source=cute_sharding.integrations.vllm.trainer.ShardedSource(model)"
            )
        engine = cls(
            client=client, source=source, is_sender=init_info.is_sender, rank=init_info.rank
        )
        told = {name: value for name, value in asdict(init_info).items() if name != "rank"}
        with engine._asking(lambda: client.init_weight_transfer_engine(told)):
            engine.group = join(
                init_info.master_address,
                init_info.master_port,
                rank=init_info.rank,
                size=init_info.world_size,
                backend=init_info.group_backend,
            )
        return engine

    def send_weights(self) -> None:
        assert isinstance(self.source, ShardedSource)
        state = self.source.state()
        if self.is_sender:
            self.client.start_weight_update()
        with self._asking(lambda: self.client.update_weights({})):
            if self.plan is None:
                self.plan = plan_load(None, None, state, group=self.group)
            self.plan.run(state)
        if self.is_sender:
            self.client.finish_weight_update()

    def shutdown(self) -> None:
        group, self.group, self.plan = self.group, None, None
        if group is not None:
            dist.destroy_process_group(group)

    @contextmanager
    def _asking(self, request: Callable[[], None]) -> Iterator[None]:
        """While the workers do what the sender asks of them, which needs this rank as well. If this
        rank fails, the workers may wait for ever: the error goes out, and nobody waits for them.
        """
        if not self.is_sender:
            yield
            return
        pool = ThreadPoolExecutor(max_workers=1)
        try:
            asked: Future[None] = pool.submit(request)
            yield
            asked.result()
        finally:
            pool.shutdown(wait=False)
