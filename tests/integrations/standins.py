"""Stand-ins for the packages whose interfaces are served, as far as these are read: what they give,
and what they call. CI has none of the packages.
"""

import sys
from types import ModuleType, SimpleNamespace

import torch


def module(name, **contents):
    """A module of that name, and empty packages above it."""
    parts = name.split(".")
    for k in range(1, len(parts) + 1):
        package = ".".join(parts[:k])
        if package not in sys.modules:
            sys.modules[package] = ModuleType(package)
            sys.modules[package].__path__ = []
    vars(sys.modules[name]).update(contents)
    return sys.modules[name]


# -- vLLM ------------------------------------------------------------------------------------------


class Factory:
    def __init__(self):
        self.known = {}

    def register_engine(self, name, path, class_name):
        if name in self.known:
            raise ValueError(f"engine '{name}' is already registered.")
        self.known[name] = (path, class_name)

    def made(self, name):
        path, class_name = self.known[name]
        __import__(path)
        return getattr(sys.modules[path], class_name)


class WorkerEngine:
    """Its type arguments, what it is made with, and how a worker calls it."""

    def __class_getitem__(cls, _):
        return cls

    def __init__(self, config, vllm_config, device, model):
        self.parallel_config, self.model_config = vllm_config.parallel_config, None
        self.model, self.device = model, device

    def parse_update_info(self, told):
        return self.update_info_cls(**told)


class TrainerEngine(WorkerEngine):
    def __init__(self, *, client, source=None, is_sender=True, rank=0):
        self.client, self.source, self.is_sender, self.rank = client, source, is_sender, rank


class Layer(torch.nn.Module):
    """Loads rows and computes with columns: its weight is turned when it has been loaded."""

    def __init__(self, rows, columns):
        super().__init__()
        self.loaded_shape = (rows, columns)
        self.weight = torch.nn.Parameter(torch.zeros(columns, rows), requires_grad=False)
        self.register_buffer("table", torch.full((3,), 5.0))
        self.info = SimpleNamespace(kernel_tensors=None, load_numel=0, load_numel_total=None)
        self.info.can_load = lambda: self.info.load_numel_total is not None


def tensors(layer):
    return {**layer._parameters, **layer._buffers}


def info_of(layer):
    plain = SimpleNamespace(can_load=lambda: False)
    return layer.info if isinstance(layer, Layer) else plain


def start_reload(model):
    for layer in filter(lambda x: isinstance(x, Layer), model.modules()):
        layer.info.kernel_tensors = ({**layer._parameters}, {**layer._buffers})
        layer.info.load_numel, layer.info.load_numel_total = 0, 1
        with torch.device("meta"):
            layer.weight = torch.nn.Parameter(torch.empty(layer.loaded_shape), requires_grad=False)
            layer.table = torch.empty(3)

        def keeps(*args, layer=layer):
            raise AssertionError("the loader around the layer's own was called")

        own = model.loader
        keeps.__wrapped__, keeps.__name__ = own, "online_process_loader"
        layer.weight.weight_loader = keeps


def materialize(layer, info):
    loader = layer.weight.weight_loader
    layer.weight = torch.nn.Parameter(torch.empty(layer.loaded_shape), requires_grad=False)
    layer.weight.weight_loader = loader
    layer.table = torch.full((3,), -1.0)


def finish_reload(model, model_config):
    for layer in filter(lambda x: isinstance(x, Layer), model.modules()):
        (weights, buffers), info = layer.info.kernel_tensors, layer.info
        if 0 < info.load_numel < info.load_numel_total:
            weights["weight"].data.copy_(layer.weight.data.t())
            buffers["table"].copy_(layer.table)
        layer._parameters.update(weights)
        layer._buffers.update(buffers)
        info.load_numel_total = None


class nothing:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False


def vllm():
    """The modules that an engine imports."""
    at = "vllm.distributed.weight_transfer"
    factories = [Factory(), Factory()]
    module(
        f"{at}.factory",
        WeightTransferEngineFactory=factories[0],
        WeightTransferTrainerFactory=factories[1],
    )
    names = ("WeightTransferInitInfo", "WeightTransferUpdateInfo", "WeightSource")
    module(
        f"{at}.base",
        WeightTransferEngine=WorkerEngine,
        TrainerWeightTransferEngine=TrainerEngine,
        VLLMWeightSyncClient=object,
        TrainerInitInfo=_trainer_info(),
        ParamMeta=lambda *args: args,
        **{name: type(name, (), {}) for name in names},
    )
    module("vllm.model_executor.layers.attention", is_deferred_attention_layer=lambda x: False)
    loading = "vllm.model_executor.model_loader"
    module(f"{loading}.mtp_validation", disable_mtp_completeness_check=nothing)
    module(
        f"{loading}.reload.layerwise",
        initialize_layerwise_reload=start_reload,
        finalize_layerwise_reload=finish_reload,
        get_layerwise_info=info_of,
    )
    module(f"{loading}.reload.meta", materialize_layer=materialize)
    module(f"{loading}.reload.utils", get_layer_tensors=tensors)
    return factories


def _trainer_info():
    from dataclasses import dataclass, field

    @dataclass
    class TrainerInitInfo:
        rank: int = field(kw_only=True)

        @property
        def is_sender(self):
            return self.rank == 0

    return TrainerInitInfo


# -- verl ------------------------------------------------------------------------------------------


def verl():
    known = {}

    class Registry:
        @staticmethod
        def register(name):
            return lambda cls: known.setdefault(name, cls)

    module(
        "verl.checkpoint_engine.base", CheckpointEngine=object, CheckpointEngineRegistry=Registry
    )
    return known
