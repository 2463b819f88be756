"""The table of private names of torch that are called or read, and not replaced.

If a torch lacks one, enabling the package refuses it by name, rather than an AttributeError half
way through a program. A test reads the adapter's sources: every private attribute of torch in them
is a row here or in :mod:`.patches`. (Names that are imported need no row: the import says what is
missing.)
"""

from __future__ import annotations

from typing import Any

from cute_sharding.dtensor.replaced.patch import Name

__all__ = ["TABLE", "Used"]


class Used(Name):
    """A name that is called or read. It may be an attribute that objects get when they are made."""

    def is_lacking(self) -> bool:
        name = self.attribute.rpartition(".")[2]
        return self.found() is None and not _is_set_on_objects(self.owner(), name)


def _is_set_on_objects(kind: Any, name: str) -> bool:
    """Whether objects of a class have the attribute: it is declared, or a method names it."""
    return any(
        name in vars(base).get("__annotations__", {})
        or any(name in getattr(method, "__code__", _NO_CODE).co_names for method in _methods(base))
        for base in getattr(kind, "__mro__", ())
    )


_NO_CODE = (lambda: None).__code__


def _methods(kind: type) -> list[Any]:
    return [getattr(value, "__func__", value) for value in vars(kind).values()]


def _rows_of(module: str, owner: str, lacking: str, names: str) -> list[Used]:
    """Rows of one owner; "" is the module itself."""
    before = f"{owner}." if owner else ""
    return [Used(module, f"{before}{name}", lacking=lacking) for name in names.split()]


_TENSOR = "torch.distributed.tensor"

# (module, owner, why a torch without these names cannot be used, the names)
_ROWS = (
    (_TENSOR, "DTensor", "a DTensor is made of it", "_local_tensor _op_dispatcher _spec"),
    (
        _TENSOR,
        "DTensor._op_dispatcher",
        "ops could not be run past torch's cache",
        "_dispatch_get_local_results_slow_path "
        "_propagate_op_sharding_dispatch_slow_path _random_ops",
    ),
    (
        _TENSOR,
        "DTensor._op_dispatcher.sharding_propagator",
        "answers could not be given in torch's form",
        "_adjust_shape_and_stride_args _adjust_squeeze_to_global_singletons "
        "_propagate_tensor_meta_non_cached _wrap_with_op_strategy",
    ),
    (
        _TENSOR + "._sharding_prop",
        "",
        "tensors that are passed by keyword could not be redistributed as their op's rule says",
        "_select_min_cost_strategy",
    ),
    (
        _TENSOR + "._dtensor_spec",
        "DTensorSpec",
        "split factors could not be read as a shard order",
        "_maybe_convert_StridedShard_to_shard_order",
    ),
    (
        _TENSOR + ".placement_types",
        "Shard",
        "parts of different sizes could not be scattered",
        "_maybe_unpad_tensor_with_sizes _split_tensor",
    ),
    (
        _TENSOR + ".placement_types",
        "Replicate",
        "replicas could not be distributed",
        "_make_replicate_tensor",
    ),
    (
        _TENSOR + ".placement_types",
        "Partial",
        "pending reductions could not be finished",
        "_partition_value _reduce_shard_value _reduce_value",
    ),
    (
        _TENSOR + "._redistribute",
        "",
        "the process groups of flattened meshes could not be found",
        "_get_flattened_mesh_by_layout_impl",
    ),
    (
        "torch.distributed.device_mesh",
        "DeviceMesh",
        "the ranks of a mesh could not be read",
        "_dim_group_names _flatten_mapping _get_root_mesh "
        "_is_current_rank_part_of_mesh _layout _rank_map",
    ),
    (
        "torch.distributed.distributed_c10d",
        "",
        "the process groups of a mesh could not be found",
        "_new_process_group_helper _resolve_process_group _world",
    ),
    (
        "torch.distributed",
        "ProcessGroup",
        "the backend of a process group could not be told",
        "_get_backend",
    ),
    (
        "torch.distributed._local_tensor",
        "LocalTensor",
        "programs of all ranks in one process could not be run",
        "_local_tensors",
    ),
    (
        "torch.distributed._local_tensor",
        "LocalIntNode",
        "what each rank sends, where all run in one process, could not be told",
        "_local_ints",
    ),
    (
        "torch._ops",
        "OpOverload",
        "ops could not be told apart, or taken apart",
        "_can_decompose _op _opname _overloadname _schema",
    ),
    ("torch._C", "FunctionSchema", "views could not be told from other ops", "_is_view_op"),
    (
        "torch._C",
        "",
        "what C++ keeps and does could not be asked",
        "_AutoDispatchBelowAutograd _DisableFuncTorch _DisableTorchDispatch "
        "_ExcludeDispatchKeyGuard _IncludeDispatchKeyGuard _SetExcludeDispatchKeyGuard "
        "_clear_DTensor_sharding_propagator_cache "
        "_current_autograd_node _dispatch_get_all_op_names "
        "_dispatch_has_kernel_for_dispatch_key _dispatch_keys _dispatch_keyset_full_after "
        "_dispatch_tls_is_dispatch_key_excluded _dispatch_tls_is_dispatch_key_included "
        "_dispatch_tls_set_dispatch_key_excluded _get_dispatch_mode _get_obj_in_tls "
        "_get_schema _is_key_in_tls _is_view_replay_enabled _set_view_replay_enabled "
        "_len_torch_dispatch_stack _stash_obj_in_tls _storage_Use_Count",
    ),
    (
        "torch.autograd.graph",
        "Node",
        "what a node of autograd is about could not be told",
        "_input_metadata _sequence_nr",
    ),
    (
        "torch.fx",
        "GraphModule",
        "collectives of a graph could not be put under the line that they were traced from",
        "_lineno_map",
    ),
    ("torch.library", "Library", "a kernel could not be taken back", "_destroy"),
    ("torch", "UntypedStorage", "views of one storage could not be told", "_cdata"),
    ("torch", "Tensor", "writes to a tensor could not be noticed", "_base _version"),
    ("torch", "Tensor", "views could not be made again", "_view_func_unsafe"),
    (
        "torch",
        "Tensor",
        "a DTensor could not begin at offset 0, or have zeros for a tangent",
        "_is_zerotensor _make_subclass _make_wrapper_subclass _neg_view",
    ),
    ("torch", "", "there could be no zeros for a tangent", "_efficientzerotensor"),
    ("torch.autograd.forward_ad", "", "zeros for a tangent could not be told", "_current_level"),
    ("torch", "", "parts of an input could not be told to be views", "_functionalize_unsafe_set"),
)

TABLE: tuple[Used, ...] = tuple([name for row in _ROWS for name in _rows_of(*row)])
