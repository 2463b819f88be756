"""The rows about the compiler in the table of what is replaced in torch (:mod:`.patches`).

The compiler takes long to import, and most programs do without. So nothing of it is replaced before
a program has imported it.
"""

from __future__ import annotations

from cute_sharding.dtensor.replaced.patch import Patch

_AOT = "torch._functorch._aot_autograd"
_PROXIES = "torch.fx.experimental.proxy_tensor"

FRAMES = Patch(
    module="torch._dynamo.convert_frame",
    attribute="CatchErrorsWrapper.__call__",
    file="torch/_dynamo/convert_frame.py",
    why="After a graph break, the compiler compiles each Python function that runs, except the "
    "functions of DTensor. With this package, the compiler also leaves out the functions of the "
    "package. Otherwise, it would compile these functions again for each combination of "
    "placements. It would also raise an error if a function asks a process group for its backend.",
    until="torch.compile has an option by which a package excludes its files from compilation",
    test="tests/dtensor/compiled/test_graph_breaks.py::test_none_of_ours_is_compiled",
)
CONSTANTS = Patch(
    module="torch._dynamo.variables.constant",
    attribute="common_constant_types",
    file="torch/_dynamo/variables/constant.py",
    why="After a graph break at a redistribution, the compiler compiles torch's functions for "
    "redistributions. The package has replaced the code of these functions, and one constant of "
    "the new code is an object of the package. The compiler raises an error for a constant whose "
    "class is not in this set. So the package adds the class of this object to the set.",
    until="the compiler breaks the graph at an unknown constant, and does not raise an error",
    test="tests/dtensor/compiled/test_graph_breaks.py::test_a_redistribution_that_breaks_the_graph",
)
CONTEXTS = Patch(
    module="torch._dynamo.variables.builder",
    attribute="_automatic_dynamic",
    file="torch/_dynamo/variables/builder.py",
    why="If two sizes are equal in the first call, the compiler uses one symbol for both. On "
    "some ranks only, the number of rows of a local tensor may equal the size of another dim. "
    "Then the guards of such a rank differ from the guards of the other ranks, and the other "
    "ranks may wait for messages that this rank does not send. With this package, each size of a "
    "local tensor has a symbol of its own.",
    until="torch uses a separate symbol for each size of a local tensor",
    test="tests/dtensor/compiled/test_ranks_in_step.py::test_ranks_learn_the_same_of_any_sizes",
)
GUARDS = Patch(
    module="torch.fx.experimental.symbolic_shapes",
    attribute="ShapeEnv.produce_guards_verbose",
    file="torch/fx/experimental/symbolic_shapes.py",
    why="If a graph uses a global size as a constant, torch guards only the local sizes. But "
    "DTensors of different global sizes can have the same local sizes, so the package also guards "
    "the global sizes. In addition, torch guards the sizes of gradients that the program does not "
    "read. These guards may raise an error, and the package removes them.",
    until="the compiler also guards the global sizes of tensor subclasses, and does not guard the "
    "sizes of gradients that the program does not read",
    test="tests/dtensor/compiled/test_compiled.py"
    "::test_global_sizes_that_a_graph_takes_for_constants_are_"
    "guarded",
)
METADATA = Patch(
    module=_AOT + ".subclass_utils",
    attribute="create_subclass_metadata",
    file="torch/_functorch/_aot_autograd/subclass_utils.py",
    why="AOTAutograd stores metadata, from which it makes DTensors when the program runs. The "
    "split factors in the metadata must be numbers. So the package replaces each symbolic split "
    "factor by a number.",
    until="placements may hold split factors that are SymInts",
    test="tests/dtensor/compiled/test_compiled.py"
    "::test_patterns_of_models_run_as_eagerly_in_few_graphs",
)
TRACES = Patch(
    module="torch._functorch.aot_autograd",
    attribute="aot_stage1_graph_capture",
    file="torch/_functorch/_aot_autograd/graph_compile.py",
    why="AOTAutograd records which sizes of a returned DTensor are symbols, and then traces the "
    "program with its gradients. The trace may turn such a symbol into a constant, but the graph "
    "does not return constants. Then torch raises one of two errors: `was invalid, but is "
    "output`, or `'NoneType' object cannot be interpreted as an integer`. Sometimes this happens "
    "only on ranks with at most one row. If the trace has turned a symbol into a constant, the "
    "package traces the program again, so that torch raises neither error.",
    until="the trace no longer turns such symbols into constants",
    test="tests/dtensor/compiled/test_ranks_in_step.py::test_ranks_learn_the_same_of_any_sizes",
)
VIEW_OPS = Patch(
    module="torch._functorch.aot_autograd",
    attribute="run_functionalized_fw_and_collect_metadata",
    file="torch/_functorch/_aot_autograd/collect_metadata_analysis.py",
    why="If a compiled program returns a view of a plain tensor, AOTAutograd stores the view ops. "
    "After the program has run, AOTAutograd runs the view ops again to make the view. With this "
    "package, AOTAutograd also stores the view ops of DTensors.",
    until="AOTAutograd also stores the view ops of tensor subclasses",
    test="tests/dtensor/compiled/test_views_returned.py"
    "::test_views_of_inputs_are_returned_with_their_gradients",
)
ALIASES = Patch(
    module=_AOT + ".runtime_wrappers",
    attribute="gen_alias_from_base",
    file="torch/_functorch/_aot_autograd/functional_utils.py",
    why="If a compiled program returns a view of its input, torch makes the view again after the "
    "program has run. torch uses as_strided for this, which raises an error for DTensors. So for "
    "DTensors, the package runs the view ops of the program again.",
    until="torch runs the view ops of tensor subclasses again",
    test="tests/dtensor/compiled/test_views_returned.py"
    "::test_views_of_inputs_are_returned_with_their_gradients",
)
WRITES = Patch(
    module=_AOT + ".runtime_wrappers",
    attribute="_create_runtime_wrapper",
    file="torch/_functorch/_aot_autograd/runtime_wrappers.py",
    why="A compiled program writes directly to the local tensors of its inputs, so the package "
    "does not see these writes as ops on DTensors. But a slice of a sharded dim is a copy, which "
    "must have the values of the sliced tensor. So after the program has run, the package updates "
    "the slices of each tensor that the program wrote to. If the program wrote to a slice, the "
    "package applies the write to the sliced tensor.",
    until="slices of sharded dims are views in torch too",
    test="tests/dtensor/run/test_processes.py::test_compiled_writes",
)
EXPRESSIONS = Patch(
    module=_PROXIES,
    attribute="_build_proxy_for_sym_expr",
    file="torch/fx/experimental/proxy_tensor.py",
    why="The tracer calls this function to add nodes to the graph that compute an expression of "
    "sizes. torch 2.13 cannot trace powers. torch 2.13 and 2.14 pass all factors of a product to "
    "a function of two arguments, which raises an error for three factors. All releases trace a "
    "maximum to a function that Inductor does not support. With this package, the function traces "
    "all of these expressions to functions of two arguments that Inductor supports.",
    until="torch traces powers, products and maxima to functions of two arguments that Inductor "
    "supports",
    test="tests/dtensor/compiled/test_compiled.py"
    "::test_patterns_of_models_run_as_eagerly_in_few_graphs",
)
SLOTS = Patch(
    module=_PROXIES,
    attribute="set_proxy_slot",
    file="torch/fx/experimental/proxy_tensor.py",
    why="This function stores how a graph computes a symbol. If torch later finds another way to "
    "compute the symbol, it overwrites the first way. The new way may depend on the symbol "
    "itself. For example, if max(s, 1) equals s, torch tries to compute s from max(s, 1), and "
    "this never ends. With this package, the function keeps the first way.",
    until="set_proxy_slot keeps the first way to compute a symbol",
    test="tests/dtensor/compiled/test_compiled.py"
    "::test_patterns_of_models_run_as_eagerly_in_few_graphs",
)
EQUALS = Patch(
    module="torch._functorch.partitioners",
    attribute="fx_graph_cse",
    file="torch/_functorch/partitioners.py",
    why="torch merges equal nodes of a graph. But two nodes that are equal on one rank may differ "
    "on another rank. For example, take two exchanges in which one rank sends and receives no "
    "rows. If this rank merges the two exchanges, it takes part in only one of them, and the "
    "other ranks wait for this rank in the second. With this package, torch does not merge such "
    "exchanges.",
    until="torch has an option by which a node of a graph is never merged",
    test="tests/dtensor/compiled/test_compiled_order.py::test_equal_exchanges_are_not_made_one",
)
PASSES = Patch(
    module=_AOT + ".graph_compile",
    attribute="_partition_joint_graph_into_fw_bw",
    file="torch/_functorch/_aot_autograd/graph_compile.py",
    why="torch decides whether a collective runs in the forward graph, in the backward graph, or "
    "in both. The decision depends on the inputs of the collective, and on the sizes of the "
    "tensors that a rank could save. These sizes may differ between ranks. With this package, a "
    "collective runs in the pass in which the program issues it. In each graph, the collectives "
    "have the order in which the program issues them.",
    until="the partitioner of every rank leaves a collective in the pass in which the program "
    "issues it",
    test="tests/dtensor/compiled/test_compiled_order.py"
    "::test_what_the_backward_pass_gathers_alone_is_gathered_there",
)
ORDER = Patch(
    module="torch._inductor.compile_fx",
    attribute="fx_codegen_and_compile",
    file="torch/_inductor/compile_fx.py",
    why="Inductor may reorder collectives by sizes, which may differ between ranks. A program can "
    "also turn on `enable_overlap_scheduling`, or one of two similar options. Then Inductor also "
    "reorders collectives by estimated times. With this package, the collectives of a compiled "
    "graph stay in the order of the program. If ranks may hold different sizes, the package turns "
    "these three options off.",
    until="torch keeps the collectives in the order of the program on all ranks",
    test="tests/dtensor/compiled/test_compiled_order.py"
    "::test_the_chain_is_in_the_order_of_the_program",
)
CACHE_KEYS = Patch(
    module="torch.compiler.config",
    attribute="cache_key_tag",
    file="torch/compiler/config.py",
    why="A compiled graph depends on the rows that a rank holds and sends, and on the settings of "
    "this package. But torch's cache keys for graphs on disk include neither the rank nor the "
    "settings. The text of this option is part of these cache keys. So the package adds a word to "
    "this text. The word stands for the rank and the settings.",
    until="torch's cache keys include the rank and the settings of this package",
    test="tests/dtensor/run/test_redistribute_in_programs.py"
    "::test_compiled_graphs_of_other_settings_"
    "are_kept_apart",
    lacking="torch would load graphs that it compiled under other rules",
)

TABLE = tuple([row for row in list(globals().values()) if isinstance(row, Patch)])
