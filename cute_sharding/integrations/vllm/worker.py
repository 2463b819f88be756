"""The side of vLLM's workers: each receives the part of the weights that its own model loads."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.meta import materialize_layer
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

from cute_sharding.dtensor import TransferPlan, plan_load
from cute_sharding.integrations.groups import join


@dataclass
class CuteInitInfo(WeightTransferInitInfo):
    """What a worker is told once: the fields of the trainer's ``CuteTrainerInitInfo``."""

    master_address: str
    master_port: int
    trainers: int
    world_size: int
    group_backend: str | None = None
    names: str = "checkpoint"


@dataclass
class CuteUpdateInfo(WeightTransferUpdateInfo):
    """Nothing: the plan knows all."""


class CuteWeightTransferEngine(WeightTransferEngine[CuteInitInfo, CuteUpdateInfo]):
    """Receives by a plan of the model's own ``load_weights``. The first update makes the plan.

    An update loads into tensors as the model has them when it is loaded first. vLLM then processes
    each layer, and writes the result to the tensors that the kernels read. So a worker holds its
    part of the weights twice during an update.
    """

    init_info_cls = CuteInitInfo
    update_info_cls = CuteUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group: Any = None
        self.plan: TransferPlan | None = None
        self._names = "checkpoint"
        self._into: dict[str, torch.Tensor] = {}

    def init_transfer_engine(self, init_info: CuteInitInfo) -> None:
        here = self.parallel_config
        worker = here.data_parallel_index * here.world_size + here.rank
        self.shutdown()
        self._names = init_info.names
        self.group = join(
            init_info.master_address,
            init_info.master_port,
            rank=init_info.trainers + worker,
            size=init_info.world_size,
            backend=init_info.group_backend,
        )

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)
        self._into = as_loaded(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: CuteUpdateInfo) -> None:
        if self.group is None:
            raise RuntimeError(
                "the engine 'cute' has no group with a trainer: call trainer_init on all ranks of "
                "the trainer before the first update"
            )
        if self.plan is None:
            self.plan = plan_load(self._load, self._into, None, group=self.group)
        self.plan.run(into=self._into)

    def finish_weight_update(self) -> None:
        if self.plan is not None:
            mark_loaded(self.model, written(self.plan, self._into))
        finalize_layerwise_reload(self.model, self.model_config)
        self._into = {}

    def shutdown(self) -> None:
        group, self.group, self.plan = self.group, None, None
        if group is not None:
            dist.destroy_process_group(group)

    def _load(self, weights: Mapping[str, torch.Tensor]) -> None:
        if self._names == "transformers":
            from cute_sharding.integrations.transformers import to_checkpoint

            weights = to_checkpoint(self.model_config.hf_config)(weights)
        with disable_mtp_completeness_check(), own_loaders(self.model):
            self.model.load_weights(weights.items())


def as_loaded(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All tensors of a model whose layers vLLM is about to reload, by name: they get memory, and
    the values of now where the kernels have them in the same form. Without those of attention,
    which vLLM loads in a way of its own.
    """
    into: dict[str, torch.Tensor] = {}
    for path, layer, info in _reloading(model):
        materialize_layer(layer, info)
        was = {**info.kernel_tensors[0], **info.kernel_tensors[1]}
        for name, x in get_layer_tensors(layer).items():
            before = was.get(name)
            if before is not None and (before.shape, before.dtype) == (x.shape, x.dtype):
                x.data.copy_(before.data)
            into[f"{path}.{name}".lstrip(".")] = x
    return into


def written(plan: TransferPlan, into: Mapping[str, torch.Tensor]) -> set[str]:
    """The names of the tensors of which a plan writes any element."""
    return {name for name, x in into.items() if plan.unwritten.get(name, 0) < x.numel()}


def mark_loaded(model: torch.nn.Module, names: Collection[str]) -> None:
    """Have vLLM process the layers of these tensors when it finishes the reload, as it does with
    those of which some elements are loaded and some not; and put all others back.
    """
    for path, layer, info in _reloading(model):
        if any(f"{path}.{name}".lstrip(".") in names for name in get_layer_tensors(layer)):
            info.load_numel, info.load_numel_total = 1, 2


def _reloading(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, Any]]:
    for path, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if info.can_load() and not is_deferred_attention_layer(layer):
            yield path, layer, info


@contextmanager
def own_loaders(model: torch.nn.Module) -> Iterator[None]:
    """Without the loaders that vLLM wraps around those of a layer during a reload: they keep what
    they are given until a layer is whole.
    """
    kept = []
    for x in model.parameters():
        loader = wrapped = getattr(x, "weight_loader", None)
        while getattr(loader, "__name__", "") == "online_process_loader":
            loader = loader.__wrapped__  # type: ignore[union-attr]
        if loader is not wrapped:
            kept.append((x, wrapped))
            x.weight_loader = loader  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for x, wrapped in kept:
            x.weight_loader = wrapped  # type: ignore[attr-defined]
