"""The table of the objects of torch that the package replaces: attributes, functions, methods, and
entries of dicts. Rows of the compiler are in :mod:`.compiler_patches`. Names that are used and not
replaced are in :mod:`.used`.

A file in ``replaced/`` that names a row installs the row; ``extras/state.py`` makes the
replacements for state dicts. docs/lists/patches.md, which is generated from this table, lists the
file of each row. Every supported release of torch needs every row.

Only rows of this table are replaced: a test compares all of torch before, while and after.

The package also empties torch's caches (:func:`.op_schemas.clear_propagation_caches`).
"""

from __future__ import annotations

from typing import Any

from cute_sharding.dtensor.replaced import compiler_patches
from cute_sharding.dtensor.replaced.patch import Patch

_TENSOR = "torch.distributed.tensor"
_PROPAGATOR = "DTensor._op_dispatcher.sharding_propagator"

# -- rules of ops: the dicts of the propagator -----------------------------------------------------

_NO_RULES = "the rules of this package would have no effect"
_RULES: dict[str, Any] = {
    "module": _TENSOR,
    "file": "torch/distributed/tensor/_sharding_prop.py",
    "until": "PyTorch's rules are correct for all placements",
    "lacking": _NO_RULES,
}

SCHEMA_INFOS = Patch(
    **_RULES,
    attribute=f"{_PROPAGATOR}.op_to_schema_info",
    why="PyTorch caches the output placements of each op in C++, with one cache per thread. "
    "`op_to_schema_info` lists the arguments of an op that form the key of the cache. PyTorch's "
    "list lacks arguments that change the result's shape, such as `bins` of `histc`. The shape of "
    "an earlier call is then returned. `cute_sharding` lists all arguments that can change a "
    "shape, a stride, a dtype or a placement. Placements from `cute_sharding` and from PyTorch "
    "have different keys.",
    test="tests/dtensor/replaced/test_keys.py::test_calls_with_other_arguments",
    entries=True,
)
SCHEMA_INFOS_OF_ONE_DIM = Patch(
    **_RULES,
    attribute=f"{_PROPAGATOR}.op_to_schema_info_for_single_dim_strategy",
    why="`op_to_schema_info_for_single_dim_strategy` lists which arguments of an op form the key "
    "in PyTorch's C++ cache. PyTorch uses `op_to_schema_info_for_single_dim_strategy` for ops "
    "whose sharding rule describes one mesh dim. `cute_sharding` lists all arguments that can "
    "change a shape, a stride, a dtype or a placement.",
    test="tests/dtensor/replaced/test_patches.py::test_both_tables_name_the_same_arguments",
    entries=True,
)
_REGISTERED: dict[str, Any] = {
    "module": _TENSOR,
    "file": "torch/distributed/tensor/_sharding_prop.py",
    "until": "PyTorch empties its caches if a program registers a rule",
    "test": "tests/dtensor/replaced/test_keys.py::test_a_rule_that_is_registered_later",
}
RULES = Patch(
    **_REGISTERED,
    attribute=f"{_PROPAGATOR}.register_sharding_prop_rule",
    why="A program may register a sharding rule for an op after the op has run. PyTorch's caches "
    "then still have placements of the old rule. With `cute_sharding`, "
    "`register_sharding_prop_rule` also empties PyTorch's caches.",
)
STRATEGIES = Patch(
    **_REGISTERED,
    attribute=f"{_PROPAGATOR}.register_op_strategy",
    why="`register_sharding` registers a rule by `register_op_strategy`, which does not empty "
    "PyTorch's caches. With `cute_sharding`, `register_op_strategy` also empties PyTorch's caches.",
)
STRATEGIES_OF_ONE_DIM = Patch(
    **_REGISTERED,
    attribute=f"{_PROPAGATOR}.register_single_dim_op_strategy",
    why="`register_single_dim_strategy` registers a rule by `register_single_dim_op_strategy`, "
    "which does not empty PyTorch's caches. With `cute_sharding`, "
    "`register_single_dim_op_strategy` also empties PyTorch's caches.",
)

# -- rules of ops: propagator and dispatcher -------------------------------------------------------

PROPAGATION = Patch(
    module=_TENSOR,
    attribute=f"{_PROPAGATOR}.propagate_op_sharding_non_cached",
    file="torch/distributed/tensor/_sharding_prop.py",
    why="PyTorch's sharding rules give wrong results for some `_StridedShard` placements, and for "
    "averages over uneven shards. With `cute_sharding`, `propagate_op_sharding_non_cached` applies "
    "the rules of `cute_sharding` before PyTorch's rules. `cute_sharding` uses a PyTorch rule only "
    "for ops and placements for which the rule is correct.",
    until="`tests/dtensor/decide/test_ops.py` passes with `ops=False`",
    test="tests/dtensor/decide/test_ops.py::test_free_dims_carry_any_cut",
    lacking="ops would run on placements for which PyTorch's rules are wrong",
)
_INDEX: dict[str, Any] = {
    "module": _TENSOR,
    "file": "torch/_C/__init__.pyi",
    "until": "PyTorch takes a list in an index of a DTensor as a replica",
    "test": "tests/dtensor/decide/test_constants.py::test_lists_in_an_index",
}
READ_BY_INDEX = Patch(
    attribute="DTensor.__getitem__",
    why="PyTorch makes a plain tensor of a list in an index, such as `x[[0, 2]]`, and raises an "
    "error because DTensor does not accept plain tensors. With `cute_sharding`, `__getitem__` "
    "makes a replicated DTensor of the list.",
    **_INDEX,
)
WRITTEN_BY_INDEX = Patch(
    attribute="DTensor.__setitem__",
    why="As for `DTensor.__getitem__`, in a write such as `x[[0, 2]] = 1`.",
    **_INDEX,
)
FOUND = Patch(
    module=_TENSOR + "._dispatch",
    attribute="OpDispatcher._propagate_op_sharding_dispatch_slow_path",
    file="torch/distributed/tensor/_dispatch.py",
    why="PyTorch raises an error for an op whose result has a shape that depends on values, such "
    "as `nonzero`, `unique` or `x[mask]`, also if all operands are replicated. The sharding rules "
    "cannot give the shape of such a result. With `cute_sharding`, each rank runs the op on the "
    "whole operands, and `_propagate_op_sharding_dispatch_slow_path` returns the results.",
    until="PyTorch runs these ops on replicated operands",
    test="tests/dtensor/decide/test_shapes_by_values.py::test_each_rank_has_the_whole_result",
    lacking="ops would skip the rules of this package",
)
HANDLERS = Patch(
    module=_TENSOR,
    attribute="DTensor._op_dispatcher._custom_op_handlers",
    file="torch/distributed/tensor/_dispatch.py",
    why="If `_custom_op_handlers` has an entry for an op, DTensor calls the entry and skips the "
    "sharding rules. `cute_sharding` wraps PyTorch's handlers of convolutions, `argmin` and "
    "`argmax`. `cute_sharding` adds handlers for ops that PyTorch's dispatcher does not run "
    "correctly:\n\n"
    "| ops | fault in PyTorch |\n"
    "|---|---|\n"
    "| batch norms, other ops with hidden writes | write not noticed |\n"
    "| `squeeze_` | DTensor can keep the old shape |\n"
    "| `t_`, `transpose_`, `unsqueeze_` | no sharding rule |\n"
    "| ops of autograd on a DTensor and plain zeros | error |\n"
    "| two ops of forward mode on a tensor and its tangent | no sharding rule |",
    until="PyTorch runs all of these ops correctly",
    test="tests/dtensor/decide/test_local_results.py::test_squeeze_in_place_of_replicas",
    lacking="ops would skip the rules of this package",
    entries=True,
)
LOSSES = Patch(
    module=_TENSOR + ".parallel.loss",
    attribute="customized_loss_ops",
    file="torch/distributed/tensor/parallel/loss.py",
    entries=True,
    why="PyTorch's `loss_parallel` raises an error for `_StridedShard` placements, and for "
    "targets sharded differently from the logits. With `cute_sharding`, slices and views stay "
    "sharded, so `loss_parallel` can get inputs that PyTorch does not support. `cute_sharding` "
    "redistributes the logits and the targets before `loss_parallel` computes the loss.",
    until="`loss_parallel` redistributes its inputs",
    test="tests/dtensor/replaced/test_given_placements.py::test_loss_parallel_of_next_tokens",
)
LOCAL_MAP = Patch(
    module=_TENSOR + ".experimental._func_map",
    attribute="_local_map_wrapped",
    file="torch/distributed/tensor/experimental/_func_map.py",
    why="PyTorch's `local_map` has two faults:\n\n"
    "| case | PyTorch | `cute_sharding` |\n"
    "|---|---|---|\n"
    "| `in_placements` has `Replicate`, the input a shard | error | replicates the input |\n"
    "| uneven shards | global size = local size times number of ranks | correct global size |\n"
    "| uneven shards, symbolic size | wrong global size | wrong global size |\n\n"
    "If shards are uneven, all ranks must call the function from `local_map`, because the ranks "
    "exchange sizes.",
    until="`local_map` redistributes inputs and supports uneven shards",
    test="tests/dtensor/replaced/test_given_placements.py::test_local_map_of_what_stays_cut",
)
DISTRIBUTE = Patch(
    module=_TENSOR + "._api",
    attribute="distribute_tensor.__code__",
    file="torch/distributed/tensor/_api.py",
    why="PyTorch's `distribute_tensor` raises an error or misplaces shards in four cases:\n\n"
    "| case | PyTorch | `cute_sharding` |\n"
    "|---|---|---|\n"
    "| DTensor with other placements | error | gathers the input if a gather is enough |\n"
    "| uneven `_StridedShard` | error | distributes the tensor |\n"
    "| split factors that encode an order of mesh dims | ignores the order | uses the order |\n"
    "| mesh whose ranks are not ascending | shards on wrong ranks | shard n on mesh coordinate n |",
    until="`distribute_tensor` is correct in all four cases",
    test="tests/dtensor/replaced/test_given_placements.py::test_distributing_what_stays_cut",
)
FROM_LOCAL = Patch(
    module=_TENSOR,
    attribute="DTensor.from_local",
    file="torch/distributed/tensor/_api.py",
    why="`DTensor.from_local(..., run_check=True)` checks the local tensors across ranks. If the "
    "program gives the global shape, PyTorch does not check the shapes of the local tensors. With "
    "`cute_sharding`, all ranks raise an error if a rank has a local tensor of another shape.",
    until="PyTorch checks the local shapes too",
    test="tests/dtensor/extras/test_from_local.py::test_all_ranks_refuse",
)
COMPOSITES = Patch(
    module="torch.library",
    attribute="_impls",
    file="torch/library.py",
    why="PyTorch decomposes some ops before DTensor gets them. `cute_sharding` adds kernels for "
    "these ops at the dispatch key `PythonTLSSnapshot`, which plain tensors lack:\n\n"
    "| ops | with `cute_sharding` |\n"
    "|---|---|\n"
    "| `tensor_split` | all slices share one communication step |\n"
    "| ops such as `quantile`, which make tensors of numbers | these tensors are replicas |\n"
    "| `interpolate` by scales, which PyTorch fails to trace | the op that takes sizes |\n"
    "| `as_strided`, which PyTorch refuses | runs as `permute`, `narrow`, `unfold`, `expand` |\n\n"
    "In forward mode, autograd makes zeros by the op `_efficientzerotensor` for an operand without "
    "a tangent. PyTorch's zeros are plain tensors, which DTensor refuses. `cute_sharding` adds a "
    "kernel for this op at the dispatch key `ADInplaceOrView`. Zeros of this kernel are replicas "
    "where they meet DTensors.",
    until="DTensor gets `tensor_split` as one op, takes constants of ops as replicas, and has a "
    "rule for `as_strided`",
    test="tests/dtensor/decide/test_tensor_split.py::test_parts_are_what_slices_are",
    entries=True,
)
_LEVELS: dict[str, Any] = {
    "module": "torch.autograd.forward_ad",
    "file": "torch/autograd/forward_ad.py",
    "why": "In forward mode, PyTorch repeats a view on the tangent by its offset in memory. The "
    "offset of a DTensor is not that of its rows, so a write to a slice under `torch.func.jvp` "
    "would change other rows of the tangent. With `cute_sharding`, PyTorch repeats the view itself "
    "(`torch._C._set_view_replay_enabled`) while a `dual_level` lasts.",
    "until": "PyTorch repeats views of DTensors as ops also under `torch.func`",
    "test": "tests/dtensor/decide/test_forward_mode.py::test_forward_mode_over_gloo",
}
LEVEL_ENTERED = Patch(**_LEVELS, attribute="dual_level.__enter__")
LEVEL_LEFT = Patch(**_LEVELS, attribute="dual_level.__exit__")
_LISTS: dict[str, Any] = {
    "attribute": "_group_tensors_by_device_and_dtype",
    "until": "PyTorch groups the tensors of optimizers also by DTensor and plain tensor",
    "test": "tests/dtensor/decide/test_constants.py::test_plain_parameters_beside_dtensors",
}
LISTS_OF_OPTIMIZERS = Patch(
    module="torch.optim.optimizer",
    file="torch/optim/optimizer.py",
    why="Optimizers run one op on a list of all parameters. PyTorch raises an error if some "
    "parameters of a list are DTensors and others are plain tensors. With `cute_sharding`, the "
    "plain tensors of such a list are replicated DTensors in the same memory.",
    **_LISTS,
)
LISTS_OF_GRADIENTS = Patch(
    module="torch.nn.utils.clip_grad",
    file="torch/nn/utils/clip_grad.py",
    why="As in optimizers, for `clip_grad_norm_`.",
    **_LISTS,
)
TAIL = Patch(
    module=_TENSOR + "._dispatch",
    attribute="OpDispatcher._dispatch_fast_path_python_tail.__code__",
    file="torch/distributed/tensor/_dispatch.py",
    why="PyTorch replicates a tensor before it slices a sharded dim, so the slice is a copy. If a "
    "program writes to a slice of a sharded dim, PyTorch loses the write. With `cute_sharding`, "
    "the write also reaches the sliced tensor.",
    until="PyTorch keeps the write, or raises an error",
    test="tests/dtensor/run/test_writes.py::test_writes_reach_what_is_viewed",
    lacking="writes to slices would be lost",
)

LOCAL_TENSOR = Patch(
    module=_TENSOR,
    attribute="DTensor._local_tensor",
    file="torch/distributed/tensor/_api.py",
    why="A slice of a sharded dim is a copy that misses later writes to the sliced tensor. While a "
    "program holds such a slice, `DTensor._local_tensor` is a property, which raises an error if "
    "the slice is read.",
    until="PyTorch updates the slice, or raises an error",
    test="tests/dtensor/run/test_stale_views.py::test_what_misses_a_write_is_not_read",
    lacking="a program would read old values from slices",
)

# -- redistribution --------------------------------------------------------------------------------

_MOVES: dict[str, Any] = {
    "until": "PyTorch's redistribution is minimal and correct for all placements",
    "lacking": "the package could not plan redistributions",
}

REDISTRIBUTE = Patch(
    **_MOVES,
    module=_TENSOR + "._redistribute",
    attribute="redistribute_local_tensor.__code__",
    file="torch/distributed/tensor/_redistribute.py",
    why="`DTensor.redistribute` and `full_tensor` communicate through `redistribute_local_tensor`. "
    "PyTorch's redistribution sends some elements more than once, and gives wrong results for some "
    "placements. With `cute_sharding`, `redistribute_local_tensor` runs communication steps that "
    "`cute_sharding` chooses.",
    test="tests/dtensor/run/test_redistribute.py::test_every_missing_element_moves_once",
)
REDISTRIBUTE_ARGUMENTS = Patch(
    **_MOVES,
    module=_TENSOR + "._dispatch",
    attribute="OpDispatcher.redistribute_local_args",
    file="torch/distributed/tensor/_dispatch.py",
    why="The dispatcher of DTensor calls `redistribute_local_args` to redistribute the arguments "
    "of an op. PyTorch does not redistribute keyword arguments of an op, such as masks. With "
    "`cute_sharding`, `redistribute_local_args` also redistributes keyword arguments of an op.",
    test="tests/dtensor/decide/test_attention.py::test_a_mask_is_brought_where_it_is_needed",
)

# -- DTensors in compiled programs -----------------------------------------------------------------

UNFLATTEN = Patch(
    module=_TENSOR,
    attribute="DTensor.__tensor_unflatten__",
    file="torch/distributed/tensor/_api.py",
    why="A compiled program makes DTensors from local tensors by `DTensor.__tensor_unflatten__`. "
    "PyTorch's `DTensor.__tensor_unflatten__` has three faults:\n\n"
    "| case | PyTorch | `cute_sharding` |\n"
    "|---|---|---|\n"
    "| some `_StridedShard` placements of views | reads an order of mesh dims | keeps the "
    "placements |\n"
    "| symbolic local size | makes a new symbol | computes the size from the global size |\n"
    "| uneven shards, graph cached on disk | can load the graph of another rank | caches one graph "
    "per rank |",
    until="PyTorch has none of these faults",
    test="tests/dtensor/compiled/test_views_returned.py"
    "::test_what_a_view_made_goes_into_a_compiled_program",
)
LOCAL_SHAPES = Patch(
    module=_TENSOR + "._sharding_prop",
    attribute="compute_local_shape_and_global_offset",
    file="torch/distributed/tensor/_utils.py",
    why="`compute_local_shape_and_global_offset` computes local sizes from global sizes. If the "
    "global sizes are symbols, PyTorch's `compute_local_shape_and_global_offset` adds guards on "
    "the sizes. With `cute_sharding`, `compute_local_shape_and_global_offset` adds no guards.",
    until="PyTorch computes symbolic local sizes without guards",
    test="tests/dtensor/compiled/test_compiled.py"
    "::test_sequences_that_divide_and_others_have_one_graph",
)
LOCAL_ORDERS = Patch(
    module=_TENSOR + "._utils",
    attribute="_compute_local_shape_and_global_offset",
    file="torch/distributed/tensor/_utils.py",
    why="For new tensors, such as `zeros`, PyTorch shards over the mesh dims from left to right. "
    "Split factors of `_StridedShard` can encode an order of mesh dims, which `redistribute` "
    "follows. The local sizes of uneven shards depend on the order in which mesh dims shard a "
    "tensor dim. With `cute_sharding`, `_compute_local_shape_and_global_offset` uses the order of "
    "mesh dims that `_StridedShard` encodes.",
    until="PyTorch shards new tensors in the order that split factors encode",
    test="tests/dtensor/door/test_reading.py::test_what_is_made_has_the_sizes_of_the_order",
)
FIRST_SHARD = Patch(
    module=_TENSOR + "._random",
    attribute="_calc_first_shard_size",
    file="torch/distributed/tensor/_random.py",
    why="On an accelerator, a random op starts on each rank at an offset that depends on the size "
    "of the first shard. PyTorch raises an error for a split factor below 0, which "
    "`cute_sharding` gives some parameters under `fully_shard`. With `cute_sharding`, the size is "
    "that of the first rank's local tensor.",
    until="PyTorch's placements describe every parameter under `fully_shard`",
    test="tests/dtensor/door/test_composed.py::test_random_values_start_at_shards",
)
EXPANSION = Patch(
    module=_TENSOR + "._sharding_prop",
    attribute="_expand_single_dim_strategy_to_mesh",
    file="torch/distributed/tensor/_ops/single_dim_strategy.py",
    why="PyTorch compares the costs of all placements that the inputs of an op could have. For "
    "symbolic sizes, each cost comparison of placements adds guards. In PyTorch 2.14 and later, "
    "`detach` of a `_StridedShard` tensor can take half a minute on a 3-D mesh. `cute_sharding` "
    "first tries the placements that the inputs of an op already have.",
    until="PyTorch first tries the placements of the inputs",
    test="tests/dtensor/decide/test_strategies.py"
    "::test_an_op_on_what_a_view_made_is_not_weighed_against_"
    "every_other_placement",
)

# -- checkpoints, state dicts, pictures ------------------------------------------------------------
COMPOSED = Patch(
    module="torch.distributed.fsdp._fully_shard._fsdp_param",
    attribute="FSDPParam._init_sharding_spec",
    file="torch/distributed/fsdp/_fully_shard/_fsdp_param.py",
    why="`_init_sharding_spec` chooses the placements of a parameter under `fully_shard`. A weight "
    "of fused parts is a `_StridedShard` on a mesh dim of tensor parallelism. For such a weight, "
    "PyTorch's placements do not describe the rows of each rank, so `full_tensor` permutes rows. "
    "With `cute_sharding`, the placements describe the rows. If no placements of PyTorch do, the "
    "mesh dim of `fully_shard` gets a split factor below 0: the mesh dim shards last.",
    until="`full_tensor` of a `_StridedShard` weight under `fully_shard` is correct",
    test="tests/dtensor/door/test_composed.py::test_rows_are_what_placements_say",
)
EMPTY = Patch(
    module="torch.distributed.fsdp._fully_shard._fsdp_param",
    attribute="FSDPParam.to_sharded_dtensor",
    file="torch/distributed/fsdp/_fully_shard/_fsdp_param.py",
    why="`to_sharded_dtensor` makes the DTensors of parameters under `fully_shard` and of their "
    "gradients. Tensor parallelism can leave a rank without elements of a weight. On this rank, "
    "PyTorch's local tensor does not have the shape that the placements give. PyTorch's "
    "`full_tensor` of the weight is then wrong, or hangs. With `cute_sharding`, the local tensor "
    "has the shape that the placements give.",
    until="a layer of one feature trains under tensor parallelism and `fully_shard`",
    test="tests/dtensor/door/test_composed.py::test_training",
)
GRADIENTS = Patch(
    module="torch.distributed.fsdp._fully_shard._fsdp_collectives",
    attribute="foreach_reduce_scatter_copy_in",
    file="torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py",
    why="`foreach_reduce_scatter_copy_in` copies the gradients of a module under `fully_shard` "
    "into the buffer of a reduce-scatter. PyTorch's kernel raises an error for a gradient without "
    "elements. Tensor parallelism can leave a rank without elements of a weight: this rank raises "
    "an error, and the other ranks wait. `cute_sharding` leaves out gradients without elements.",
    until="a layer of one feature trains under tensor parallelism and `fully_shard`",
    test="tests/dtensor/door/test_composed.py::test_training",
)

_BOXES: dict[str, Any] = {
    "until": "PyTorch lists each run of rows of a `_StridedShard`",
    "lacking": "checkpoints of _StridedShard tensors would have wrong rows",
}

SAVED = Patch(
    **_BOXES,
    module=_TENSOR,
    attribute="DTensor.__create_write_items__",
    file="torch/distributed/tensor/_api.py",
    why="`DTensor.__create_write_items__` lists the chunks of a DTensor that a rank saves in a "
    "checkpoint. In a checkpoint, PyTorch lists one chunk of consecutive rows for each rank. With "
    "`_StridedShard`, a rank can hold rows 0, 1, 4 and 5, which form two chunks. In a checkpoint, "
    "`cute_sharding` lists one chunk for each run of consecutive rows.",
    test="tests/dtensor/extras/test_state.py::test_checkpoints",
)
LOADED = Patch(
    **_BOXES,
    module=_TENSOR,
    attribute="DTensor.__create_chunk_list__",
    file="torch/distributed/tensor/_api.py",
    why="`DTensor.__create_chunk_list__` lists the chunks of a DTensor that a rank loads from a "
    "checkpoint. In a checkpoint, PyTorch lists one chunk of consecutive rows for each rank. If "
    "the rows of a `_StridedShard` are not consecutive, PyTorch loads wrong rows without an error. "
    "In a checkpoint, `cute_sharding` lists one chunk for each run of consecutive rows.",
    test="tests/dtensor/extras/test_state.py::test_checkpoints",
)
PARTS = Patch(
    **_BOXES,
    module=_TENSOR,
    attribute="DTensor.__get_tensor_shard__",
    file="torch/distributed/tensor/_api.py",
    why="`DTensor.__get_tensor_shard__` returns the rows of the local tensor that belong to one "
    "chunk of a checkpoint. PyTorch's `DTensor.__get_tensor_shard__` returns the whole local "
    "tensor. With `_StridedShard`, the rows of a local tensor can belong to several chunks of a "
    "checkpoint. With `cute_sharding`, `DTensor.__get_tensor_shard__` returns only the rows of one "
    "chunk.",
    test="tests/dtensor/extras/test_state.py::test_checkpoints",
)
OFFSETS = Patch(
    module=_TENSOR,
    attribute="DTensor.__new__",
    file="torch/distributed/tensor/_api.py",
    why="In PyTorch, `storage_offset()` of a DTensor is that of its local tensor. After a slice, "
    "it differs between ranks, and between a tensor and its tangent. So in forward mode PyTorch "
    "raises *Expected the output of forward differentiable view operations to have the tangent "
    "have the same layout as primal*, and `torch.save` and asynchronous checkpoints raise an "
    "error on some ranks. With `cute_sharding`, the offset of each DTensor is 0.",
    until="`storage_offset()` of a DTensor does not depend on its local tensor",
    test="tests/dtensor/extras/test_copied.py::test_copies_of_whatever_an_op_returns",
)
DEEP_COPIES = Patch(
    module=_TENSOR,
    attribute="DTensor.__deepcopy__",
    file="torch/_tensor.py",
    why="In PyTorch, `copy.deepcopy` of a DTensor runs `clone`, which reduces a Partial. The copy "
    "of a slice has the strides of a contiguous tensor, but its local tensor has those of the "
    "slice. A `reshape` of the copy then raises an error. With `cute_sharding`, `copy.deepcopy` "
    "copies the local tensor, and the copy has the strides of the slice.",
    until="`copy.deepcopy` keeps the strides of a DTensor",
    test="tests/dtensor/extras/test_copied.py::test_copies_of_whatever_an_op_returns",
)
DATA = Patch(
    module=_TENSOR,
    attribute="DTensor.data",
    file="torch/_C/__init__.pyi",
    why="After `x.data = y`, a DTensor `x` of PyTorch has the shape of `y`, and its old placements "
    "and values. With `cute_sharding`, `x` has the placements and the values of `y`. If `y` is no "
    "DTensor, `cute_sharding` raises an error.",
    until="`x.data = y` changes the local tensor of a DTensor, or raises an error",
    test="tests/dtensor/extras/test_copied.py::test_data_that_is_set",
)
STATE_DICTS = Patch(
    module="torch.distributed._state_dict_utils",
    attribute="_distribute_tensors",
    file="torch/distributed/_state_dict_utils.py",
    why="If a program broadcasts a full state dict, `_distribute_tensors` selects the rows that "
    "each rank keeps. PyTorch's `_distribute_tensors` keeps one range of consecutive rows per "
    "rank, even for a `_StridedShard`. With `cute_sharding`, `_distribute_tensors` keeps all rows "
    "of the rank's shard.",
    until="PyTorch keeps all rows of a `_StridedShard`",
    test="tests/dtensor/extras/test_state.py::test_state_dicts",
)

TABLE = (
    *[row for row in list(globals().values()) if isinstance(row, Patch)],
    *compiler_patches.TABLE,
)

# -- while communication is recorded ---------------------------------------------------------------

_WATCHED: dict[str, Any] = {
    "until": "PyTorch has a hook for collectives and DTensor ops",
    "lacking": "the package could not record all communication of a program",
}

CLASS_RULES = Patch(
    **_WATCHED,
    module="torch._library.simple_registry",
    attribute="find_torch_dispatch_rule.__code__",
    file="torch/_library/simple_registry.py",
    why="`find_torch_dispatch_rule` returns the function that PyTorch calls before "
    "`__torch_dispatch__` of a tensor class. While communication is recorded, "
    "`find_torch_dispatch_rule` returns a `cute_sharding` function that records each DTensor op.",
    test="tests/tools/profile/test_watching.py::test_ops_are_seen_as_dtensor_answers_them",
)
CALLS = Patch(
    **_WATCHED,
    module="torch._ops",
    attribute="OpOverload._op",
    file="torch/_ops.py",
    why="When Python calls an op, PyTorch runs the function in the attribute `OpOverload._op`. "
    "While communication is recorded, `cute_sharding` replaces the attribute `_op` of each "
    "functional collective. The function that replaces `OpOverload._op` records the bytes of a "
    "collective, and then runs the collective.",
    test="tests/tools/profile/test_watching.py::test_collectives_of_all_kinds_are_seen_once",
    entries=True,
)
KERNELS = Patch(
    **_WATCHED,
    module="torch.library",
    attribute="_impls",
    file="torch/library.py",
    why="The C++ code of DistributedDataParallel runs collectives as `c10d` ops. PyTorch has no "
    "kernels of `c10d` ops at the dispatch key `ADInplaceOrView`. While communication is recorded, "
    "`cute_sharding` adds kernels at `ADInplaceOrView` that record the bytes of `c10d` ops.",
    test="tests/tools/profile/test_watching.py::test_collectives_of_all_kinds_are_seen_once",
    entries=True,
)
GROUPS = Patch(
    **_WATCHED,
    module="torch.distributed",
    attribute="ProcessGroup",
    file="torch/csrc/distributed/c10d/init.cpp",
    why="`cute_sharding` records collectives at the dispatch key `ADInplaceOrView`, which tensors "
    "of inference mode lack. While communication is recorded, each `ProcessGroup` method that "
    "starts a collective turns on the dispatch key `ADInplaceOrView`.",
    test="tests/tools/profile/test_watching.py::test_collectives_of_inference_are_seen",
    entries=True,
)
_OF_FUNCTIONS = "BackwardCFunction"
NODES = Patch(
    **_WATCHED,
    module="torch.autograd.function",
    attribute=f"{_OF_FUNCTIONS}.__init__",
    file="torch/autograd/function.py",
    why="Autograd calls `BackwardCFunction.__init__` for each Python `autograd.Function`, such as "
    "a redistribution of a DTensor. While communication is recorded, `BackwardCFunction.__init__` "
    "records the current program line, for reports about the backward pass.",
    test="tests/tools/profile/test_watching.py::test_gradients_of_functions_have_their_own_lines",
)

WATCHED = (CLASS_RULES, CALLS, KERNELS, GROUPS, NODES)
