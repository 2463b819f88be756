"""The table of what is replaced in torch: every attribute, and every dict of which entries are.
Rows of the compiler are in :mod:`.compiler_patches`; names that are called and not replaced are in
:mod:`.used`.

The file of this room that names a row installs it (docs/patches.md says which); ``extras/state.py``
makes the replacements for rows about state dicts. Every supported release needs every row.

Only rows of this table are replaced (a test compares all of torch before, while and after); the
replacement is made where the row is used. docs/patches.md is generated from this table.

Beside it, caches are emptied (:func:`.registry.clear_propagation_caches`), and torch's plans come
from a fresh planner (:func:`.redistribution_hook.stock_transforms`), which is gone after the call.
"""

from __future__ import annotations

from typing import Any

from cute_sharding.dtensor.replaced import compiler_patches
from cute_sharding.dtensor.replaced.patch import Patch

_TENSOR = "torch.distributed.tensor"
_PROPAGATOR = "DTensor._op_dispatcher.sharding_propagator"

# -- placements of views: the propagator's registries ----------------------------------------------

_NO_RULES = "torch would not find the rules of this package"
_RULES: dict[str, Any] = {
    "module": _TENSOR,
    "file": "torch/distributed/tensor/_sharding_prop.py",
    "until": "torch's own rules are exact for all placements",
    "lacking": _NO_RULES,
}

SCHEMA_INFOS = Patch(
    **_RULES,
    attribute=f"{_PROPAGATOR}.op_to_schema_info",
    why="torch caches the placements of an op in C++, separately for each thread. For each op, "
    "this dict names the arguments that are part of the cache key. This package adds a "
    "keyword that no call passes to each entry, so its cache keys differ from torch's. When "
    "the program switches the package on or off, no thread finds placements that the other "
    "rules computed.",
    test="tests/dtensor/switch/test_switching.py::test_other_threads_do_not_serve_what_they_cached",
    entries="schema infos of ops",
)
SCHEMA_INFOS_OF_ONE_DIM = Patch(
    **_RULES,
    attribute=f"{_PROPAGATOR}.op_to_schema_info_for_single_dim_strategy",
    why="This dict has the same use as op_to_schema_info, but for ops whose rule covers only "
    "one mesh dim. The dict op_to_schema_info has all other ops.",
    test="tests/dtensor/replaced/test_patches.py::test_ops_are_told_apart_by_all_their_keywords",
    entries="schema infos of ops with a rule of one mesh dim",
)

# -- ops beside views: propagator and dispatcher ---------------------------------------------------

PROPAGATION = Patch(
    module=_TENSOR,
    attribute=f"{_PROPAGATOR}.propagate_op_sharding_non_cached",
    file="torch/distributed/tensor/_sharding_prop.py",
    why="torch's rules give wrong results for some _StridedShard placements, and for averages "
    "over shards of different sizes. The package first applies its own rules. It uses "
    "torch's rules only for ops and placements for which torch is correct.",
    until="`tests/dtensor/decide/test_ops.py` passes with the setting `ops=False`",
    test="tests/dtensor/decide/test_ops.py::test_free_dims_carry_any_cut",
    lacking="ops would also run on placements for which torch's rules are wrong",
)
HANDLERS = Patch(
    module=_TENSOR,
    attribute="DTensor._op_dispatcher._custom_op_handlers",
    file="torch/distributed/tensor/_dispatch.py",
    why="If an op has an entry in this dict, DTensor calls the entry instead of the propagator. "
    "torch has entries for convolutions, argmin and argmax, which this package wraps. The "
    "package adds entries for batch norms and max(dim, out=), because they write to "
    "arguments although their schemas do not say so. It also adds entries for squeeze_, t_, "
    "transpose_ and unsqueeze_; for ops by which autograd makes zeros; and for ops such as "
    "__rshift__, which torch treats as in-place ops.",
    until="each op has a rule in the propagator, schemas name all arguments that ops write to, "
    "and autograd fills in a missing gradient of a DTensor with a DTensor of zeros",
    test="tests/dtensor/decide/test_local_results.py::test_turns_in_place",
    lacking="ops would skip the rules of this package",
    entries="the handler of {}",
)
LOSSES = Patch(
    module=_TENSOR + ".parallel.loss",
    attribute="customized_loss_ops",
    file="torch/distributed/tensor/parallel/loss.py",
    entries="the handler of {}",
    why="loss_parallel uses the functions in this dict. They raise an error for strided shards, "
    "and for targets that are sharded differently from the logits. Slices and views of this "
    "package can return such placements, where torch would return replicas. The package "
    "replaces the functions once the program imports torch's module.",
    until="loss_parallel redistributes its inputs to placements that it supports",
    test="tests/dtensor/replaced/test_given_placements.py::test_loss_parallel_of_next_tokens",
)
LOCAL_MAP = Patch(
    module=_TENSOR + ".experimental._func_map",
    attribute="_local_map_wrapped",
    file="torch/distributed/tensor/experimental/_func_map.py",
    why="local_map raises an error if the placements of an input differ from in_placements. "
    "Slices and views of this package keep shards where torch replicates, so the package "
    "redistributes the inputs first. For uneven shards, torch also computes a wrong global "
    "size: it multiplies the number of rows of one rank by the number of ranks. The package "
    "replaces local_map once the program imports it.",
    until="local_map redistributes its inputs by default, and computes the global size of uneven "
    "shards correctly",
    test="tests/dtensor/replaced/test_given_placements.py::test_local_map_of_what_stays_cut",
)
DISTRIBUTE = Patch(
    module=_TENSOR + "._api",
    attribute="distribute_tensor.__code__",
    file="torch/distributed/tensor/_api.py",
    why="If distribute_tensor gets a DTensor whose placements differ from the requested "
    "placements, torch raises an error, and this package redistributes. For uneven strided "
    "shards, torch raises an error. torch also ignores the order of mesh dims that split "
    "factors encode. And torch sends shard n to rank n instead of the rank at mesh "
    "coordinate n. Programs import the function by name, so the package replaces the code "
    "inside the function object.",
    until="distribute_tensor redistributes a DTensor, pads strided shards, and sends each shard "
    "to the rank at its mesh coordinate",
    test="tests/dtensor/replaced/test_given_placements.py::test_distributing_what_stays_cut",
)
COMPOSITES = Patch(
    module="torch.library",
    attribute="_impls",
    file="torch/library.py",
    why="torch decomposes tensor_split into slices before DTensor gets the op. If DTensor gets "
    "tensor_split as one op, all parts can share one exchange. So the package adds a kernel "
    "at the dispatch key PythonTLSSnapshot, which only tensors of Python subclasses have. "
    "The kernel records the op, and then decomposes the op as torch does.",
    until="torch passes tensor_split to DTensor as one op",
    test="tests/dtensor/decide/test_tensor_split.py::test_parts_are_what_slices_are",
    entries="the kernel of {}",
)
TAIL = Patch(
    module=_TENSOR + "._dispatch",
    attribute="OpDispatcher._dispatch_fast_path_python_tail.__code__",
    file="torch/distributed/tensor/_dispatch.py",
    why="If a program writes to a slice of a sharded dim, torch loses the write: torch "
    "replicates the input of the slice, and only the copy changes. The package adds "
    "statements at the beginning of this function, which apply such writes to the sliced "
    "tensor. C++ keeps a reference to the function object, so the package replaces the code "
    "inside this object. If torch is installed without its Python sources, the package "
    "warns once and leaves the function unchanged.",
    until="a write to a view of a redistributed input reaches the input in torch, or torch raises "
    "an error",
    test="tests/dtensor/extras/test_writes.py::test_writes_reach_what_is_viewed",
    lacking="writes to slices would be lost",
)

LOCAL_TENSOR = Patch(
    module=_TENSOR,
    attribute="DTensor._local_tensor",
    file="torch/distributed/tensor/_api.py",
    why="A slice of a sharded dim is a copy. If a program later writes to the sliced tensor, "
    "the copy still has the old values. While such copies exist, this package replaces the "
    "attribute by a property, which updates a copy before the program reads it. Otherwise "
    "torch's own attribute stays in place, because every op reads the attribute and a "
    "property is slower.",
    until="torch makes no copies for slices, or raises an error if a program writes to a tensor "
    "that has such copies",
    test="tests/dtensor/extras/test_reads.py::test_what_is_read_is_what_was_written",
    lacking="a program would read old values from slices",
)

# -- redistribution --------------------------------------------------------------------------------

_MOVES: dict[str, Any] = {
    "until": "redistribute sends each missing element once, and is correct for every placement",
    "lacking": "the package could not plan redistributions",
}

REDISTRIBUTE = Patch(
    **_MOVES,
    module=_TENSOR + "._redistribute",
    attribute="redistribute_local_tensor.__code__",
    file="torch/distributed/tensor/_redistribute.py",
    why="This function redistributes a local tensor. DTensor.redistribute, full_tensor and "
    "from_local call it, and the dispatcher calls it for the arguments of ops. All callers "
    "import the function by name, so the package replaces the code inside the function "
    "object.",
    test="tests/dtensor/run/test_redistribute.py::test_every_missing_element_moves_once",
)
REDISTRIBUTE_ARGUMENTS = Patch(
    **_MOVES,
    module=_TENSOR + "._dispatch",
    attribute="OpDispatcher.redistribute_local_args",
    file="torch/distributed/tensor/_dispatch.py",
    why="The dispatcher calls this method to redistribute the arguments of an op. This package "
    "plans these redistributions, and also redistributes keyword arguments such as masks. "
    "torch does neither.",
    test="tests/dtensor/decide/test_attention.py::test_a_mask_is_brought_where_it_is_needed",
)

# -- DTensors in compiled programs -----------------------------------------------------------------

UNFLATTEN = Patch(
    module=_TENSOR,
    attribute="DTensor.__tensor_unflatten__",
    file="torch/distributed/tensor/_api.py",
    why="torch reads some _StridedShard placements of views as an order of mesh dims, so a "
    "DTensor with these placements cannot enter or leave a compiled program. torch also "
    "makes a new symbol for each size of a local tensor, although the placements determine "
    "the size. And torch may load a graph from disk that a rank with different local sizes "
    "compiled. If ranks may hold different numbers of rows, this package stores a separate "
    "graph for each rank.",
    until="the context of __tensor_flatten__ says how to read _StridedShard placements, and keys "
    "of graphs include the sizes of local tensors",
    test="tests/dtensor/compiled/test_views_returned.py"
    "::test_what_a_view_made_goes_into_a_compiled_program",
)
LOCAL_SHAPES = Patch(
    module=_TENSOR + "._sharding_prop",
    attribute="compute_local_shape_and_global_offset",
    file="torch/distributed/tensor/_utils.py",
    why="When torch computes local sizes from symbolic global sizes, it adds guards. With this "
    "package, the computation adds no guards.",
    until="torch computes local shapes of SymInts without guards",
    test="tests/dtensor/compiled/test_compiled.py"
    "::test_sequences_that_divide_and_others_have_one_graph",
)
LOCAL_ORDERS = Patch(
    module=_TENSOR + "._utils",
    attribute="_compute_local_shape_and_global_offset",
    file="torch/distributed/tensor/_utils.py",
    why="Factory functions (such as zeros) and new_zeros compute the local sizes of uneven "
    "strided shards from left to right over the mesh dims. If split factors encode another "
    "order of mesh dims, a redistribution uses the encoded order, and its local sizes "
    "differ. With this package, both use the encoded order.",
    until="factories and redistribution compute local shapes in the same order",
    test="tests/dtensor/door/test_reading.py::test_what_is_made_has_the_sizes_of_the_order",
)
EXPANSION = Patch(
    module=_TENSOR + "._sharding_prop",
    attribute="_expand_single_dim_strategy_to_mesh",
    file="torch/distributed/tensor/_ops/single_dim_strategy.py",
    why="torch compares the costs of all combinations of placements that the inputs of an op "
    "could have, even if the inputs can keep their placements. Each cost adds guards on "
    "symbolic sizes. For _StridedShard placements, each cost needs a search, and a mesh of "
    "three dims has about a thousand combinations. So detach takes half a minute from torch "
    "2.14 on. This package first tries the placements that the inputs already have.",
    until="torch first tries the placements that the inputs have, or plans for _StridedShard "
    "without a search",
    test="tests/dtensor/decide/test_strategies.py"
    "::test_an_op_on_what_a_view_made_is_not_weighed_against_"
    "every_other_placement",
)

# -- checkpoints, state dicts, pictures ------------------------------------------------------------

_BOXES: dict[str, Any] = {
    "until": "torch describes a strided shard by its runs of rows",
    "lacking": "checkpoints of _StridedShard tensors would be wrong without an error",
}

SAVED = Patch(
    **_BOXES,
    module=_TENSOR,
    attribute="DTensor.__create_write_items__",
    file="torch/distributed/tensor/_api.py",
    why="This method lists the part of a DTensor that a rank saves in a checkpoint. torch lists "
    "one box, but the rows of a strided shard may form several boxes. With this package, "
    "the method lists one box for each run of consecutive rows.",
    test="tests/dtensor/extras/test_state.py::test_checkpoints",
)
LOADED = Patch(
    **_BOXES,
    module=_TENSOR,
    attribute="DTensor.__create_chunk_list__",
    file="torch/distributed/tensor/_api.py",
    why="This method lists the part of a DTensor that a rank loads from a checkpoint. With this "
    "package, the method lists one box for each run of consecutive rows.",
    test="tests/dtensor/extras/test_state.py::test_checkpoints",
)
PARTS = Patch(
    **_BOXES,
    module=_TENSOR,
    attribute="DTensor.__get_tensor_shard__",
    file="torch/distributed/tensor/_api.py",
    why="For one box of a checkpoint, this method returns the part of the local tensor. With "
    "this package, the method also accepts the boxes of strided shards.",
    test="tests/dtensor/extras/test_state.py::test_checkpoints",
)
STATE_DICTS = Patch(
    module="torch.distributed._state_dict_utils",
    attribute="_distribute_tensors",
    file="torch/distributed/_state_dict_utils.py",
    why="After all ranks have received a whole state dict, each rank keeps its own part by this "
    "function. torch keeps one box, but the rows of a strided shard may form several boxes. "
    "The package replaces the function once the program imports it.",
    until="torch keeps all runs of rows of a strided shard",
    test="tests/dtensor/extras/test_state.py::test_state_dicts",
)
PICTURES = Patch(
    module=_TENSOR + ".debug._visualize_sharding",
    attribute="visualize_sharding.__code__",
    file="torch/distributed/tensor/debug/_visualize_sharding.py",
    why="visualize_sharding draws only one box for each device, even if a strided shard "
    "consists of several boxes. Programs import the function by name, so the package "
    "replaces the code inside the function object, once the program imports torch's module.",
    until="visualize_sharding draws several boxes for a device",
    test="tests/dtensor/extras/test_state.py::test_pictures_have_a_box_for_each_run",
)

TABLE = (
    *[row for row in list(globals().values()) if isinstance(row, Patch)],
    *compiler_patches.TABLE,
)

# -- while what a program sends is watched ---------------------------------------------------------

_WATCHED: dict[str, Any] = {
    "until": "PyTorch has a hook that reports collectives and ops of tensor subclasses",
    "lacking": "the package could not record all communication of a program",
}

CLASS_RULES = Patch(
    **_WATCHED,
    module="torch._library.simple_registry",
    attribute="find_torch_dispatch_rule.__code__",
    file="torch/_library/simple_registry.py",
    why="torch can store a rule for a pair of an op and a tensor class, and calls the rule "
    "before it calls the class. While communication is recorded, every op has a rule for "
    "DTensor, which records the op and then lets DTensor run it. C++ keeps a reference to "
    "this function, so the package replaces the code inside the function object.",
    test="tests/dtensor/profile/test_watching.py::test_ops_are_seen_as_dtensor_answers_them",
)
CALLS = Patch(
    **_WATCHED,
    module="torch._ops",
    attribute="OpOverload._op",
    file="torch/_ops.py",
    why="When Python calls an op, this attribute of the op runs. While communication is "
    "recorded, the attribute of each functional collective records the bytes that the "
    "collective sends, and then runs the collective as torch does. (A kernel of the "
    "dispatcher could record the same bytes, but would take ten times as long.)",
    test="tests/dtensor/profile/test_watching.py::test_collectives_of_all_kinds_are_seen_once",
    entries="the caller of {}",
)
KERNELS = Patch(
    **_WATCHED,
    module="torch.library",
    attribute="_impls",
    file="torch/library.py",
    why="C++ calls all collectives that are not functional: those of torch.distributed, and "
    "those of DistributedDataParallel for gradients. The calls pass the dispatch key "
    "ADInplaceOrView, for which torch has no kernel. While communication is recorded, the "
    "package adds a kernel for this key. The kernel records the bytes, and then continues "
    "to torch's kernel.",
    test="tests/dtensor/profile/test_watching.py::test_collectives_of_all_kinds_are_seen_once",
    entries="the kernels of {}",
)
GROUPS = Patch(
    **_WATCHED,
    module="torch.distributed",
    attribute="ProcessGroup",
    file="torch/csrc/distributed/c10d/init.cpp",
    why="In inference mode, tensors do not have the dispatch key ADInplaceOrView, so the "
    "kernels that record bytes (see torch.library._impls above) would not run. "
    "While communication is recorded, the methods of ProcessGroup add this key to the call.",
    test="tests/dtensor/profile/test_watching.py::test_collectives_of_inference_are_seen",
    entries="the method {}",
)
_OF_FUNCTIONS = "BackwardCFunction"
NODES = Patch(
    **_WATCHED,
    module="torch.autograd.function",
    attribute=f"{_OF_FUNCTIONS}.__init__",
    file="torch/autograd/function.py",
    why="Autograd makes a context object for each call of an autograd.Function that is written "
    "in Python. Redistributions are such functions. While communication is recorded, the "
    "package notes which line of the program made the call.",
    test="tests/dtensor/profile/test_watching.py::test_gradients_of_functions_have_their_own_lines",
)

WATCHED = (CLASS_RULES, CALLS, KERNELS, GROUPS, NODES)
