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
    "until": "torch's own rules are exact (the package exists to replace these rules)",
    "lacking": _NO_RULES,
}

SCHEMA_INFOS = Patch(
    **_RULES,
    attribute=f"{_PROPAGATOR}.op_to_schema_info",
    why="This dict names the arguments by which torch caches the placements of an op, in C++ and "
    "for each thread. With this package, each entry names one more keyword, which no call passes, "
    "so that the keys of the cache differ from torch's. So when the package is on, no thread "
    "finds placements that torch's rules computed; and when it is off, none that the package's "
    "rules computed.",
    test="tests/dtensor/switch/test_switching.py::test_other_threads_do_not_serve_what_they_cached",
    entries="schema infos of ops",
)
SCHEMA_INFOS_OF_ONE_DIM = Patch(
    **_RULES,
    attribute=f"{_PROPAGATOR}.op_to_schema_info_for_single_dim_strategy",
    why="This dict names the arguments of ops that have a rule for one mesh dim. The dict "
    "op_to_schema_info names the arguments of all other ops.",
    test="tests/dtensor/replaced/test_patches.py::test_ops_are_told_apart_by_all_their_keywords",
    entries="schema infos of ops with a rule of one mesh dim",
)

# -- ops beside views: propagator and dispatcher ---------------------------------------------------

PROPAGATION = Patch(
    module=_TENSOR,
    attribute=f"{_PROPAGATOR}.propagate_op_sharding_non_cached",
    file="torch/distributed/tensor/_sharding_prop.py",
    why="For ops that are not views, torch's rules are wrong on some _StridedShard placements, "
    "and for averages over blocks of different sizes. The package first applies its own "
    "rules, and uses torch's rules where torch's rules are correct.",
    until="tests/dtensor/decide/test_ops.py passes with ops=False",
    test="tests/dtensor/decide/test_ops.py::test_free_dims_carry_any_cut",
    lacking="ops would also run on placements for which torch's rules are wrong",
)
HANDLERS = Patch(
    module=_TENSOR,
    attribute="DTensor._op_dispatcher._custom_op_handlers",
    file="torch/distributed/tensor/_dispatch.py",
    why="This dict has functions for single ops that skip the propagator. Convolutions, argmin "
    "and argmax have entries here. Batch norms and max(dim, out=) write to arguments although "
    "their schemas do not say so. An in-place squeeze changes only the shape. t_, transpose_ and "
    "unsqueeze_ have no rule. torch treats ops such as __rshift__ as in-place, so x >> 2 returns "
    "x. Some autograd nodes make zeros that are no DTensors. "
    "Here they are replicas; torch raises an error.",
    until="each op has a rule in the propagator, schemas name all arguments that ops write to, "
    "and autograd makes zeros with the type of its gradients",
    test="tests/dtensor/decide/test_local_results.py::test_turns_in_place",
    lacking="ops would skip the rules of this package",
    entries="the handler of {}",
)
LOSSES = Patch(
    module=_TENSOR + ".parallel.loss",
    attribute="customized_loss_ops",
    file="torch/distributed/tensor/parallel/loss.py",
    entries="the handler of {}",
    why="The functions behind loss_parallel raise an error for strided shards, and for targets "
    "that are sharded differently from the logits. Slices and views of this package return "
    "such placements where torch returns replicas. The package replaces these functions once "
    "the program imports them.",
    until="loss_parallel redistributes its inputs to placements that it supports",
    test="tests/dtensor/replaced/test_given_placements.py::test_loss_parallel_of_next_tokens",
)
LOCAL_MAP = Patch(
    module=_TENSOR + ".experimental._func_map",
    attribute="_local_map_wrapped",
    file="torch/distributed/tensor/experimental/_func_map.py",
    why="local_map raises an error if an input has other placements than its in_placements. "
    "Slices and views of this package keep shards where torch replicates, so the package "
    "redistributes the input first. For uneven shards, torch also computes a wrong global "
    "size: the number of rows of one rank, times the number of ranks. The package replaces "
    "local_map once the program imports it.",
    until="local_map redistributes its inputs unless the program forbids it, and computes the "
    "global size of uneven shards",
    test="tests/dtensor/replaced/test_given_placements.py::test_local_map_of_what_stays_cut",
)
DISTRIBUTE = Patch(
    module=_TENSOR + "._api",
    attribute="distribute_tensor.__code__",
    file="torch/distributed/tensor/_api.py",
    why="distribute_tensor raises an error for a DTensor with other placements than the "
    "requested ones. This package redistributes such DTensors, because its slices and views "
    "may return them. distribute_tensor also raises an error for uneven strided shards, "
    "ignores the order that split factors encode, and gives the n-th shard to "
    "the n-th rank, not to the rank at coordinate n. Programs import the "
    "function by name, and would keep the old function. So the package replaces its code.",
    until="distribute_tensor redistributes a DTensor, pads strided shards, and scatters in the "
    "order of the mesh's coordinates",
    test="tests/dtensor/replaced/test_given_placements.py::test_distributing_what_stays_cut",
)
COMPOSITES = Patch(
    module="torch.library",
    attribute="_impls",
    file="torch/library.py",
    why="torch decomposes tensor_split into slices before DTensor sees it. If DTensor sees "
    "tensor_split as one op, all parts share one exchange. So the package adds a kernel at "
    "the dispatch key PythonTLSSnapshot, which only tensors of Python classes have. The "
    "kernel records the op, and then decomposes it as torch does.",
    until="torch passes tensor_split to DTensor as one op",
    test="tests/dtensor/decide/test_tensor_split.py::test_parts_are_what_slices_are",
    entries="the kernel of {}",
)
TAIL = Patch(
    module=_TENSOR + "._dispatch",
    attribute="OpDispatcher._dispatch_fast_path_python_tail.__code__",
    file="torch/distributed/tensor/_dispatch.py",
    why="Writes to slices of sharded dims are lost, because torch replicates the input of the "
    "slice, and the write changes the copy. With this package, two conditions at the beginning of "
    "the function forward such writes to the sliced tensor. C++ keeps a "
    "reference to the function from the first call on, so the package replaces the code of the "
    "function. If torch is installed without its Python sources, the package warns once and "
    "leaves the function.",
    until="torch lets a write to a view of a redistributed input reach the input, or raises an "
    "error",
    test="tests/dtensor/extras/test_writes.py::test_writes_reach_what_is_viewed",
    lacking="writes to slices would be lost",
)

LOCAL_TENSOR = Patch(
    module=_TENSOR,
    attribute="DTensor._local_tensor",
    file="torch/distributed/tensor/_api.py",
    why="A slice of a sharded dim is a copy. If a program writes to the source of the slice, the "
    "copy has old values. While such copies exist, this package updates a copy before the "
    "program reads its local tensor. At other times, torch's own attribute is in place, "
    "because every op reads this attribute.",
    until="torch raises an error for a write to a tensor of which slices are copies, or makes no "
    "such copies",
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
    why="This function redistributes a local tensor, for DTensor.redistribute, full_tensor and "
    "from_local, and for the arguments of ops. All callers have imported the function by name, "
    "and would keep the old function. So the package replaces the code of the function.",
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
    why="torch reads some _StridedShard placements of views as an order of mesh dims, so a "
    "DTensor with such placements cannot enter or leave a compiled program. torch also makes "
    "a new symbol for each size of a local tensor, although the placements give this size. "
    "torch may load the graph of a rank with other sizes from disk. If ranks may hold "
    "different numbers of rows, this package stores a separate graph for each rank.",
    until="the context of __tensor_flatten__ says how to read _StridedShard placements, and keys "
    "of graphs include the sizes of local tensors",
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
    why="Factories and new_zeros compute the sizes of uneven strided shards from left to right. "
    "If the split factors encode an order, a redistribution uses the encoded order, in which "
    "the sizes differ.",
    until="factories and redistribution compute local shapes in the same order",
    test="tests/dtensor/door/test_reading.py::test_what_is_made_has_the_sizes_of_the_order",
)
EXPANSION = Patch(
    module=_TENSOR + "._sharding_prop",
    attribute="_expand_single_dim_strategy_to_mesh",
    file="torch/distributed/tensor/_ops/single_dim_strategy.py",
    why="torch compares the costs of all combinations of placements that an op's inputs could "
    "have, even if the inputs can keep their placements. Each cost adds guards on symbolic sizes. "
    "For _StridedShard placements, each comparison needs a search, and a mesh of three dims has a "
    "thousand combinations: detach takes half a minute from 2.14 on, and arithmetic takes ten "
    "seconds in 2.13. This package first tries the placements that the inputs already have.",
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
    why="This method describes the part of a DTensor that a rank loads. With this package, each "
    "run of rows is a box.",
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
    until="torch keeps the runs of rows of a strided shard",
    test="tests/dtensor/extras/test_state.py::test_state_dicts",
)
PICTURES = Patch(
    module=_TENSOR + ".debug._visualize_sharding",
    attribute="visualize_sharding.__code__",
    file="torch/distributed/tensor/debug/_visualize_sharding.py",
    why="torch's pictures show only one box for each device, also for strided shards. Programs "
    "import the function by name, and would keep the old function. So the package replaces the "
    "code of the function, once the program imports it.",
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
    why="torch calls a rule for an op and a class of tensors before it calls the class itself. "
    "While communication is recorded, every op has such a rule for DTensors: the rule records "
    "the op, and DTensor runs it. C++ keeps a reference to the function from the first call "
    "on, so the package replaces the code of the function.",
    test="tests/dtensor/profile/test_watching.py::test_ops_are_seen_as_dtensor_answers_them",
)
CALLS = Patch(
    **_WATCHED,
    module="torch._ops",
    attribute="OpOverload._op",
    file="torch/_ops.py",
    why="This attribute runs an op that Python calls. While communication is recorded, the "
    "attribute of a functional collective records the bytes that it sends, and then runs the "
    "op as torch does. (A kernel of the dispatcher could also record the op, but would take "
    "ten times as long.)",
    test="tests/dtensor/profile/test_watching.py::test_collectives_of_all_kinds_are_seen_once",
    entries="the caller of {}",
)
KERNELS = Patch(
    **_WATCHED,
    module="torch.library",
    attribute="_impls",
    file="torch/library.py",
    why="C++ calls the ops of all other collectives: those of torch.distributed, and those for "
    "gradients in DistributedDataParallel. Calls of these ops go through the dispatch key "
    "ADInplaceOrView, where the ops have no kernel. While communication is recorded, these ops "
    "have a kernel at this key, which records the bytes and then continues.",
    test="tests/dtensor/profile/test_watching.py::test_collectives_of_all_kinds_are_seen_once",
    entries="the kernels of {}",
)
GROUPS = Patch(
    **_WATCHED,
    module="torch.distributed",
    attribute="ProcessGroup",
    file="torch/csrc/distributed/c10d/init.cpp",
    why="Tensors of inference mode do not have the dispatch key ADInplaceOrView. While "
    "communication is recorded, the methods of ProcessGroup call the ops with this key.",
    test="tests/dtensor/profile/test_watching.py::test_collectives_of_inference_are_seen",
    entries="the method {}",
)
_OF_FUNCTIONS = "BackwardCFunction"
NODES = Patch(
    **_WATCHED,
    module="torch.autograd.function",
    attribute=f"{_OF_FUNCTIONS}.__init__",
    file="torch/autograd/function.py",
    why="Autograd makes a context for each call of a Python autograd.Function, for example of "
    "those that redistribute. While communication is recorded, the package notes which line of "
    "the program made the call.",
    test="tests/dtensor/profile/test_watching.py::test_gradients_of_functions_have_their_own_lines",
)

WATCHED = (CLASS_RULES, CALLS, KERNELS, GROUPS, NODES)
