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
    "functions of torch's own DTensor. The compiler must not compile the functions of this "
    "package either: torch raises an error if a compiled function asks a process group for "
    "its backend, and would compile each function again for other placements. The package "
    "replaces this method once the program imports it.",
    until="a package can exclude its files from compilation",
    test="tests/dtensor/compiled/test_graph_breaks.py::test_none_of_ours_is_compiled",
)
CONSTANTS = Patch(
    module="torch._dynamo.variables.constant",
    attribute="common_constant_types",
    file="torch/_dynamo/variables/constant.py",
    why="After a graph break at a redistribution, the compiler compiles each of torch's functions "
    "for redistributions. These functions call this package, and have an object of this "
    "package as a constant. For such a constant, the compiler raises an error instead of a "
    "graph break. The package replaces this tuple once the program imports it.",
    until="an unknown constant causes a graph break instead of an error",
    test="tests/dtensor/compiled/test_graph_breaks.py::test_a_redistribution_that_breaks_the_graph",
)
CONTEXTS = Patch(
    module="torch._dynamo.variables.builder",
    attribute="_automatic_dynamic",
    file="torch/_dynamo/variables/builder.py",
    why="The compiler uses one symbol for sizes that are equal in the call that it compiles. On "
    "one rank alone, a local tensor may have as many rows as another dim. Then this rank has "
    "other guards than the other ranks, and sends other messages. With this package, sizes of "
    "local tensors have separate symbols. The package replaces this function once the program "
    "imports it.",
    until="sizes of inner tensors have separate symbols",
    test="tests/dtensor/compiled/test_ranks_in_step.py::test_ranks_learn_the_same_of_any_sizes",
)
GUARDS = Patch(
    module="torch.fx.experimental.symbolic_shapes",
    attribute="ShapeEnv.produce_guards_verbose",
    file="torch/fx/experimental/symbolic_shapes.py",
    why="torch does not guard global sizes that are constants of a program: it checks only the "
    "sizes of local tensors, which other global sizes may also give. And torch guards the sizes "
    "of a gradient although the program does not read this gradient, and this guard may raise an "
    "error.",
    until="dynamo also guards the sizes of tensor subclasses, not only the sizes of inner tensors",
    test="tests/dtensor/compiled/test_compiled.py"
    "::test_global_sizes_that_a_graph_takes_for_constants_are_"
    "guarded",
)
METADATA = Patch(
    module=_AOT + ".subclass_utils",
    attribute="create_subclass_metadata",
    file="torch/_functorch/_aot_autograd/subclass_utils.py",
    why="At run time, AOTAutograd makes a DTensor again from metadata. In this metadata, split "
    "factors must be numbers.",
    until="placements may hold split factors that are SymInts",
    test="tests/dtensor/compiled/test_compiled.py"
    "::test_patterns_of_models_run_as_eagerly_in_few_graphs",
)
TRACES = Patch(
    module="torch._functorch.aot_autograd",
    attribute="aot_stage1_graph_capture",
    file="torch/_functorch/_aot_autograd/graph_compile.py",
    why="AOTAutograd records which sizes of a returned DTensor are symbols, and then traces the "
    "program with its gradients. If the trace makes one of these symbols a constant, the "
    "graph does not return the symbol. Then torch divides the graph at the wrong place (`was "
    "invalid, but is output`), or cannot make the DTensor (`'NoneType' object cannot be "
    "interpreted as an integer`). This may happen only on ranks with at most one row. This "
    "package then traces again.",
    until="sizes that are symbols during the trace are still symbols after it, and not numbers",
    test="tests/dtensor/compiled/test_ranks_in_step.py::test_ranks_learn_the_same_of_any_sizes",
)
VIEW_OPS = Patch(
    module="torch._functorch.aot_autograd",
    attribute="run_functionalized_fw_and_collect_metadata",
    file="torch/_functorch/_aot_autograd/collect_metadata_analysis.py",
    why="If a result is a view of a plain tensor, AOTAutograd stores the view ops, to run them "
    "again. For tensor subclasses, AOTAutograd stores no view ops.",
    until="AOTAutograd also stores the view ops of tensor subclasses",
    test="tests/dtensor/compiled/test_views_returned.py"
    "::test_views_of_inputs_are_returned_with_their_gradients",
)
ALIASES = Patch(
    module=_AOT + ".runtime_wrappers",
    attribute="gen_alias_from_base",
    file="torch/_functorch/_aot_autograd/functional_utils.py",
    why="If a compiled program returns a view of its input, torch makes the view again by "
    "as_strided, which raises an error for such DTensors. This package runs the view ops of the "
    "program again.",
    until="torch runs the view ops of tensor subclasses again",
    test="tests/dtensor/compiled/test_views_returned.py"
    "::test_views_of_inputs_are_returned_with_their_gradients",
)
WRITES = Patch(
    module=_AOT + ".runtime_wrappers",
    attribute="_create_runtime_wrapper",
    file="torch/_functorch/_aot_autograd/runtime_wrappers.py",
    why="A compiled program writes to the local tensors of its inputs, without an op on DTensors. "
    "So without this replacement, copies of slices would not be updated after a write to "
    "their source, and writes to slices would not reach the source.",
    until="slices of sharded dims are views in torch too",
    test="tests/dtensor/run/test_processes.py::test_compiled_writes",
)
EXPRESSIONS = Patch(
    module=_PROXIES,
    attribute="_build_proxy_for_sym_expr",
    file="torch/fx/experimental/proxy_tensor.py",
    why="The tracer composes a new expression from known expressions. 2.13 cannot trace powers. "
    "2.13 and 2.14 pass the three factors of a product to a function of two arguments. All "
    "releases trace a maximum to a function that Inductor does not support.",
    until="torch traces powers, products and maxima to functions of two arguments that Inductor "
    "supports",
    test="tests/dtensor/compiled/test_compiled.py"
    "::test_patterns_of_models_run_as_eagerly_in_few_graphs",
)
SLOTS = Patch(
    module=_PROXIES,
    attribute="set_proxy_slot",
    file="torch/fx/experimental/proxy_tensor.py",
    why="With this package, the tracer keeps the first expression by which it can compute a "
    "symbol. torch overwrites it with a later expression, which may depend on the symbol itself: "
    "if max(s, 1) equals s, torch computes s from max(s, 1), and this search for s does not end.",
    until="set_proxy_slot keeps the first proxy of an expression",
    test="tests/dtensor/compiled/test_compiled.py"
    "::test_patterns_of_models_run_as_eagerly_in_few_graphs",
)
EQUALS = Patch(
    module="torch._functorch.partitioners",
    attribute="fx_graph_cse",
    file="torch/_functorch/partitioners.py",
    why="torch merges equal nodes of a graph. But nodes that are equal on one rank may differ on "
    "another rank: for example, two exchanges in which one rank sends and receives no rows. "
    "If this rank merges the two exchanges, it takes part in one exchange, and the other "
    "ranks in two.",
    until="a package can exclude a node of a graph from merging",
    test="tests/dtensor/compiled/test_compiled_order.py::test_equal_exchanges_are_not_made_one",
)
PASSES = Patch(
    module=_AOT + ".graph_compile",
    attribute="_partition_joint_graph_into_fw_bw",
    file="torch/_functorch/_aot_autograd/graph_compile.py",
    why="In torch, the inputs of a collective, and the sizes that a rank could save, decide "
    "whether the collective runs in the forward graph, in the backward graph, or in both. "
    "With this package, a collective runs in the pass in which the program issues the "
    "collective, and the collectives of each graph have the order of the program.",
    until="on every rank, the partitioner leaves a collective in the pass in which the program "
    "issues it",
    test="tests/dtensor/compiled/test_compiled_order.py"
    "::test_what_the_backward_pass_gathers_alone_is_gathered_there",
)
ORDER = Patch(
    module="torch._inductor.compile_fx",
    attribute="fx_codegen_and_compile",
    file="torch/_inductor/compile_fx.py",
    why="Passes over the graph may reorder collectives by sizes that differ "
    "between ranks. If a program turns on `enable_overlap_scheduling` or two other passes "
    "for overlap, these passes use times that this rank measures. With this package, the "
    "collectives of a compiled graph stay in the order of the program, and these passes are off "
    "if ranks may hold different sizes. (torch's own check, `spmd_check`, hangs if only some "
    "ranks compile.) The package replaces this function once the program imports it.",
    until="torch keeps the order of the program, and moves collectives alike on all ranks",
    test="tests/dtensor/compiled/test_compiled_order.py"
    "::test_the_chain_is_in_the_order_of_the_program",
)
CACHE_KEYS = Patch(
    module="torch.compiler.config",
    attribute="cache_key_tag",
    file="torch/compiler/config.py",
    why="A graph depends on the rows that a rank sends and holds, and on the settings of this "
    "package. But torch's keys of compiled graphs on disk include neither the rank nor these "
    "settings. This package adds a word to the existing tag.",
    until="torch's keys include the rank and the rules in force",
    test="tests/dtensor/run/test_redistribute_in_programs.py"
    "::test_compiled_graphs_of_other_settings_"
    "are_kept_apart",
    lacking="torch would load graphs that it compiled under other rules",
)

TABLE = tuple([row for row in list(globals().values()) if isinstance(row, Patch)])
