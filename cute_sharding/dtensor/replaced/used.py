"""Private names of torch that are called or read, and not replaced: the table of them.

A torch that lacks one is refused by name when the package is enabled, and not by an AttributeError
half way through a program. A test reads the adapter's sources: every private attribute of torch in
them is a row here or in :mod:`.patches`. (What is imported by name is not: the import says what is
missing.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cute_sharding.dtensor.replaced.patch import Name

__all__ = ["PLANNER", "TABLE", "Used"]


@dataclass(frozen=True)
class Used(Name):
    """A name that is called or read. It may be an attribute that objects get when they are made."""

    def is_lacking(self) -> bool:
        name = self.place.attribute.rpartition(".")[2]
        return self.found() is None and not _is_set_on_objects(self.owner(), name)


def _is_set_on_objects(kind: Any, name: str) -> bool:
    """Whether objects of a class have it: it is declared, or a method of the class names it."""
    return any(
        name in vars(base).get("__annotations__", {})
        or any(name in getattr(method, "__code__", _NO_CODE).co_names for method in _methods(base))
        for base in getattr(kind, "__mro__", ())
    )


_NO_CODE = (lambda: None).__code__


def _methods(kind: type) -> list[Any]:
    return [getattr(value, "__func__", value) for value in vars(kind).values()]


def _of(module: str, owner: str, file: str, what_for: str, *names: str) -> list[Used]:
    """Rows of one owner; that of a module's own names is empty."""
    before = f"{owner}." if owner else ""
    return [Used(module, f"{before}{name}", file, lacking=what_for) for name in names]


_TENSOR = "torch.distributed.tensor"
_FILES = "torch/distributed/tensor"

# What asks torch for its own steps (redistribution_hook.py), also while nothing is enabled.
PLANNER = tuple(
    _of(
        _TENSOR + "._redistribute",
        "",
        _FILES + "/_redistribute.py",
        "torch's own redistribution could not be asked for its steps",
        "_gen_transform_infos_non_cached",
        "_planner_cache",
    )
)

TABLE: tuple[Used, ...] = (
    *PLANNER,
    *_of(
        _TENSOR,
        "DTensor",
        _FILES + "/_api.py",
        "it is what a DTensor is made of",
        "_local_tensor",
        "_op_dispatcher",
        "_spec",
    ),
    *_of(
        _TENSOR,
        "DTensor._op_dispatcher",
        _FILES + "/_dispatch.py",
        "ops could not be run past torch's cache",
        "_allow_implicit_replication",
        "_dispatch_get_local_results_slow_path",
        "_propagate_op_sharding_dispatch_slow_path",
        "_random_ops",
    ),
    *_of(
        _TENSOR,
        "DTensor._op_dispatcher.sharding_propagator",
        _FILES + "/_sharding_prop.py",
        "answers could not be given in torch's form",
        "_adjust_shape_and_stride_args",
        "_adjust_squeeze_to_global_singletons",
        "_propagate_tensor_meta_non_cached",
    ),
    *_of(
        _TENSOR + "._dtensor_spec",
        "DTensorSpec",
        _FILES + "/_dtensor_spec.py",
        "split factors could not be read as a shard order",
        "_maybe_convert_StridedShard_to_shard_order",
    ),
    *_of(
        _TENSOR + ".placement_types",
        "Shard",
        _FILES + "/placement_types.py",
        "parts of different sizes could not be scattered",
        "_maybe_unpad_tensor_with_sizes",
    ),
    *_of(
        _TENSOR + ".placement_types",
        "Partial",
        _FILES + "/placement_types.py",
        "pending reductions could not be finished",
        "_partition_value",
        "_reduce_shard_value",
        "_reduce_value",
    ),
    *_of(
        _TENSOR + "._redistribute",
        "",
        _FILES + "/_redistribute.py",
        "the process groups of flattened meshes could not be found",
        "_get_flattened_mesh_by_layout_impl",
    ),
    *_of(
        "torch.distributed.device_mesh",
        "DeviceMesh",
        "torch/distributed/device_mesh.py",
        "the ranks of a mesh could not be read",
        "_dim_group_names",
        "_flatten_mapping",
        "_flatten_rank_map",
        "_get_root_mesh",
        "_is_current_rank_part_of_mesh",
        "_layout",
        "_rank_map",
    ),
    *_of(
        "torch.distributed.distributed_c10d",
        "",
        "torch/distributed/distributed_c10d.py",
        "the process groups of a mesh could not be found",
        "_resolve_process_group",
        "_world",
    ),
    *_of(
        "torch.distributed",
        "ProcessGroup",
        "torch/distributed/distributed_c10d.py",
        "the backend of a process group could not be told",
        "_get_backend",
    ),
    *_of(
        "torch.distributed._local_tensor",
        "LocalTensor",
        "torch/distributed/_local_tensor/__init__.py",
        "programs of all ranks in one process could not be run",
        "_local_tensors",
    ),
    *_of(
        "torch._ops",
        "OpOverload",
        "torch/_ops.py",
        "ops could not be told apart",
        "_opname",
        "_overloadname",
        "_schema",
    ),
    *_of(
        "torch._C",
        "FunctionSchema",
        "torch/_C/__init__.pyi",
        "views could not be told from other ops",
        "_is_view_op",
    ),
    *_of(
        "torch._C",
        "",
        "torch/csrc/Module.cpp",
        "what C++ keeps could not be asked or emptied",
        "_clear_DTensor_sharding_propagator_cache",
        "_storage_Use_Count",
    ),
    *_of(
        "torch._C",
        "",
        "torch/csrc/autograd/init.cpp",
        "what autograd makes itself could not be told from what a program mixes",
        "_current_autograd_node",
    ),
    *_of(
        "torch._C",
        "",
        "torch/csrc/utils/python_dispatch.cpp",
        "ops that torch takes apart could not be met before",
        "_ExcludeDispatchKeyGuard",
        "_after_ADInplaceOrView_keyset",
        "_dispatch_has_kernel_for_dispatch_key",
        "_dispatch_keys",
        "_dispatch_tls_is_dispatch_key_excluded",
    ),
    *_of(
        "torch._C",
        "",
        "torch/csrc/utils/python_dispatch.cpp",
        "whether a program is traced could not be asked about each op in little time",
        "_dispatch_tls_is_dispatch_key_included",
        "_get_dispatch_mode",
    ),
    *_of(
        "torch._C",
        "",
        "torch/csrc/autograd/init.cpp",
        "collectives would take the host twice as long",
        "_AutoDispatchBelowAutograd",
    ),
    *_of(
        "torch._ops",
        "OpOverload",
        "torch/_ops.py",
        "ops that a traced generator calls could not be taken apart",
        "_can_decompose",
    ),
    *_of(
        "torch.autograd.graph",
        "Node",
        "torch/autograd/graph.py",
        "values that are written by a mask would have no gradient",
        "_input_metadata",
    ),
    *_of(
        "torch.autograd.graph",
        "Node",
        "torch/csrc/autograd/python_cpp_function.cpp",
        "gradients could not be put under the line that they are of",
        "_sequence_nr",
    ),
    *_of(
        "torch.fx",
        "GraphModule",
        "torch/fx/graph_module.py",
        "collectives of a graph could not be put under the line that they were traced from",
        "_lineno_map",
    ),
    *_of(
        "torch.library",
        "Library",
        "torch/library.py",
        "a kernel could not be taken back",
        "_destroy",
    ),
    *_of(
        "torch",
        "UntypedStorage",
        "torch/storage.py",
        "views of one storage could not be told",
        "_cdata",
    ),
    *_of(
        "torch",
        "Tensor",
        "torch/_tensor.py",
        "writes to a tensor could not be noticed",
        "_base",
        "_version",
    ),
)
