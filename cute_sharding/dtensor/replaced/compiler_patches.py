"""The rows about the compiler in the table of what is replaced in torch (:mod:`.patches`).

The compiler takes long to import, and most programs do not use it. So a row is replaced only after
the program has imported the row's module.
"""

from __future__ import annotations

from cute_sharding.dtensor.replaced.patch import Patch

_AOT = "torch._functorch._aot_autograd"
_PROXIES = "torch.fx.experimental.proxy_tensor"

FRAMES = Patch(
    module="torch._dynamo.convert_frame",
    attribute="CatchErrorsWrapper.__call__",
    file="torch/_dynamo/convert_frame.py",
    why="After a graph break, `torch.compile` compiles each Python function that runs, except "
    "functions of DTensor. If `torch.compile` also compiled functions of `cute_sharding`, each "
    "combination of placements would need a new compilation. `torch.compile` raises an error in "
    "`cute_sharding` functions that ask a process group for its backend. With `cute_sharding`, "
    "`CatchErrorsWrapper.__call__` does not compile functions of `cute_sharding`.",
    until="a package can exclude its files from `torch.compile`",
    test="tests/dtensor/compiled/test_graph_breaks.py::test_none_of_ours_is_compiled",
)
# redistribute_local_tensor has an object of the class Given in its co_consts.
CONSTANTS = Patch(
    module="torch._dynamo.variables.constant",
    attribute="common_constant_types",
    file="torch/_dynamo/variables/constant.py",
    why="If a redistribution breaks the graph, `torch.compile` raises an error, because a constant "
    "in the code of `cute_sharding` has the unknown class `Given`. `cute_sharding` adds `Given` to "
    "`common_constant_types`.",
    until="an unknown constant causes a graph break, not an error",
    test="tests/dtensor/compiled/test_graph_breaks.py::test_a_redistribution_that_breaks_the_graph",
)
CONTEXTS = Patch(
    module="torch._dynamo.variables.builder",
    attribute="_automatic_dynamic",
    file="torch/_dynamo/variables/builder.py",
    why="If two sizes are equal in the first call, `torch.compile` uses one symbol for both sizes. "
    "If two sizes are equal by chance on only one rank, guards differ between ranks. "
    "If guards differ between ranks, a rank can wait for communication that another rank does not "
    "start. With `cute_sharding`, each size of a local tensor has its own symbol.",
    until="PyTorch uses one symbol per local size",
    test="tests/dtensor/compiled/test_ranks_in_step.py::test_ranks_learn_the_same_of_any_sizes",
)
GUARDS = Patch(
    module="torch.fx.experimental.symbolic_shapes",
    attribute="ShapeEnv.produce_guards_verbose",
    file="torch/fx/experimental/symbolic_shapes.py",
    why="If a graph uses a global size as a constant, PyTorch guards only the local sizes. "
    "DTensors with different global sizes can have equal local sizes, so `cute_sharding` also "
    "guards the global sizes. `cute_sharding` removes guards on the sizes of gradients that the "
    "program does not read.",
    until="PyTorch guards global sizes, but no unread gradients",
    test="tests/dtensor/compiled/test_compiled.py"
    "::test_global_sizes_that_a_graph_takes_for_constants_are_"
    "guarded",
)
METADATA = Patch(
    module=_AOT + ".subclass_utils",
    attribute="create_subclass_metadata",
    file="torch/_functorch/_aot_autograd/subclass_utils.py",
    why="`create_subclass_metadata` returns the metadata from which a compiled program makes "
    "DTensors. The split factors of `_StridedShard` in DTensor metadata must be numbers, not "
    "SymInts. With `cute_sharding`, `create_subclass_metadata` replaces each symbolic split factor "
    "by a number.",
    until="split factors can be SymInts",
    test="tests/dtensor/compiled/test_compiled.py"
    "::test_patterns_of_models_run_as_eagerly_in_few_graphs",
)
TRACES = Patch(
    module="torch._functorch.aot_autograd",
    attribute="aot_stage1_graph_capture",
    file="torch/_functorch/_aot_autograd/graph_compile.py",
    why="Before AOTAutograd traces a program, it records which sizes of returned DTensors are "
    "symbolic. If a guard fixes a symbolic size of a returned DTensor during tracing, some or all "
    "ranks raise an error. `cute_sharding` traces a program again if a guard fixes a symbolic "
    "size of a returned DTensor.\n\n"
    "```text\n"
    "# errors of PyTorch\n"
    "was invalid, but is output\n"
    "'NoneType' object cannot be interpreted as an integer\n"
    "```",
    until="tracing fixes no symbolic size",
    test="tests/dtensor/compiled/test_ranks_in_step.py::test_ranks_learn_the_same_of_any_sizes",
)
VIEW_OPS = Patch(
    module="torch._functorch.aot_autograd",
    attribute="run_functionalized_fw_and_collect_metadata",
    file="torch/_functorch/_aot_autograd/collect_metadata_analysis.py",
    why="If a compiled program returns a view of a plain tensor, AOTAutograd records the view ops "
    "during tracing. After the compiled graph, AOTAutograd runs the recorded view ops to make the "
    "returned view. During tracing, PyTorch's AOTAutograd does not record view ops of DTensors. "
    "With `cute_sharding`, AOTAutograd also records view ops of DTensors.",
    until="AOTAutograd stores the view ops of tensor subclasses",
    test="tests/dtensor/compiled/test_views_returned.py"
    "::test_views_of_inputs_are_returned_with_their_gradients",
)
PLANNED = Patch(
    module=_AOT + ".graph_capture",
    attribute="create_functionalized_fn",
    file="torch/_functorch/_aot_autograd/graph_capture_wrappers.py",
    why="A mode that runs outside of `torch.compile` does not see the ops of DTensors while "
    "AOTAutograd traces them. `create_functionalized_fn` returns the function that AOTAutograd "
    "traces, forward and backward. With `cute_sharding`, this function runs in a mode that brings "
    "values to where a plan of the step wants them.",
    until="modes of the program see the ops of DTensors while AOTAutograd traces",
    test="tests/dtensor/programs/test_compiled_as_planned.py"
    "::test_graphs_receive_what_the_plan_says",
)
ALIASES = Patch(
    module=_AOT + ".runtime_wrappers",
    attribute="gen_alias_from_base",
    file="torch/_functorch/_aot_autograd/functional_utils.py",
    why="If a compiled program returns a view of its input, PyTorch makes the view outside the "
    "graph. To make a view of a DTensor outside the graph, PyTorch calls `as_strided`, which "
    "raises an error. To return a view of a DTensor, `cute_sharding` runs the program's view ops "
    "instead of `as_strided`.",
    until="PyTorch runs the view ops of tensor subclasses again",
    test="tests/dtensor/compiled/test_views_returned.py"
    "::test_views_of_inputs_are_returned_with_their_gradients",
)
WRITES = Patch(
    module=_AOT + ".runtime_wrappers",
    attribute="_create_runtime_wrapper",
    file="torch/_functorch/_aot_autograd/runtime_wrappers.py",
    why="A compiled program writes directly to local tensors, so `cute_sharding` sees no DTensor "
    "op for the write. A slice of a sharded dim is a copy that does not share memory with the "
    "sliced tensor. After a compiled program writes to a slice of a sharded dim, `cute_sharding` "
    "also writes to the sliced tensor; after a write to a tensor, earlier slices of it raise an "
    "error if they are read.",
    until="slices of sharded dims are views in PyTorch",
    test="tests/dtensor/run/test_processes.py::test_compiled_writes",
)
EXPRESSIONS = Patch(
    module=_PROXIES,
    attribute="_build_proxy_for_sym_expr",
    file="torch/fx/experimental/proxy_tensor.py",
    why="With Inductor, PyTorch does not compile some expressions of symbolic sizes. With "
    "`cute_sharding`, Inductor compiles the following expressions:\n\n"
    "| expression | fault in PyTorch | releases |\n"
    "|---|---|---|\n"
    "| power | error | 2.13 |\n"
    "| product of three or more factors | error | 2.13, 2.14 |\n"
    "| maximum | function that Inductor does not support | 2.13 to 2.15 |",
    until="PyTorch traces all of these expressions for Inductor",
    test="tests/dtensor/compiled/test_compiled.py"
    "::test_patterns_of_models_run_as_eagerly_in_few_graphs",
)
# set_proxy_slot stores which graph node computes a symbolic size, and forgets the first node if a
# later node computes the same size. A node may then become its own input.
SLOTS = Patch(
    module=_PROXIES,
    attribute="set_proxy_slot",
    file="torch/fx/experimental/proxy_tensor.py",
    why="In PyTorch, compilation may never end if a program computes the same symbolic size "
    "twice. With `cute_sharding`, `set_proxy_slot` keeps the first graph node of a symbolic size.",
    until="`set_proxy_slot` keeps the first node",
    test="tests/dtensor/compiled/test_compiled.py"
    "::test_patterns_of_models_run_as_eagerly_in_few_graphs",
)
EQUALS = Patch(
    module="torch._functorch.partitioners",
    attribute="fx_graph_cse",
    file="torch/_functorch/partitioners.py",
    why="`fx_graph_cse` merges equal nodes of a graph. On a rank that sends and receives no rows, "
    "the graph nodes of two collectives can be equal. If only one rank merges two collectives, the "
    "other ranks hang in the second collective. With `cute_sharding`, `fx_graph_cse` does not "
    "merge nodes that can differ between ranks.",
    until="PyTorch has an option to never merge a node",
    test="tests/dtensor/compiled/test_compiled_order.py::test_equal_exchanges_are_not_made_one",
)
PASSES = Patch(
    module=_AOT + ".graph_compile",
    attribute="_partition_joint_graph_into_fw_bw",
    file="torch/_functorch/_aot_autograd/graph_compile.py",
    why="PyTorch decides by tensor sizes whether a collective runs in the forward graph, the "
    "backward graph, or both. If sizes differ between ranks, a collective could run in the forward "
    "pass on only some ranks. With `cute_sharding`, a compiled collective runs in the same pass, "
    "forward or backward, as in eager mode. In each graph, `cute_sharding` sorts the collectives "
    "into the order of the program.",
    until="all ranks keep each collective in its pass",
    test="tests/dtensor/compiled/test_compiled_order.py"
    "::test_what_the_backward_pass_gathers_alone_is_gathered_there",
)
ORDER = Patch(
    module="torch._inductor.compile_fx",
    attribute="fx_codegen_and_compile",
    file="torch/_inductor/compile_fx.py",
    why="Inductor can reorder collectives by tensor sizes, which can differ between ranks. Three "
    "options of Inductor reorder collectives by estimated times. With `cute_sharding`, the "
    "collectives of a compiled graph stay in the order of the program. If tensor sizes may differ "
    "between ranks, `cute_sharding` turns off three options of Inductor:\n\n"
    "```text\n"
    "enable_overlap_scheduling\n"
    "reorder_iterative_unsafe_collectives_reorder\n"
    "sink_waits_iterative_unsafe_collectives_reorder\n"
    "```",
    until="all ranks keep collectives in the order of the program",
    test="tests/dtensor/compiled/test_compiled_order.py"
    "::test_the_chain_is_in_the_order_of_the_program",
)
CACHE_KEYS = Patch(
    module="torch.compiler.config",
    attribute="cache_key_tag",
    file="torch/compiler/config.py",
    why="A compiled graph depends on the rows that a rank holds, and on the settings of "
    "`cute_sharding`. The keys of PyTorch's graph cache on disk contain neither the rank nor the "
    "settings of `cute_sharding`. `cache_key_tag` is a text that PyTorch adds to the keys of its "
    "graph cache on disk. `cute_sharding` adds the rank and the settings of `cute_sharding` to "
    "`cache_key_tag`.",
    until="PyTorch's cache keys contain the rank and the settings",
    test="tests/dtensor/run/test_redistribute_in_programs.py"
    "::test_compiled_graphs_of_other_settings_"
    "are_kept_apart",
    lacking="PyTorch would load graphs compiled under other rules",
)

TABLE = tuple([row for row in list(globals().values()) if isinstance(row, Patch)])
