"""The rows of the table of what is replaced in torch (:mod:`.patches`) that are about the compiler.

It takes long to import, and most programs do without. So nothing of it is replaced before a program
has imported it.
"""

from __future__ import annotations

from cute_sharding.dtensor.replaced.patch import Patch

_AOT = "torch._functorch._aot_autograd"
_PROXIES = "torch.fx.experimental.proxy_tensor"

FRAMES = Patch(
    module="torch._dynamo.convert_frame",
    attribute="CatchErrorsWrapper.__call__",
    file="torch/_dynamo/convert_frame.py",
    why="Where a graph breaks, Python functions that run are compiled one by one, but for those of "
    "torch's own DTensor. Ours are no part of a program either: torch raises where they ask a "
    "process group for its backend, and each would be compiled again for other placements. "
    "Replaced once the program imports it.",
    until="a package can say which of its files are not to be compiled",
    test="tests/dtensor/compiled/test_graph_breaks.py::test_none_of_ours_is_compiled",
)
CONSTANTS = Patch(
    module="torch._dynamo.variables.constant",
    attribute="common_constant_types",
    file="torch/_dynamo/variables/constant.py",
    why="Where a graph breaks at a redistribution, torch's functions of it are compiled one by "
    "one. Code of theirs that calls ours has an object of ours for a constant, at which the "
    "compiler breaks no graph: it raises an error. Replaced once the program imports it.",
    until="a constant that is not known breaks the graph",
    test="tests/dtensor/compiled/test_graph_breaks.py::test_a_redistribution_that_breaks_the_graph",
)
CONTEXTS = Patch(
    module="torch._dynamo.variables.builder",
    attribute="_automatic_dynamic",
    file="torch/_dynamo/variables/builder.py",
    why="The compiler uses one symbol for sizes that are equal in the call that it compiles. A "
    "local tensor may have as many rows as another dim has, on one rank alone. Then that rank "
    "learns other facts than the others, and sends other messages. Here sizes of local tensors "
    "have symbols of their own. Replaced once the program imports it.",
    until="sizes of inner tensors share no symbols with others",
    test="tests/dtensor/compiled/test_ranks_in_step.py::test_ranks_learn_the_same_of_any_sizes",
)
GUARDS = Patch(
    module="torch.fx.experimental.symbolic_shapes",
    attribute="ShapeEnv.produce_guards_verbose",
    file="torch/fx/experimental/symbolic_shapes.py",
    why="Global sizes that are constants of a program are not guarded: torch looks at those of "
    "local tensors only, which may be the same. Sizes of a gradient that the program does not read "
    "are, and torch then raises.",
    until="dynamo guards the sizes of tensor subclasses, and not of their inner tensors alone",
    test="tests/dtensor/compiled/test_compiled.py"
    "::test_global_sizes_that_a_graph_takes_for_constants_are_"
    "guarded",
)
METADATA = Patch(
    module=_AOT + ".subclass_utils",
    attribute="create_subclass_metadata",
    file="torch/_functorch/_aot_autograd/subclass_utils.py",
    why="What AOTAutograd keeps of a DTensor, to make it again at run time, has numbers for split "
    "factors.",
    until="placements may hold split factors that are SymInts",
    test="tests/dtensor/compiled/test_compiled.py"
    "::test_patterns_of_models_run_as_eagerly_in_few_graphs",
)
TRACES = Patch(
    module="torch._functorch.aot_autograd",
    attribute="aot_stage1_graph_capture",
    file="torch/_functorch/_aot_autograd/graph_compile.py",
    why="AOTAutograd notes which sizes of a DTensor that a program returns are symbols, and then "
    "traces the program with its gradients. Of a symbol that this makes a constant the graph "
    "returns nothing: it is cut in two at the wrong place (`was invalid, but is output`), or the "
    "DTensor cannot be made (`'NoneType' object cannot be interpreted as an integer`), and on some "
    "ranks alone where it is their rows that are one or none. It is noted and traced once more.",
    until="what is noted of sizes holds after the trace",
    test="tests/dtensor/compiled/test_ranks_in_step.py::test_ranks_learn_the_same_of_any_sizes",
)
VIEW_OPS = Patch(
    module="torch._functorch.aot_autograd",
    attribute="run_functionalized_fw_and_collect_metadata",
    file="torch/_functorch/_aot_autograd/collect_metadata_analysis.py",
    why="Of a result that is a view, AOTAutograd keeps the view ops, to run them again of what it "
    "is a view of. Of tensor subclasses it keeps none.",
    until="the view ops of tensor subclasses are kept as well",
    test="tests/dtensor/compiled/test_views_returned.py"
    "::test_views_of_inputs_are_returned_with_their_gradients",
)
ALIASES = Patch(
    module=_AOT + ".runtime_wrappers",
    attribute="gen_alias_from_base",
    file="torch/_functorch/_aot_autograd/functional_utils.py",
    why="A compiled program that returns a view of its input makes it again by as_strided, which "
    "torch refuses for DTensors that are not as before. Here it is made by the view ops that the "
    "program has run.",
    until="the view ops of tensor subclasses are run again",
    test="tests/dtensor/compiled/test_views_returned.py"
    "::test_views_of_inputs_are_returned_with_their_gradients",
)
WRITES = Patch(
    module=_AOT + ".runtime_wrappers",
    attribute="_create_runtime_wrapper",
    file="torch/_functorch/_aot_autograd/runtime_wrappers.py",
    why="A compiled program writes to the local tensors of its inputs, where no op of DTensors' "
    "follows: what these are slices of, or what slices of them others have, would not be told.",
    until="slices of sharded dims are views for torch, too",
    test="tests/dtensor/run/test_processes.py::test_compiled_writes",
)
EXPRESSIONS = Patch(
    module=_PROXIES,
    attribute="_build_proxy_for_sym_expr",
    file="torch/fx/experimental/proxy_tensor.py",
    why="An expression that the tracer has not met before is put together from what it has. 2.13 "
    "has no function for powers; 2.13 and 2.14 call one of two arguments with products of three; "
    "and for maxima all three have functions of their own that Inductor does not know.",
    until="each of the three is traced to functions of two arguments that Inductor knows",
    test="tests/dtensor/compiled/test_compiled.py"
    "::test_patterns_of_models_run_as_eagerly_in_few_graphs",
)
SLOTS = Patch(
    module=_PROXIES,
    attribute="set_proxy_slot",
    file="torch/fx/experimental/proxy_tensor.py",
    why="What the tracer knows to compute a symbol stays as it is: torch takes max(s, 1), which is "
    "s again, for the way to s, and then looks for s without end.",
    until="set_proxy_slot keeps the first proxy of an expression",
    test="tests/dtensor/compiled/test_compiled.py"
    "::test_patterns_of_models_run_as_eagerly_in_few_graphs",
)
EQUALS = Patch(
    module="torch._functorch.partitioners",
    attribute="fx_graph_cse",
    file="torch/_functorch/partitioners.py",
    why="Equal nodes of a graph are made one. What is equal on one rank need not be on another: "
    "two exchanges of which a rank gives and gets as much, of what both times are no rows. That "
    "rank would wait in one of them, and the others in two.",
    until="a node of a graph can be kept apart from its equals",
    test="tests/dtensor/compiled/test_compiled_order.py::test_equal_exchanges_are_not_made_one",
)
PASSES = Patch(
    module=_AOT + ".graph_compile",
    attribute="_partition_joint_graph_into_fw_bw",
    file="torch/_functorch/_aot_autograd/graph_compile.py",
    why="Whether a collective runs in the forward graph, in the backward graph, or in both, goes "
    "by what it depends on and by the sizes of what could be saved, which are this rank's. Here it "
    "is the pass in which the program issues it; and in each graph they stand in the order in "
    "which it does.",
    until="the partitioner puts collectives where they were issued, on every rank alike",
    test="tests/dtensor/compiled/test_compiled_order.py"
    "::test_what_the_backward_pass_gathers_alone_is_gathered_there",
)
ORDER = Patch(
    module="torch._inductor.compile_fx",
    attribute="fx_codegen_and_compile",
    file="torch/_inductor/compile_fx.py",
    why="Passes over the graph may move collectives by this rank's sizes; and two passes for "
    "overlap and `enable_overlap_scheduling`, where a program turns them on, by how long they take "
    "on this rank. Here the graph is compiled with its collectives in the order in which they were "
    "issued, and without those three where ranks may hold different sizes. (torch's check, "
    "`spmd_check`, hangs where only some ranks compile.) Replaced once the program imports it.",
    until="the order is that of the program, and what moves collectives decides alike on all ranks",
    test="tests/dtensor/compiled/test_compiled_order.py"
    "::test_the_chain_is_in_the_order_of_the_program",
)
CACHE_KEYS = Patch(
    module="torch.compiler.config",
    attribute="cache_key_tag",
    file="torch/compiler/config.py",
    why="What a rank sends and holds stands in its graph, and torch's keys of compiled graphs on "
    "disk do not tell ranks apart, nor our settings: a word is added to the tag that is there.",
    until="torch keeps the graphs of ranks apart, and knows which rules were in force",
    test="tests/dtensor/run/test_redistribute_in_programs.py"
    "::test_compiled_graphs_of_other_settings_"
    "are_kept_apart",
    lacking="graphs that are compiled under other rules would be taken for one another",
)

TABLE = tuple([row for row in list(globals().values()) if isinstance(row, Patch)])
