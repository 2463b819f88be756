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

_NO_RULES = "rules are looked up there, and ours would not be found"
_RULES: dict[str, Any] = {
    "module": _TENSOR,
    "file": "torch/distributed/tensor/_sharding_prop.py",
    "until": "it is what the package is for, unless torch's rules become exact",
    "lacking": _NO_RULES,
}

SCHEMA_INFOS = Patch(
    **_RULES,
    attribute=f"{_PROPAGATOR}.op_to_schema_info",
    why="This dict names the arguments by which torch caches a propagation, in C++ and for each "
    "thread. With this package, an entry also names a keyword that no call passes. So after "
    "the package is switched on or off, no thread finds cached answers of the other rules. For "
    "ops that torch decomposes, torch's own entries name no arguments.",
    test="tests/dtensor/switch/test_switching.py::test_other_threads_do_not_serve_what_they_cached",
    entries="schema infos of ops",
)
SCHEMA_INFOS_OF_ONE_DIM = Patch(
    **_RULES,
    attribute=f"{_PROPAGATOR}.op_to_schema_info_for_single_dim_strategy",
    why="This dict names the arguments of ops that have a rule for one mesh dim, as "
    "op_to_schema_info does for other ops.",
    test="tests/dtensor/replaced/test_patches.py::test_ops_are_told_apart_by_all_their_keywords",
    entries="schema infos of ops with a rule of one mesh dim",
)

# -- ops beside views: propagator and dispatcher ---------------------------------------------------

PROPAGATION = Patch(
    module=_TENSOR,
    attribute=f"{_PROPAGATOR}.propagate_op_sharding_non_cached",
    file="torch/distributed/tensor/_sharding_prop.py",
    why="torch's rules for ops beside views are wrong on some _StridedShard placements, and for "
    "averages over blocks of different sizes. The rules of this package decide first, and use "
    "torch's rules where these are right.",
    until="tests/dtensor/decide/test_ops.py passes with ops=False",
    test="tests/dtensor/decide/test_ops.py::test_free_dims_carry_any_cut",
    lacking="ops could not be kept from placements on which torch's rules are wrong",
)
HANDLERS = Patch(
    module=_TENSOR,
    attribute="DTensor._op_dispatcher._custom_op_handlers",
    file="torch/distributed/tensor/_dispatch.py",
    why="This dict has functions for single ops that skip the propagator. Convolutions, argmin and "
    "argmax have entries here. Batch norms and max(dim, out=) write to arguments without torch "
    "noticing. An "
    "in-place squeeze changes only the shape. t_, transpose_ and unsqueeze_ have no rule. "
    "Operators on bits end in _, so x >> 2 returns x. Some nodes of autograd make plain zeros, "
    "and torch raises an error for an op with such zeros; this package treats them as replicas.",
    until="each op has a rule in the propagator, and its schema says what it writes to; autograd "
    "makes what it needs as its gradients are",
    test="tests/dtensor/decide/test_local_results.py::test_turns_in_place",
    lacking="ops would go past the rules",
    entries="the handler of {}",
)
LOSSES = Patch(
    module=_TENSOR + ".parallel.loss",
    attribute="customized_loss_ops",
    file="torch/distributed/tensor/parallel/loss.py",
    entries="the handler of {}",
    why="The functions behind loss_parallel raise for strided shards, and for targets that are "
    "sharded differently from the logits. Slices and views of this package give such "
    "placements where torch gives replicas. The package replaces these functions once the "
    "program imports them.",
    until="loss_parallel takes what it is given to placements that it can do with",
    test="tests/dtensor/replaced/test_given_placements.py::test_loss_parallel_of_next_tokens",
)
LOCAL_MAP = Patch(
    module=_TENSOR + ".experimental._func_map",
    attribute="_local_map_wrapped",
    file="torch/distributed/tensor/experimental/_func_map.py",
    why="local_map raises an error if an input has other placements than local_map names. Slices "
    "and views of this package keep shards where torch replicates, so the package "
    "redistributes the input first. For uneven shards, torch also computes a wrong global "
    "size: the number of rows of one rank, times the number of ranks. The package replaces "
    "local_map once the program imports it.",
    until="local_map redistributes its inputs unless it is told not to, and knows uneven shards",
    test="tests/dtensor/replaced/test_given_placements.py::test_local_map_of_what_stays_cut",
)
DISTRIBUTE = Patch(
    module=_TENSOR + "._api",
    attribute="distribute_tensor.__code__",
    file="torch/distributed/tensor/_api.py",
    why="distribute_tensor raises an error for a DTensor with other placements, such as slices and "
    "views of this package have; the package redistributes it first. distribute_tensor also "
    "raises an error for strided shards of different sizes, and does not follow the order that "
    "split factors encode. And it gives the n-th shard to the n-th rank in ascending order, "
    "although placements mean the rank at coordinate n. "
    "Programs import the function by name, so it gets other code.",
    until="distribute_tensor redistributes a DTensor, pads strided shards, and orders what it "
    "scatters by the mesh's coordinates",
    test="tests/dtensor/replaced/test_given_placements.py::test_distributing_what_stays_cut",
)
COMPOSITES = Patch(
    module="torch.library",
    attribute="_impls",
    file="torch/library.py",
    why="A DTensor sees tensor_split as slices, because torch decomposes it first. If DTensor sees "
    "tensor_split as one op, all its parts share one exchange. A kernel at the dispatch key "
    "PythonTLSSnapshot, "
    "which only tensors of Python classes have, notes the op, and decomposes it as torch does.",
    until="DTensor meets tensor_split as one op",
    test="tests/dtensor/decide/test_tensor_split.py::test_parts_are_what_slices_are",
    entries="the kernel {}",
)
TAIL = Patch(
    module=_TENSOR + "._dispatch",
    attribute="OpDispatcher._dispatch_fast_path_python_tail.__code__",
    file="torch/distributed/tensor/_dispatch.py",
    why="Writes to slices of sharded dims are lost: torch replicates the input of the slice, and "
    "the write goes to the copy. This package lets the last step of an op follow such writes, "
    "by two tests at its beginning. C++ keeps the function from its first call on, so the "
    "package replaces its code. A torch without its sources keeps its own code, with one "
    "warning.",
    until="torch writes through views of redistributed inputs, or refuses to",
    test="tests/dtensor/extras/test_writes.py::test_writes_reach_what_is_viewed",
    lacking="writes could not be followed",
)

LOCAL_TENSOR = Patch(
    module=_TENSOR,
    attribute="DTensor._local_tensor",
    file="torch/distributed/tensor/_api.py",
    why="A slice of a sharded dim is a copy. If its source is written to while the slice exists, "
    "the slice has old values. While there are such copies, reading a local tensor first brings "
    "it up to date. At other times this is torch's own attribute, because every op reads it.",
    until="torch raises for writes to what has such slices, or gives none",
    test="tests/dtensor/extras/test_reads.py::test_what_is_read_is_what_was_written",
    lacking="slices that are kept would be read with old values",
)

# -- redistribution --------------------------------------------------------------------------------

_MOVES: dict[str, Any] = {
    "until": "redistribute moves each missing element once, and is right for every placement",
    "lacking": "nothing that redistributes there would come by here",
}

REDISTRIBUTE = Patch(
    **_MOVES,
    module=_TENSOR + "._redistribute",
    attribute="redistribute_local_tensor.__code__",
    file="torch/distributed/tensor/_redistribute.py",
    why="This function redistributes a local tensor, for DTensor.redistribute, full_tensor and "
    "from_local, and for the arguments of ops. All callers have imported the function by name, "
    "so the package replaces its code.",
    test="tests/dtensor/run/test_redistribute.py::test_every_missing_element_moves_once",
)
REDISTRIBUTE_ARGUMENTS = Patch(
    **_MOVES,
    module=_TENSOR + "._dispatch",
    attribute="OpDispatcher.redistribute_local_args",
    file="torch/distributed/tensor/_dispatch.py",
    why="This step of the dispatcher redistributes the arguments of an op. torch's step does not "
    "plan redistributions, and does not redistribute keyword arguments (masks).",
    test="tests/dtensor/decide/test_attention.py::test_a_mask_is_brought_where_it_is_needed",
)

# -- DTensors in compiled programs -----------------------------------------------------------------

UNFLATTEN = Patch(
    module=_TENSOR,
    attribute="DTensor.__tensor_unflatten__",
    file="torch/distributed/tensor/_api.py",
    why="A DTensor with _StridedShard placements that are no shard order, as views make them, "
    "cannot leave a compiled program or enter one, because torch reads them as an order. torch "
    "also makes a new symbol for each size of a local tensor, although the placements give "
    "this size. And torch may load from disk the graph of a rank with other sizes; this "
    "package keeps the graphs of ranks apart if ranks may hold different numbers of rows.",
    until="the context of __tensor_flatten__ tells how _StridedShard placements are to be read, "
    "and keys of graphs hold the sizes of local tensors",
    test="tests/dtensor/compiled/test_views_returned.py"
    "::test_what_a_view_made_goes_into_a_compiled_program",
)
LOCAL_SHAPES = Patch(
    module=_TENSOR + "._sharding_prop",
    attribute="compute_local_shape_and_global_offset",
    file="torch/distributed/tensor/_utils.py",
    why="torch adds guards when it computes local sizes from symbolic global sizes. This package "
    "adds no guards.",
    until="torch computes local shapes of SymInts without guards",
    test="tests/dtensor/compiled/test_compiled.py"
    "::test_sequences_that_divide_and_others_have_one_graph",
)
LOCAL_ORDERS = Patch(
    module=_TENSOR + "._utils",
    attribute="_compute_local_shape_and_global_offset",
    file="torch/distributed/tensor/_utils.py",
    why="Factories and new_zeros give uneven strided shards their sizes from left to right. If "
    "the split factors encode an order, redistribution uses that order, and the sizes differ.",
    until="local shapes go by the order that redistribution goes by",
    test="tests/dtensor/door/test_reading.py::test_what_is_made_has_the_sizes_of_the_order",
)
EXPANSION = Patch(
    module=_TENSOR + "._sharding_prop",
    attribute="_expand_single_dim_strategy_to_mesh",
    file="torch/distributed/tensor/_ops/single_dim_strategy.py",
    why="torch compares every way to shard an op's inputs, even if they can stay as they are. Each "
    "way adds guards on symbolic sizes. On _StridedShard placements each way needs a search, and a "
    "mesh of three dims has a thousand ways: detach takes half a minute from 2.14 on, and "
    "arithmetic ten seconds in 2.13. This package first tries the placements that the inputs "
    "already have.",
    until="torch tries the placements at hand first, or plans for _StridedShard without a search",
    test="tests/dtensor/decide/test_strategies.py"
    "::test_an_op_on_what_a_view_made_is_not_weighed_against_"
    "every_other_placement",
)

# -- checkpoints, state dicts, pictures ------------------------------------------------------------

_BOXES: dict[str, Any] = {
    "until": "torch describes a strided shard by its runs of rows",
    "lacking": "checkpoints of _StridedShard tensors would be wrong without a word",
}

SAVED = Patch(
    **_BOXES,
    module=_TENSOR,
    attribute="DTensor.__create_write_items__",
    file="torch/distributed/tensor/_api.py",
    why="This method describes the part of a DTensor that a rank saves. torch describes the part "
    "as one box, but a strided shard is not one box. With this package, each run of rows is a "
    "box.",
    test="tests/dtensor/extras/test_state.py::test_checkpoints",
)
LOADED = Patch(
    **_BOXES,
    module=_TENSOR,
    attribute="DTensor.__create_chunk_list__",
    file="torch/distributed/tensor/_api.py",
    why="This method describes the part of a DTensor that a rank loads, also with a box for each "
    "run of rows.",
    test="tests/dtensor/extras/test_state.py::test_checkpoints",
)
PARTS = Patch(
    **_BOXES,
    module=_TENSOR,
    attribute="DTensor.__get_tensor_shard__",
    file="torch/distributed/tensor/_api.py",
    why="This method returns the part of a local tensor that is one box of a checkpoint.",
    test="tests/dtensor/extras/test_state.py::test_checkpoints",
)
STATE_DICTS = Patch(
    module="torch.distributed._state_dict_utils",
    attribute="_distribute_tensors",
    file="torch/distributed/_state_dict_utils.py",
    why="After all ranks have received a whole state dict, this function keeps the part of each "
    "rank. torch keeps one box, but a strided shard is not one box. The package replaces the "
    "function once the program imports it.",
    until="torch narrows to the runs of rows of a strided shard",
    test="tests/dtensor/extras/test_state.py::test_state_dicts",
)
PICTURES = Patch(
    module=_TENSOR + ".debug._visualize_sharding",
    attribute="visualize_sharding.__code__",
    file="torch/distributed/tensor/debug/_visualize_sharding.py",
    why="Pictures of strided shards show one box for each device. Programs import the function by "
    "name, so the package replaces its code, once the program imports it.",
    until="visualize_sharding draws several boxes for a device",
    test="tests/dtensor/extras/test_state.py::test_pictures_have_a_box_for_each_run",
)

TABLE = (
    *[row for row in list(globals().values()) if isinstance(row, Patch)],
    *compiler_patches.TABLE,
)

# -- while what a program sends is watched ---------------------------------------------------------

_WATCHED: dict[str, Any] = {
    "until": "PyTorch tells who asks for it of ops of tensor subclasses and of collectives",
    "lacking": "what a program sends could not be watched",
}

CLASS_RULES = Patch(
    **_WATCHED,
    module="torch._library.simple_registry",
    attribute="find_torch_dispatch_rule.__code__",
    file="torch/_library/simple_registry.py",
    why="A rule for an op and a class of tensors is called before the class itself. While there "
    "is a watcher, all ops have one for DTensors: the rule notes the op, and DTensor runs it. "
    "C++ keeps the function from its first call on, so the package replaces its code.",
    test="tests/dtensor/profile/test_watching.py::test_ops_are_seen_as_dtensor_answers_them",
)
CALLS = Patch(
    **_WATCHED,
    module="torch._ops",
    attribute="OpOverload._op",
    file="torch/_ops.py",
    why="This runs an op that is called from Python. While there is a watcher, that of functional "
    "collectives notes what is sent, and runs the op as torch does. (A kernel of the dispatcher "
    "could note it too, but would take ten times as long.)",
    test="tests/dtensor/profile/test_watching.py::test_collectives_of_all_kinds_are_seen_once",
    entries="what calls {}",
)
KERNELS = Patch(
    **_WATCHED,
    module="torch.library",
    attribute="_impls",
    file="torch/library.py",
    why="Other collectives are ops that C++ calls: those of torch.distributed, and of gradients "
    "in DistributedDataParallel. They pass the dispatch key ADInplaceOrView, without a kernel "
    "there. While there is a watcher they have one, which notes what is sent and goes on.",
    test="tests/dtensor/profile/test_watching.py::test_collectives_of_all_kinds_are_seen_once",
    entries="the kernels of {}",
)
GROUPS = Patch(
    **_WATCHED,
    module="torch.distributed",
    attribute="ProcessGroup",
    file="torch/csrc/distributed/c10d/init.cpp",
    why="Tensors of inference mode do not have that key. While there is a watcher, the methods "
    "that torch.distributed calls add it.",
    test="tests/dtensor/profile/test_watching.py::test_collectives_of_inference_are_seen",
    entries="the method {}",
)
_OF_FUNCTIONS = "BackwardCFunction"
NODES = Patch(
    **_WATCHED,
    module="torch.autograd.function",
    attribute=f"{_OF_FUNCTIONS}.__init__",
    file="torch/autograd/function.py",
    why="Autograd makes a context for each node of a Python function, such as those that "
    "redistribute. While there is a watcher, the line that the node is made for is noted.",
    test="tests/dtensor/profile/test_watching.py::test_gradients_of_functions_have_their_own_lines",
)

WATCHED = (CLASS_RULES, CALLS, KERNELS, GROUPS, NODES)
