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
    why="torch caches the placements of an op in C++, in a separate cache for each thread. A "
    "thread cannot clear the cache of another thread. For each op, this dict says which "
    "arguments are part of the key in the cache. The package replaces the entries of this dict, "
    "so an op has another key than in torch. If the program then switches the package on or off, "
    "no thread finds placements that the other rules computed.",
    test="tests/dtensor/switch/test_switching.py::test_other_threads_do_not_serve_what_they_cached",
    entries="schema infos of ops",
)
SCHEMA_INFOS_OF_ONE_DIM = Patch(
    **_RULES,
    attribute=f"{_PROPAGATOR}.op_to_schema_info_for_single_dim_strategy",
    why="This dict has the same use as `op_to_schema_info`, which the section above describes. "
    "Its entries are for ops whose rule in torch describes one mesh dim, and is applied to each "
    "mesh dim.",
    test="tests/dtensor/replaced/test_patches.py::test_ops_are_told_apart_by_all_their_keywords",
    entries="schema infos of ops with a rule of one mesh dim",
)

# -- ops beside views: propagator and dispatcher ---------------------------------------------------

PROPAGATION = Patch(
    module=_TENSOR,
    attribute=f"{_PROPAGATOR}.propagate_op_sharding_non_cached",
    file="torch/distributed/tensor/_sharding_prop.py",
    why="torch's rules give wrong results for some _StridedShard placements, and for averages "
    "over shards of different sizes. With this package, the method first applies the rules of the "
    "package. It uses a rule of torch only for ops and placements for which the rule is correct.",
    until="`tests/dtensor/decide/test_ops.py` passes with the setting `ops=False`",
    test="tests/dtensor/decide/test_ops.py::test_free_dims_carry_any_cut",
    lacking="ops would also run on placements for which torch's rules are wrong",
)
HANDLERS = Patch(
    module=_TENSOR,
    attribute="DTensor._op_dispatcher._custom_op_handlers",
    file="torch/distributed/tensor/_dispatch.py",
    why="If an op has an entry in this dict, DTensor calls the entry instead of the propagator. "
    "torch has entries for convolutions, argmin and argmax, and the package wraps these entries. "
    "The package also adds entries:\n\n"
    "- For ops that write to an argument although torch's dispatcher does not notice it. Batch "
    "norms are an example.\n"
    "- For squeeze_, t_, transpose_ and unsqueeze_, which torch does not handle correctly.\n"
    "- For operators such as __rshift__, which torch treats as in-place ops.\n"
    "- For ops to which autograd passes plain tensors of zeros together with DTensors.\n\n"
    "All other ops still go to the propagator.",
    until="torch handles all of these ops correctly",
    test="tests/dtensor/decide/test_local_results.py::test_turns_in_place",
    lacking="ops would skip the rules of this package",
    entries="the handler of {}",
)
LOSSES = Patch(
    module=_TENSOR + ".parallel.loss",
    attribute="customized_loss_ops",
    file="torch/distributed/tensor/parallel/loss.py",
    entries="the handler of {}",
    why="Inside loss_parallel, torch computes losses by the functions in this dict. These "
    "functions raise an error for strided shards, and for targets that are sharded differently "
    "from the logits. Slices and views of this package can return such placements, where torch "
    "would replicate. So the package first redistributes the logits and the targets.",
    until="loss_parallel redistributes its inputs to placements that it supports",
    test="tests/dtensor/replaced/test_given_placements.py::test_loss_parallel_of_next_tokens",
)
LOCAL_MAP = Patch(
    module=_TENSOR + ".experimental._func_map",
    attribute="_local_map_wrapped",
    file="torch/distributed/tensor/experimental/_func_map.py",
    why="local_map raises an error if the placements of an input differ from in_placements. "
    "Slices and views of this package keep shards where torch replicates. So the package gathers "
    "an input if local_map needs a replica of the input. For uneven shards, torch also computes a "
    "wrong global size of the result: it multiplies the number of rows of one rank by the number "
    "of ranks. With this package, the ranks exchange their sizes.",
    until="local_map redistributes its inputs by default, and computes the global size of uneven "
    "shards correctly",
    test="tests/dtensor/replaced/test_given_placements.py::test_local_map_of_what_stays_cut",
)
DISTRIBUTE = Patch(
    module=_TENSOR + "._api",
    attribute="distribute_tensor.__code__",
    file="torch/distributed/tensor/_api.py",
    why="The package changes what distribute_tensor does in four cases:\n\n"
    "- The input is a DTensor with other placements than the program requests. torch raises an "
    "error. If a gather gives the requested placements, the package gathers the input.\n"
    "- The program requests an uneven strided shard. torch raises an error, and the package "
    "distributes the tensor.\n"
    "- Split factors encode an order of mesh dims. torch ignores the order, and the package uses "
    "it.\n"
    "- The ranks of the mesh are not in ascending order. torch sends shards to the wrong ranks. "
    "The package sends shard n to the rank at mesh coordinate n.\n\n"
    "Programs import the function by name, so the package replaces the code inside the function "
    "object.",
    until="distribute_tensor is correct in all of these cases",
    test="tests/dtensor/replaced/test_given_placements.py::test_distributing_what_stays_cut",
)
COMPOSITES = Patch(
    module="torch.library",
    attribute="_impls",
    file="torch/library.py",
    why="torch decomposes tensor_split into slices before DTensor gets the op, so each slice "
    "would communicate by itself. With this package, all slices of a tensor_split share one "
    "exchange. For this, the package adds a kernel at the dispatch key PythonTLSSnapshot, which "
    "only tensors of Python subclasses have. The kernel plans the exchange, and then decomposes "
    "the op as torch does.",
    until="torch passes tensor_split to DTensor as one op",
    test="tests/dtensor/decide/test_tensor_split.py::test_parts_are_what_slices_are",
    entries="the kernel of {}",
)
TAIL = Patch(
    module=_TENSOR + "._dispatch",
    attribute="OpDispatcher._dispatch_fast_path_python_tail.__code__",
    file="torch/distributed/tensor/_dispatch.py",
    why="A slice of a sharded dim is a copy: torch replicates the input, and slices the replica. "
    "If a program writes to the slice, torch loses the write. The package adds statements to the "
    "beginning of this function, which apply such writes to the sliced tensor. C++ keeps a "
    "reference to the function object, so the package replaces the code inside this object. If "
    "torch's Python sources are missing, the package logs a warning and leaves the function "
    "unchanged.",
    until="a write to a slice of a sharded dim changes the sliced tensor in torch, or torch "
    "raises an error",
    test="tests/dtensor/extras/test_writes.py::test_writes_reach_what_is_viewed",
    lacking="writes to slices would be lost",
)

LOCAL_TENSOR = Patch(
    module=_TENSOR,
    attribute="DTensor._local_tensor",
    file="torch/distributed/tensor/_api.py",
    why="A slice of a sharded dim is a copy. If a program later writes to the sliced tensor, the "
    "copy still has the old values. While such copies exist, the package replaces this attribute "
    "by a property. When the program reads the local tensor of a copy, the property first updates "
    "the copy. At all other times, torch's own attribute stays in place, because every op reads "
    "the attribute, and a property is slower.",
    until="a slice of a sharded dim is no copy in torch, or torch raises an error if a program "
    "writes to the sliced tensor",
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
    "from_local call it, and the dispatcher calls it for the arguments of ops. With this package, "
    "the function runs the steps that the package plans. All callers import the function by name, "
    "so the package replaces the code inside the function object.",
    test="tests/dtensor/run/test_redistribute.py::test_every_missing_element_moves_once",
)
REDISTRIBUTE_ARGUMENTS = Patch(
    **_MOVES,
    module=_TENSOR + "._dispatch",
    attribute="OpDispatcher.redistribute_local_args",
    file="torch/distributed/tensor/_dispatch.py",
    why="The dispatcher calls this method to redistribute the arguments of an op. torch does not "
    "redistribute keyword arguments, such as masks. With this package, the method also "
    "redistributes keyword arguments, and the package plans all of these redistributions.",
    test="tests/dtensor/decide/test_attention.py::test_a_mask_is_brought_where_it_is_needed",
)

# -- DTensors in compiled programs -----------------------------------------------------------------

UNFLATTEN = Patch(
    module=_TENSOR,
    attribute="DTensor.__tensor_unflatten__",
    file="torch/distributed/tensor/_api.py",
    why="A compiled program makes DTensors from local tensors by this method. In torch, it has "
    "three faults:\n\n"
    "- torch reads some _StridedShard placements of views as an order of mesh dims, so a DTensor "
    "with these placements cannot enter or leave a compiled program.\n"
    "- torch makes a new symbol for each size of a local tensor, although the global size and the "
    "placements determine the local size.\n"
    "- torch may load a graph from disk that another rank compiled for other local sizes. If "
    "ranks may hold different numbers of rows, the package stores a separate graph for each "
    "rank.\n\n"
    "With this package, the method does not have these faults.",
    until="torch does not have these faults",
    test="tests/dtensor/compiled/test_views_returned.py"
    "::test_what_a_view_made_goes_into_a_compiled_program",
)
LOCAL_SHAPES = Patch(
    module=_TENSOR + "._sharding_prop",
    attribute="compute_local_shape_and_global_offset",
    file="torch/distributed/tensor/_utils.py",
    why="This function computes local sizes from global sizes. If the global sizes are symbols, "
    "torch adds guards for this computation. With this package, the function adds no guards.",
    until="torch computes local sizes from symbols without guards",
    test="tests/dtensor/compiled/test_compiled.py"
    "::test_sequences_that_divide_and_others_have_one_graph",
)
LOCAL_ORDERS = Patch(
    module=_TENSOR + "._utils",
    attribute="_compute_local_shape_and_global_offset",
    file="torch/distributed/tensor/_utils.py",
    why="torch uses this function to compute the local sizes of new tensors, for example of zeros "
    "and new_zeros. The function shards by the mesh dims from left to right. But split factors "
    "may encode another order of the mesh dims, and a redistribution uses this encoded order. For "
    "uneven shards, the two orders give different local sizes. With this package, the function "
    "also uses the encoded order.",
    until="torch uses one order of mesh dims for new tensors and for redistributions",
    test="tests/dtensor/door/test_reading.py::test_what_is_made_has_the_sizes_of_the_order",
)
EXPANSION = Patch(
    module=_TENSOR + "._sharding_prop",
    attribute="_expand_single_dim_strategy_to_mesh",
    file="torch/distributed/tensor/_ops/single_dim_strategy.py",
    why="torch compares the costs of all combinations of placements that the inputs of an op "
    "could have, even if the inputs can keep their placements. Each comparison adds guards on "
    "symbolic sizes. For _StridedShard placements, each comparison also needs a search, and a "
    "mesh of three dims has about a thousand combinations. So with torch 2.14 and later, detach "
    "of such a tensor takes half a minute. This package first tries the placements that the "
    "inputs already have.",
    until="torch first tries the placements that the inputs have, or computes the costs of "
    "_StridedShard placements without a search",
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
    why="This method lists the boxes of a DTensor that a rank saves in a checkpoint. A box has "
    "consecutive rows in each dim. torch lists one box for each rank, but the rows of a strided "
    "shard may form several boxes. With this package, the method lists one box for each run of "
    "consecutive rows.",
    test="tests/dtensor/extras/test_state.py::test_checkpoints",
)
LOADED = Patch(
    **_BOXES,
    module=_TENSOR,
    attribute="DTensor.__create_chunk_list__",
    file="torch/distributed/tensor/_api.py",
    why="This method lists the boxes of a DTensor that a rank loads from a checkpoint. A box has "
    "consecutive rows in each dim. torch lists one box for each rank. With this package, the "
    "method lists one box for each run of consecutive rows of a strided shard.",
    test="tests/dtensor/extras/test_state.py::test_checkpoints",
)
PARTS = Patch(
    **_BOXES,
    module=_TENSOR,
    attribute="DTensor.__get_tensor_shard__",
    file="torch/distributed/tensor/_api.py",
    why="A checkpoint stores a DTensor as boxes. A box has consecutive rows in each dim. For one "
    "box, this method returns the elements of the local tensor that are in the box. With this "
    "package, the method also accepts the boxes of strided shards.",
    test="tests/dtensor/extras/test_state.py::test_checkpoints",
)
STATE_DICTS = Patch(
    module="torch.distributed._state_dict_utils",
    attribute="_distribute_tensors",
    file="torch/distributed/_state_dict_utils.py",
    why="If a program broadcasts a whole state dict to all ranks, this function takes the part of "
    "each tensor that a rank keeps. torch takes one box of consecutive rows, but the rows of a "
    "strided shard may form several boxes. With this package, the function takes all of these "
    "boxes.",
    until="torch keeps all runs of rows of a strided shard",
    test="tests/dtensor/extras/test_state.py::test_state_dicts",
)
PICTURES = Patch(
    module=_TENSOR + ".debug._visualize_sharding",
    attribute="visualize_sharding.__code__",
    file="torch/distributed/tensor/debug/_visualize_sharding.py",
    why="visualize_sharding draws which device holds which elements. torch draws only one box for "
    "each device, even if the elements of a strided shard form several boxes. With this package, "
    "the function draws all boxes. Programs import the function by name, so the package replaces "
    "the code inside the function object.",
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
    why="torch can store a rule for a pair of an op and a tensor class, and applies the rule "
    "before it calls the class. This function finds the rule. While communication is recorded, "
    "the function returns a rule for every op on a DTensor. This rule records the op, and then "
    "lets DTensor run it. C++ keeps a reference to the function object, so the package replaces "
    "the code inside this object.",
    test="tests/dtensor/profile/test_watching.py::test_ops_are_seen_as_dtensor_answers_them",
)
CALLS = Patch(
    **_WATCHED,
    module="torch._ops",
    attribute="OpOverload._op",
    file="torch/_ops.py",
    why="When Python calls an op, torch calls the function that this attribute of the op holds. "
    "While communication is recorded, the attribute of each functional collective holds a "
    "function of the package. This function records the bytes that the collective sends, and then "
    "runs the collective as torch does. (A kernel of the dispatcher could record the same bytes, "
    "but would take ten times as long.)",
    test="tests/dtensor/profile/test_watching.py::test_collectives_of_all_kinds_are_seen_once",
    entries="the caller of {}",
)
KERNELS = Patch(
    **_WATCHED,
    module="torch.library",
    attribute="_impls",
    file="torch/library.py",
    why="C++ runs all collectives that are not functional. Examples are the collectives of "
    "torch.distributed, and those by which DistributedDataParallel reduces gradients. Each call "
    "passes the dispatch key ADInplaceOrView, for which torch has no kernel. While communication "
    "is recorded, the package adds a kernel for this key. The kernel records the bytes, and then "
    "calls torch's kernel.",
    test="tests/dtensor/profile/test_watching.py::test_collectives_of_all_kinds_are_seen_once",
    entries="the kernels of {}",
)
GROUPS = Patch(
    **_WATCHED,
    module="torch.distributed",
    attribute="ProcessGroup",
    file="torch/csrc/distributed/c10d/init.cpp",
    why="In inference mode, tensors do not have the dispatch key ADInplaceOrView, so the kernels "
    "that record bytes (see `torch.library._impls` above) would not run. While communication is "
    "recorded, each method of ProcessGroup that starts a collective adds this key to the call.",
    test="tests/dtensor/profile/test_watching.py::test_collectives_of_inference_are_seen",
    entries="the method {}",
)
_OF_FUNCTIONS = "BackwardCFunction"
NODES = Patch(
    **_WATCHED,
    module="torch.autograd.function",
    attribute=f"{_OF_FUNCTIONS}.__init__",
    file="torch/autograd/function.py",
    why="Autograd makes a context object for each call of an autograd.Function that is written in "
    "Python. A redistribution of a DTensor is such a call. While communication is recorded, this "
    "constructor also notes which line of the program made the call. A report then names this "
    "line for the communication of the backward pass.",
    test="tests/dtensor/profile/test_watching.py::test_gradients_of_functions_have_their_own_lines",
)

WATCHED = (CLASS_RULES, CALLS, KERNELS, GROUPS, NODES)
