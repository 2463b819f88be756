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
    why="If a graph breaks, Python functions that run are compiled one by one, except those of "
    "torch's own DTensor. The functions of this package must not be compiled either: torch "
    "raises an error if they ask a process group for its backend, and would compile each of "
    "them again for other placements. The package replaces this method once the program "
    "imports it.",
    until="a package can say which of its files are not to be compiled",
    test="tests/dtensor/compiled/test_graph_breaks.py::test_none_of_ours_is_compiled",
)
CONSTANTS = Patch(
    module="torch._dynamo.variables.constant",
    attribute="common_constant_types",
    file="torch/_dynamo/variables/constant.py",
    why="If a graph breaks at a redistribution, torch's functions for it are compiled one by one. "
    "These functions call this package, and have an object of this package as a constant. For "
    "such a constant, the compiler raises an error instead of a graph break. The package "
    "replaces this tuple once the program imports it.",
    until="a constant that is not known breaks the graph",
    test="tests/dtensor/compiled/test_graph_breaks.py::test_a_redistribution_that_breaks_the_graph",
)
CONTEXTS = Patch(
    module="torch._dynamo.variables.builder",
    attribute="_automatic_dynamic",
    file="torch/_dynamo/variables/builder.py",
    why="The compiler uses one symbol for sizes that are equal in the call that it compiles. A "
    "local tensor may have as many rows as another dim has, on one rank alone. Then this rank "
    "guards on other facts than the other ranks, and sends other messages. With this package, "
    "sizes of local tensors have symbols of their own. The package replaces this function once "
    "the program imports it.",
    until="sizes of inner tensors share no symbols with others",
    test="tests/dtensor/compiled/test_ranks_in_step.py::test_ranks_learn_the_same_of_any_sizes",
)
GUARDS = Patch(
    module="torch.fx.experimental.symbolic_shapes",
    attribute="ShapeEnv.produce_guards_verbose",
    file="torch/fx/experimental/symbolic_shapes.py",
    why="Global sizes that are constants of a program are not guarded: torch checks only the "
    "sizes of local tensors, which may be the same. But sizes of a gradient that the program does "
    "not read are guarded, and torch then raises.",
    until="dynamo guards the sizes of tensor subclasses, and not of their inner tensors alone",
    test="tests/dtensor/compiled/test_compiled.py"
    "::test_global_sizes_that_a_graph_takes_for_constants_are_"
    "guarded",
)
METADATA = Patch(
    module=_AOT + ".subclass_utils",
    attribute="create_subclass_metadata",
    file="torch/_functorch/_aot_autograd/subclass_utils.py",
    why="The metadata from which AOTAutograd makes a DTensor again at run time needs numbers for "
    "split factors.",
    until="placements may hold split factors that are SymInts",
    test="tests/dtensor/compiled/test_compiled.py"
    "::test_patterns_of_models_run_as_eagerly_in_few_graphs",
)
TRACES = Patch(
    module="torch._functorch.aot_autograd",
    attribute="aot_stage1_graph_capture",
    file="torch/_functorch/_aot_autograd/graph_compile.py",
    why="AOTAutograd notes which sizes of a returned DTensor are symbols, and then traces the "
    "program with its gradients. If the trace makes one of them a constant, the graph does not "
    "return it. The graph is then divided at the wrong place (`was invalid, but is output`), or "
    "the DTensor cannot be made (`'NoneType' object cannot be interpreted as an integer`), "
    "maybe only on ranks with one row or none. This package notes the sizes again, and traces "
    "once more.",
    until="what is noted of sizes holds after the trace",
    test="tests/dtensor/compiled/test_ranks_in_step.py::test_ranks_learn_the_same_of_any_sizes",
)
VIEW_OPS = Patch(
    module="torch._functorch.aot_autograd",
    attribute="run_functionalized_fw_and_collect_metadata",
    file="torch/_functorch/_aot_autograd/collect_metadata_analysis.py",
    why="For a result that is a view of a plain tensor, AOTAutograd keeps the view ops, to run "
    "them again. For tensor subclasses, it keeps no view ops.",
    until="the view ops of tensor subclasses are kept as well",
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
    until="the view ops of tensor subclasses are run again",
    test="tests/dtensor/compiled/test_views_returned.py"
    "::test_views_of_inputs_are_returned_with_their_gradients",
)
WRITES = Patch(
    module=_AOT + ".runtime_wrappers",
    attribute="_create_runtime_wrapper",
    file="torch/_functorch/_aot_autograd/runtime_wrappers.py",
    why="A compiled program writes to the local tensors of its inputs, without an op on DTensors. "
    "So copies of slices would not learn that their sources were written to, and sources would "
    "not learn of writes to slices.",
    until="slices of sharded dims are views for torch, too",
    test="tests/dtensor/run/test_processes.py::test_compiled_writes",
)
EXPRESSIONS = Patch(
    module=_PROXIES,
    attribute="_build_proxy_for_sym_expr",
    file="torch/fx/experimental/proxy_tensor.py",
    why="The tracer composes an expression that it has not met before from known ones. 2.13 has "
    "no function for powers; 2.13 and 2.14 call a function of two arguments for products of "
    "three; and all releases have functions for maxima that Inductor does not know.",
    until="each of the three is traced to functions of two arguments that Inductor knows",
    test="tests/dtensor/compiled/test_compiled.py"
    "::test_patterns_of_models_run_as_eagerly_in_few_graphs",
)
SLOTS = Patch(
    module=_PROXIES,
    attribute="set_proxy_slot",
    file="torch/fx/experimental/proxy_tensor.py",
    why="With this package, the tracer keeps the first expression by which it can compute a "
    "symbol. torch overwrites this expression: it computes s from max(s, 1), which equals s, "
    "and then searches for s without end.",
    until="set_proxy_slot keeps the first proxy of an expression",
    test="tests/dtensor/compiled/test_compiled.py"
    "::test_patterns_of_models_run_as_eagerly_in_few_graphs",
)
EQUALS = Patch(
    module="torch._functorch.partitioners",
    attribute="fx_graph_cse",
    file="torch/_functorch/partitioners.py",
    why="Equal nodes of a graph are merged. Nodes that are equal on one rank need not be equal on "
    "another: for example, two exchanges in which one rank sends and receives no rows. If this "
    "rank merges them, it takes part in one exchange, and the other ranks in two.",
    until="a node of a graph can be kept apart from its equals",
    test="tests/dtensor/compiled/test_compiled_order.py::test_equal_exchanges_are_not_made_one",
)
PASSES = Patch(
    module=_AOT + ".graph_compile",
    attribute="_partition_joint_graph_into_fw_bw",
    file="torch/_functorch/_aot_autograd/graph_compile.py",
    why="Whether a collective runs in the forward graph, in the backward graph, or in both, "
    "depends in torch on its inputs, and on the sizes that this rank could save. With this "
    "package, a collective runs in the pass in which the program issues it, and the "
    "collectives of each graph have the order of the program.",
    until="the partitioner puts collectives where they were issued, on every rank alike",
    test="tests/dtensor/compiled/test_compiled_order.py"
    "::test_what_the_backward_pass_gathers_alone_is_gathered_there",
)
ORDER = Patch(
    module="torch._inductor.compile_fx",
    attribute="fx_codegen_and_compile",
    file="torch/_inductor/compile_fx.py",
    why="Passes over the graph may move collectives by this rank's sizes. Two passes for overlap "
    "and `enable_overlap_scheduling`, if a program turns them on, move them by their times on "
    "this rank. With this package, the collectives of a compiled graph stay in the order of "
    "the program, and these passes are off if ranks may hold different sizes. (torch's own "
    "check, `spmd_check`, hangs if only some ranks compile.) The package replaces this "
    "function once the program imports it.",
    until="the order is that of the program, and what moves collectives decides alike on all ranks",
    test="tests/dtensor/compiled/test_compiled_order.py"
    "::test_the_chain_is_in_the_order_of_the_program",
)
CACHE_KEYS = Patch(
    module="torch.compiler.config",
    attribute="cache_key_tag",
    file="torch/compiler/config.py",
    why="A graph contains what a rank sends and holds, and torch's keys of compiled graphs on "
    "disk do not distinguish ranks, nor our settings. This package adds a word to the existing "
    "tag.",
    until="torch keeps the graphs of ranks apart, and knows which rules were in force",
    test="tests/dtensor/run/test_redistribute_in_programs.py"
    "::test_compiled_graphs_of_other_settings_"
    "are_kept_apart",
    lacking="graphs that are compiled under other rules would be taken for one another",
)

TABLE = tuple([row for row in list(globals().values()) if isinstance(row, Patch)])
