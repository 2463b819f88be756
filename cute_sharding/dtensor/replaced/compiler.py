"""The compiler: dynamo's guards, AOTAutograd's subclasses, proxies of symbolic expressions, and the
views that leave a compiled program.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial, wraps
from operator import attrgetter
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch._compile import _disable_dynamo
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only

from cute_sharding.dtensor.replaced import collective_order, compiler_patches, patches
from cute_sharding.dtensor.replaced.dispatch_modes import no_modes
from cute_sharding.dtensor.replaced.expansion import as_they_are
from cute_sharding.dtensor.replaced.local_tensors import is_imagined
from cute_sharding.dtensor.replaced.patch import Given, Installed
from cute_sharding.dtensor.replaced.symints import (
    SymbolicStride,
    has_shape_env,
    is_symbolic,
    settled_spec,
    shape_with_symbols,
    size_text,
)
from cute_sharding.dtensor.replaced.tensor_specs import (
    are_known,
    cut_of,
    decoded_order,
    may_be_uneven,
)

__all__ = [
    "Replay",
    "Tracing",
    "by_view_ops",
    "first_wins",
    "forget_compiled_code",
    "none_of_ours",
    "of_two_arguments",
    "on_global_sizes",
    "outside_graphs",
    "settled_metadata",
    "strided_shard",
    "tag_compiled_graphs",
    "traced_as_known",
    "with_rows_of_their_own",
    "with_view_ops",
]


# -- compiler --------------------------------------------------------------------------------------
# The compiler: dynamo's guards, AOTAutograd's subclasses, proxies of symbolic expressions
# (torch/_dynamo, torch/_functorch/_aot_autograd, torch/fx/experimental) and compiled code.
#
# Nothing of it is imported before the program imports it. Caches may be reset and tagged; most of
# what ``compiler.Tracing`` installs is made here.

P = ParamSpec("P")
T = TypeVar("T")


def outside_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function that runs between graphs: a compiled program breaks its graph where it calls
    it. Programs that do not compile import nothing of the compiler for it.
    """
    disabled = _disable_dynamo(function)

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        return (disabled if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return called


def tag_compiled_graphs(tag: str | None) -> None:
    """Give graphs that torch.compile caches on disk this tag, to keep them apart from graphs
    without it or with another one: the graphs differ, and ranks must not mix them.

    None removes the tag.
    """
    config: Any = (
        compiler_patches.CACHE_KEYS.owner()
    )  # an option: its other words are the program's
    kept = [
        part
        for part in config.cache_key_tag.split(" ")
        if part and not part.startswith("cute_sharding:")
    ]
    config.cache_key_tag = " ".join(kept + ([f"cute_sharding:{tag}"] if tag is not None else []))


def forget_compiled_code() -> None:
    """Have torch.compile's programs compiled anew at their next call: the placements that they were
    compiled for no longer hold.
    """
    reset = getattr(sys.modules.get("torch._dynamo"), "reset_code_caches", None)
    if reset is not None:  # while it is being imported, nothing is compiled yet
        reset()


def none_of_ours(stock: Callable[..., Any]) -> Callable[..., Any]:
    """torch's function that decides what to do with each function that runs beside a graph;
    functions of this package, and all that they call, are not compiled. (Those that the program
    itself calls may still be part of its graph.)
    """
    from torch._C._dynamo.eval_frame import _FrameAction as FrameAction
    from torch._C._dynamo.eval_frame import _FrameExecStrategy as FrameExecStrategy
    from torch._dynamo.types import ConvertFrameReturn

    def __call__(wrapper: Any, frame: Any, *rest: Any, **named: Any) -> Any:
        # By the module's name, because methods of dataclasses are in no file.
        module = str(frame.f_globals.get("__name__"))
        if module.partition(".")[0] != "cute_sharding":
            return stock(wrapper, frame, *rest, **named)
        calls_programs = module.endswith(".extras.mapped")
        called = FrameAction.DEFAULT if calls_programs else FrameAction.SKIP
        return ConvertFrameReturn(
            frame_exec_strategy=FrameExecStrategy(FrameAction.SKIP, called),
            skip_reason="it is no part of the program",
        )

    return __call__


def with_rows_of_their_own(stock: Callable[..., Any]) -> Callable[..., Any]:
    """torch's function that decides which sizes of an input are symbols; the sizes of a DTensor's
    local tensor share no symbol with a size that happens to be equal.
    """

    def _automatic_dynamic(e: Any, *args: Any, **kwargs: Any) -> Any:
        context = stock(e, *args, **kwargs)
        if isinstance(e, DTensor):
            from torch.fx.experimental.symbolic_shapes import DimDynamic

            for inner in getattr(context, "inner_contexts", {}).values():
                inner.dynamic_sizes[:] = [
                    DimDynamic.DYNAMIC if dim is DimDynamic.DUCK else dim
                    for dim in inner.dynamic_sizes
                ]
        return context

    return _automatic_dynamic


def of_two_arguments(stock: Callable[..., Any]) -> Callable[..., Any]:
    """torch's function that traces how to compute an expression; powers and long products become
    products of two, and maxima and minima torch.sym_max and torch.sym_min.
    """
    from torch.fx.experimental import proxy_tensor

    def _build_proxy_for_sym_expr(tracer: Any, expr: Any, out: Any = None) -> Any:
        if expr in tracer.sympy_expr_tracker:
            return stock(tracer, expr, out)
        if getattr(expr, "is_Pow", False) and expr.exp.is_Integer and expr.exp > 1:
            parts = expr.base ** (expr.exp - 1), expr.base
        elif type(expr).__name__ in _FOLDED and (not expr.is_Mul or len(expr.args) > 2):
            parts = expr.func(*expr.args[:-1]), expr.args[-1]
        else:
            return stock(tracer, expr, out)
        args = [_build_proxy_for_sym_expr(tracer, part) for part in parts]
        if any(arg is None for arg in args):
            return None
        function = _FOLDED.get(type(expr).__name__, operator.mul)
        if out is None:
            return function(*args)
        proxy_tensor._sym_register(tracer, function, tuple(args), out)
        return out

    return _build_proxy_for_sym_expr


_FOLDED: dict[str, Any] = {"Mul": operator.mul, "Max": torch.sym_max, "Min": torch.sym_min}


def first_wins(stock: Callable[..., None]) -> Callable[..., None]:
    def set_proxy_slot(obj: Any, tracer: Any, proxy: Any) -> None:
        expr = obj.node.expr if isinstance(obj, torch.SymInt) else None
        known = tracer.sympy_expr_tracker.get(expr) if expr is not None else None
        stock(obj, tracer, proxy)
        if known is not None:
            tracer.sympy_expr_tracker[expr] = known

    return set_proxy_slot


def with_writes_told(
    before: Callable[[Sequence[DTensor]], Callable[[], None]],
    live: set[Any],
    stock: Callable[..., Any],
) -> Callable[..., Any]:
    """torch's function that makes the runner of a program traced by AOTAutograd. If the graph
    writes to DTensors, the runner calls ``before(these)`` first, and its result afterwards, while
    there are ``live`` copies.
    """

    def create_runtime_wrapper(
        compiled_fn: Any, *, runtime_metadata: Any, **rest: Any
    ) -> Callable[..., Any]:
        run = stock(compiled_fn, runtime_metadata=runtime_metadata, **rest)
        written = [
            i
            for i, info in enumerate(runtime_metadata.input_info)
            if info.mutation_type.name == "MUTATED_IN_GRAPH"
        ]
        if not written or not any(
            hasattr(meta, "original_subclass_type") for meta in runtime_metadata.subclass_inp_meta
        ):
            return run

        @wraps(run)
        def run_and_tell(args: list[Any]) -> Any:
            if not live:
                return run(args)
            after = before([args[i] for i in written if isinstance(args[i], DTensor)])
            results = run(args)
            after()
            return results

        return run_and_tell

    return create_runtime_wrapper


def settled_metadata(stock: Callable[..., Any]) -> Callable[..., Any]:
    def create_subclass_metadata(a: Any, *args: Any, **options: Any) -> Any:
        if isinstance(a, DTensor):
            a._spec = settled_spec(a._spec)
        return stock(a, *args, **options)

    return create_subclass_metadata


_SET_LATER = "act_input_indices"


def traced_as_known(
    planned_graph: Callable[[], PlannedGraph | None], stock: Callable[..., Any]
) -> Callable[..., Any]:
    """torch's function that traces a program. It traces once more if the trace has made constants
    of sizes that were noted as symbols of its DTensors before. (Each time, fewer are left.)
    """
    from torch._functorch import aot_autograd

    def aot_stage1_graph_capture(aot_state: Any, orig_flat_fn: Any, *args: Any) -> Any:
        given: Any = list(aot_state.flat_args)
        descs = list(aot_state.flat_args_descs)
        program = forward_as_planned(planned_graph, orig_flat_fn)
        traced = stock(aot_state, program, *args)
        while _is_outdated(aot_state.fw_metadata):
            state: Any = aot_autograd.create_aot_state(
                aot_state.stack,
                orig_flat_fn,
                given,
                list(descs),
                aot_state.aot_config,
                aot_state.fake_mode,
                aot_state.fake_mode.shape_env,
            )
            if hasattr(aot_state.fw_metadata, _SET_LATER):  # only in 2.13
                setattr(state.fw_metadata, _SET_LATER, getattr(aot_state.fw_metadata, _SET_LATER))
            for field in fields(state):
                setattr(aot_state, field.name, getattr(state, field.name))
            traced = stock(aot_state, program, *args)
        return traced

    return aot_stage1_graph_capture


def _is_outdated(noted: Any) -> bool:
    """Whether a size or stride of a returned DTensor, or of a gradient, was noted as a symbol and
    is a number by now.
    """
    return any(
        isinstance(n, torch.SymInt) and n.node.maybe_as_int() is not None
        for meta in (*noted.subclass_fw_graph_out_meta, *noted.subclass_tangent_meta)
        if isinstance(getattr(meta, "original_subclass", None), DTensor)
        for n in (*meta.outer_size, *meta.outer_stride)
    )


# -- compiler guards -------------------------------------------------------------------------------
# The guards of compiled programs (torch/fx/experimental/symbolic_shapes.py): on the global sizes of
# DTensors, which torch leaves out, but not on sizes that a program does not read.
#
# Nothing of the compiler is imported before the program imports it.


def on_global_sizes(stock: Callable[..., Any]) -> Callable[..., Any]:
    """torch's guards on the inputs of a program, and guards on global sizes of DTensors that are
    constants in it; without those on gradients that the program does not read.

    torch leaves guards on constants to its checks of plain tensors, which see only local sizes. If
    torch wrote all guards out, offsets of local tensors and sizes of their bases would be guarded
    too, and programs would be compiled again for nothing.
    """

    def produce_guards_verbose(
        shape_env: Any,
        placeholders: Any,
        sources: Any,
        source_ref: Any = lambda source: source.name,
        *,
        ignore_static: bool = True,
        **options: Any,
    ) -> Any:
        guards = options.pop("guards", None)
        found = stock(
            shape_env,
            placeholders,
            sources,
            source_ref,
            guards=_without_unread_gradients(
                shape_env, placeholders, shape_env.guards if guards is None else guards
            ),
            ignore_static=ignore_static,
            **options,
        )
        if not ignore_static or options.get("_simplified"):
            return found  # all guards are there, or only some are wanted
        for source, n in _constant_sizes(placeholders, sources).items():
            for guards in found:
                guards.exprs.append(f"{_in_language_of(guards, source, source_ref)} == {n}")
        return found

    return produce_guards_verbose


def _constant_sizes(placeholders: Sequence[Any], sources: Sequence[Any]) -> dict[Any, int]:
    """Source -> global size, for sizes of DTensors among the inputs that are numbers."""
    from torch._dynamo.source import LocalSource, TensorProperty, TensorPropertySource

    found = {}
    for value, source in zip(placeholders, sources):
        if isinstance(value, DTensor):
            sizes: tuple[Any, ...] = tuple(value.size())
            for dim, n in enumerate(sizes):
                number = n.node.maybe_as_int() if isinstance(n, torch.SymInt) else n
                if number is not None:
                    found[
                        TensorPropertySource(
                            LocalSource(source) if isinstance(source, str) else source,
                            TensorProperty.SIZE,
                            dim,
                        )
                    ] = number
    return found


def _in_language_of(guards: Any, source: Any, source_ref: Callable[[Any], str]) -> str:
    """The name of a source in guards: in Python an expression, in C++ a variable."""
    symbols = getattr(guards, "source_to_symbol", None)
    if symbols is None:
        return source_ref(source)
    if source not in symbols:
        import sympy

        symbols[source] = sympy.Symbol(f"global_size_{len(symbols)}")
    return str(symbols[source])


def _without_unread_gradients(
    shape_env: Any, placeholders: Sequence[Any], guards: Sequence[Any]
) -> list[Any]:
    """The guards without those on sizes of a gradient that is no input of the program.

    For a parameter torch also makes a fake of its ``.grad``, whose sizes have symbols of their own
    (torch/_subclasses/meta_utils.py). If the program reads the gradient, that fake is an input. If
    not, nothing can depend on these sizes, and torch cannot read them: a guard on one of them alone
    is an IndexError, and another guard would compile the program again when the gradient goes.
    """
    unread = {
        symbol
        for symbol, sources in shape_env.var_to_sources.items()
        if sources and all(_is_beneath_gradient(source) for source in sources)
    }
    if unread:
        unread -= {
            symbol for value in _sizes_of(placeholders) for symbol in value.node.expr.free_symbols
        }
    if not unread:
        return list(guards)
    return [
        guard for guard in guards if unread.isdisjoint(shape_env.simplify(guard.expr).free_symbols)
    ]


def _is_beneath_gradient(source: Any) -> bool:
    while source is not None:
        if getattr(source, "member", None) == "grad":
            return True
        source = getattr(source, "base", None)
    return False


def _sizes_of(values: Sequence[Any]) -> Iterator[Any]:
    """The symbolic numbers among the values, and in sizes of tensors and inner tensors."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield from _sizes_of((*value.size(), *value.stride(), value.storage_offset()))
            if is_traceable_wrapper_subclass(value):
                yield from _sizes_of([getattr(value, a) for a in value.__tensor_flatten__()[0]])
        elif isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            yield value


# -- tracing ---------------------------------------------------------------------------------------
# DTensors as the compiler sees them (torch/distributed/tensor/_api.py, _sharding_prop.py,
# placement_types.py): ``Tracing``.
#
# Functions and methods may be wrapped here. Each calls torch's own where it has nothing to add, and
# all are put back.


def strided_shard(dim: int, split_factor: Any) -> Placement:
    """A _StridedShard. If the split factor is a SymInt, no guard is added yet: :func:`settled` adds
    it when the number is needed.
    """
    if not isinstance(split_factor, torch.SymInt):
        return _StridedShard(dim, split_factor=split_factor)
    if not Tracing.settles:
        return _StridedShard(dim, split_factor=int(split_factor))
    return SymbolicStride(dim, split_factor)


class Tracing:
    """Installs the rows of :mod:`.patches` about compiled programs, where torch's support of
    DTensors is incomplete. In force from when it is made until ``installed`` is undone.

    ``local_size(rows, *cuts)``, each cut (split factor, devices, coordinate), computes sizes of
    local tensors (compiled/symbols.py). ``equate(size, size, others)`` makes two sizes known to
    be equal. ``writing(inputs)`` is called before a program that writes to these inputs, and its
    result afterwards, while there are ``live`` copies. ``of_one_rank()`` is called before a graph
    is compiled that may have other sizes on other ranks, and once Inductor is imported, which keeps
    graphs on disk. ``planned_graph()`` is the mode in which programs are traced, if a plan is in
    force.
    """

    settles = False  # whether split factors become numbers where they leave a compiled program

    def __init__(
        self,
        installed: Installed,
        local_size: Callable[..., Any],
        equate: Callable[..., None],
        writing: Callable[[Sequence[DTensor]], Callable[[], None]],
        live: set[Any],
        of_one_rank: Callable[[], None],
        planned_graph: Callable[[], PlannedGraph | None],
    ) -> None:
        self._installed = installed
        self._local_size, self._equate = local_size, equate
        self._writing, self._live, self._of_one_rank = writing, live, of_one_rank
        self._planned_graph = planned_graph
        installed.before_undo(self._end)
        installed.replace(patches.UNFLATTEN, self._unflatten)
        installed.replace(patches.LOCAL_SHAPES, self._local)
        installed.replace(patches.EXPANSION, as_they_are)
        self._meet_compiler()

    def _end(self) -> None:
        Tracing.settles = False

    def _meet_compiler(self) -> None:
        """Replace parts of the compiler, each once the program has imported its module: importing
        all of it takes as long as the rest of torch, and most programs do without.
        """
        installed = self._installed
        for row, made in (
            (compiler_patches.FRAMES, none_of_ours),
            (compiler_patches.CONSTANTS, lambda types: {*types, Given}),
            (compiler_patches.CONTEXTS, with_rows_of_their_own),
            (compiler_patches.GUARDS, on_global_sizes),
            (compiler_patches.METADATA, self._settled_metadata),
            (
                compiler_patches.TRACES,
                lambda stock: collective_order.numbered(
                    traced_as_known(self._planned_graph, stock)
                ),
            ),
            (compiler_patches.VIEW_OPS, partial(_noting_view_ops, self._planned_graph)),
            (compiler_patches.PLANNED, partial(traced_as_planned, self._planned_graph)),
            (compiler_patches.ALIASES, _by_view_ops),
            (
                compiler_patches.WRITES,
                partial(with_writes_told, self._writing, self._live),
            ),
            (compiler_patches.EXPRESSIONS, of_two_arguments),
            (compiler_patches.SLOTS, first_wins),
            (compiler_patches.EQUALS, collective_order.apart_on_each_rank),
            (compiler_patches.PASSES, collective_order.with_passes_settled),
            (compiler_patches.ORDER, collective_order.in_one_order),
        ):
            installed.once_imported(row, partial(installed.replace, row, made))
        installed.once_imported(compiler_patches.ORDER, self._of_one_rank)

    def _settled_metadata(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        Tracing.settles = True  # from now on symbolic split factors may leave a program
        return settled_metadata(stock)

    def _unflatten(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def __tensor_unflatten__(
            inner_tensors: dict[str, Any], flatten_spec: Any, outer_size: Any, outer_stride: Any
        ) -> Any:
            placements, meta, order, requires_grad = flatten_spec
            local, mesh = inner_tensors["_local_tensor"], inner_tensors["device_mesh"]
            size, stride = outer_size, outer_stride
            if is_imagined(local) and may_be_uneven(
                DTensorSpec(mesh, placements, TensorMeta(torch.Size(size), stride, meta.dtype))
            ):
                self._of_one_rank()
            if is_symbolic(tuple(size)) and has_shape_env(tuple(size)):
                expected = self._local_shape(size, mesh, placements)
                for actual, wanted in zip(local.shape, expected or ()):
                    self._equate(actual, wanted, size)
            elif has_shape_env(tuple(stride)):
                size = shape_with_symbols(size, stride)
            if order is None or not any(isinstance(p, _StridedShard) for p in placements):
                return stock(inner_tensors, flatten_spec, size, stride)
            spec = DTensorSpec(
                mesh,
                placements,
                TensorMeta(size, stride, meta.dtype),
                order,
                use_strided_shard_as_shard_order=False,
            )
            return DTensor(local, spec, requires_grad=requires_grad)

        return __tensor_unflatten__

    def _local_shape(
        self, shape: Sequence[Any], mesh: Any, placements: Sequence[Placement]
    ) -> tuple[Any, ...] | None:
        """The shape of this rank's local tensor, from symbolic global sizes; None if it cannot be
        computed.
        """
        device = mesh.get_coordinate()
        if device is None or not are_known(placements):
            return None
        cuts: list[list[Any]] = [[] for _ in shape]
        order = decoded_order(tuple(placements), mesh.shape)
        for m, placement in order or enumerate(placements):
            cut = cut_of(placement)
            if cut is not None:
                cuts[cut[0]].append((cut[1], mesh.shape[m], device[m]))
        local = tuple(
            [self._local_size(n, *chain) if chain else n for n, chain in zip(shape, cuts)]
        )
        return None if any(n is None for n in local) else local

    def _local(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def compute_local_shape_and_global_offset(
            global_shape: Any, mesh: Any, placements: Any, skip_offset: bool = False
        ) -> Any:
            shape = global_shape
            if skip_offset and is_symbolic(tuple(shape)) and has_shape_env(tuple(shape)):
                local = self._local_shape(shape, mesh, placements)
                if local is not None:
                    return local, ()
            return stock(shape, mesh, placements, skip_offset)

        return compute_local_shape_and_global_offset


# -- plans -----------------------------------------------------------------------------------------
# A plan of a step, in a program that AOTAutograd traces: first the forward pass alone, to note what
# it returns, and then both passes.


class PlannedGraph(Protocol):
    """A mode that brings the values of a program to where a plan wants them."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *raised: Any) -> Any: ...

    def note_results(self, results: Sequence[Any]) -> None:
        """Note what the program returns, when its forward pass is traced alone."""

    def note_gradients(self, tangents: Sequence[Any], of: Sequence[int | None]) -> None:
        """Note the gradients that the traced program is given: each of the result with a number."""

    def finished(self, gradients: Any) -> Any:
        """The gradients that the traced program returns."""


def forward_as_planned(
    planned_graph: Callable[[], PlannedGraph | None],
    program: Callable[..., Any],
    *,
    notes_results: bool = False,
) -> Callable[..., Any]:
    """A forward pass that AOTAutograd runs, as planned; inside of a program that is traced as
    planned, as it is.
    """

    @wraps(program)
    def run(*args: Any) -> Any:
        mode = planned_graph()
        if mode is None:
            return program(*args)
        with mode:
            results = program(*args)
        if notes_results:
            mode.note_results(results)
        return results

    return run


def traced_as_planned(
    planned_graph: Callable[[], PlannedGraph | None], stock: Callable[..., Any]
) -> Callable[..., Any]:
    """torch's function that makes what AOTAutograd traces: a forward pass, or both passes, with
    their results and what torch says of them. They run as planned.
    """

    def create_functionalized_fn(fn: Any, args: Any, args_descs: Any, **options: Any) -> Any:
        is_joint = options["trace_joint"]

        @wraps(fn)
        def run(*traced: Any) -> Any:
            mode = planned_graph()
            if mode is None:
                return fn(*traced)
            if is_joint:
                outputs = [getattr(desc, "output", None) for desc in args_descs[1]]
                mode.note_gradients(traced[1], [getattr(of, "idx", None) for of in outputs])
            with mode:
                results, said = fn(*traced)
                if is_joint:
                    results = results[0], mode.finished(results[1])
            return results, said

        return stock(run, args, args_descs, **options)

    return create_functionalized_fn


# Programs that do not compile never call these, and do not import what these import.


def _noting_view_ops(
    planned_graph: Callable[[], PlannedGraph | None], stock: Callable[..., Any]
) -> Callable[..., Any]:
    def run_functionalized_fw_and_collect_metadata(f: Any, **options: Any) -> Any:

        program = forward_as_planned(planned_graph, f, notes_results=True)
        return with_view_ops(stock)(program, **options)

    return run_functionalized_fw_and_collect_metadata


def _by_view_ops(stock: Callable[..., Any]) -> Callable[..., Any]:
    def gen_alias_from_base(*args: Any, **options: Any) -> Any:

        return by_view_ops(stock)(*args, **options)

    return gen_alias_from_base


# -- view replay -----------------------------------------------------------------------------------
# Views that leave a compiled program (torch/_functorch/_aot_autograd): a program returns them as
# views of an input or of another result, and torch makes them anew from that after the graph has
# run.
#
# For a plain tensor torch keeps the view ops that made it. For a DTensor it keeps none, and would
# make the view from its size and stride. DTensors refuse that, and if rows have moved, size and
# stride do not determine them. Here the view ops of DTensors are kept too (``Replay``), as autograd
# knows them, and run again: the result is that of an eager program.


@dataclass(frozen=True)
class _Expression:
    """A size in place of a SymInt, computed after the program has run."""

    expr: Any


@dataclass(frozen=True)
class _Step:
    """A view op, by name, with its arguments except the tensor; for an op with several results, the
    number of the result.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    which: int | None = None


@dataclass(frozen=True)
class Replay:
    """The view ops that make a tensor from its base. They are kept with graphs on disk.

    Attributes:
        steps: the ops, in order.
        sizes: the sizes and strides of the base and of the tensor, which give the symbols' values.
        detached: whether the steps start at the base without its gradients.
        sequence: read by torch, which stores its own view ops there: there are none.
    """

    steps: tuple[_Step, ...]
    sizes: tuple[Any, ...]
    detached: bool
    sequence: tuple[()] = ()

    def __call__(self, base: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The view of ``base`` that the program has returned as ``like``."""
        values = {
            size.expr: n
            for size, n in zip(self.sizes, _sizes(base, like))
            if isinstance(size, _Expression)
        }

        def number(size: _Expression) -> int:
            return int(size.expr.xreplace(values))

        view: Any = base.detach() if self.detached else base
        for step in self.steps:
            args, kwargs = tree_map_only(_Expression, number, (step.args, dict(step.kwargs)))
            view = attrgetter(step.op)(torch.ops)(view, *args, **kwargs)
            if step.which is not None:
                view = view[step.which]
        return view


class _Noting(TorchDispatchMode):
    """Records the ops that run in it, each on the result of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[_Step] = []
        self._last: Any = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.goes_on_with(args[0])
        self._last = func(*args, **(kwargs or {}))
        self.steps.append(_Step(str(func), tuple(args[1:]), tuple((kwargs or {}).items())))
        return self._last

    def goes_on_with(self, view: torch.Tensor) -> None:
        """Record which result of the last op is viewed next."""
        if isinstance(self._last, (list, tuple)):
            which = [_lies(each) for each in self._last].index(_lies(view))
            self.steps[-1] = replace(self.steps[-1], which=which)


def with_view_ops(stock: Callable[..., Any]) -> Callable[..., Any]:
    """torch's function that records what a program's results are views of; it also records the view
    ops of DTensors.

    Raises:
        RuntimeError: several results are views of one tensor that is made inside and not returned.
    """

    def run_functionalized_fw_and_collect_metadata(f: Any, **options: Any) -> Any:
        traced: list[Any] = []

        @wraps(f)
        def run(*args: Any) -> Any:
            traced[:] = args, f(*args)
            for result in traced[1]:
                _be_in_memory_of_what_it_views(result, args)
            return traced[1]

        collect = stock(run, **options)

        @wraps(collect)
        def collect_with_view_ops(*flat_args: Any) -> Any:
            noted = collect(*flat_args)
            args, results = traced
            traced.clear()
            for i, info in enumerate(noted.output_info):
                if info.base_idx is not None and isinstance(results[i], DTensor):
                    noted.output_info[i] = _with_view_ops(info, results[i], args, results)
            return noted

        return collect_with_view_ops

    return run_functionalized_fw_and_collect_metadata


def _be_in_memory_of_what_it_views(result: Any, inputs: Sequence[Any]) -> None:
    """Give a result the memory of the input that it is a view of, by which AOTAutograd recognizes
    it. DTensor's dispatcher does so for ops with one result, but not for the parts of a split.
    """
    base = result._base if isinstance(result, DTensor) else None
    if base is not None and any(base is x for x in inputs):
        torch._functionalize_unsafe_set(result, base)


def _with_view_ops(info: Any, view: Any, args: Sequence[Any], results: Sequence[Any]) -> Any:
    base, at, kind = view._base, info.base_idx, info.output_type.name
    if kind == "alias_of_input":
        # If several inputs share the memory, torch takes any: this is the one that was viewed.
        at = next((i for i, arg in enumerate(args) if arg is base and base is not None), at)
        base = args[at]
    elif kind == "alias_of_intermediate_base_is_user_output":
        base = results[at]
    elif kind == "is_input":
        return info
    else:
        raise RuntimeError(
            "a compiled program creates a DTensor, and returns several views of the DTensor, but "
            f"not the DTensor. One view has shape {tuple(view.shape)}. PyTorch cannot compile such "
            "a program. Also return the DTensor, return .clone() of each view, or take the views "
            "outside of the program."
        )
    return replace(info, base_idx=at, view_meta_sequence=_replay(view, base))


def _replay(view: Any, base: Any) -> Replay | None:
    """The view ops by which a traced program made a view of a base; None if not known."""
    # To autograd, a detached tensor is no view.
    of = view if view._base is None else view._base
    is_detached = of is not base
    if is_detached and (view.requires_grad or not _is_alike(of, base)):
        return None
    steps = [] if of is view else _steps(view, of)
    asked, sizes = _without_symints(([vars(step) for step in steps], _sizes(base, view)))
    known = {size.expr for size in sizes if isinstance(size, _Expression)}
    needed = {n for size in tree_leaves(asked) for n in _symbols(size)}
    if not needed <= known:
        return None
    return Replay(tuple([_Step(**step) for step in asked]), sizes, is_detached)


def _symbols(size: Any) -> Any:
    return size.expr.free_symbols if isinstance(size, _Expression) else ()


def _steps(view: Any, of: Any) -> list[_Step]:
    with no_modes():
        stand_in = torch.empty_strided(of.shape, of.stride(), dtype=of.dtype, device="meta")
        with _Noting() as noting:
            made = view._view_func_unsafe(stand_in)
        noting.goes_on_with(made)
    return noting.steps


def _is_alike(a: Any, b: Any) -> bool:
    return (
        isinstance(b, DTensor)
        and (a.dtype, a.placements) == (b.dtype, b.placements)
        and list(map(size_text, _sizes(a))) == list(map(size_text, _sizes(b)))
    )


def _lies(x: torch.Tensor) -> list[str]:
    return list(map(size_text, (x.storage_offset(), *_sizes(x))))


def _sizes(*tensors: torch.Tensor) -> tuple[Any, ...]:
    return tuple([n for x in tensors for n in (*x.shape, *x.stride())])


def _without_symints(value: Any) -> Any:
    def expression(n: torch.SymInt) -> Any:
        number = n.node.maybe_as_int()
        return _Expression(n.node.expr) if number is None else number

    return tree_map_only(torch.SymInt, expression, value)


def by_view_ops(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch's function that makes a program's result anew from what it is a view of; for a DTensor,
    by the view ops that the program has run.

    If these are not known and no gradient is needed, the program's own result is used if it is in
    the memory of the base.

    Raises:
        RuntimeError: neither is possible.
    """

    def gen_alias_from_base(
        aliased_base_tensor: torch.Tensor,
        target_meta_tensor: torch.Tensor,
        target_requires_grad: bool,
        target_view_meta_sequence: Any = None,
        **options: Any,
    ) -> torch.Tensor:
        base, like, replay = aliased_base_tensor, target_meta_tensor, target_view_meta_sequence
        if not (isinstance(base, DTensor) and isinstance(like, DTensor)):
            return stock(base, like, target_requires_grad, replay, **options)
        if isinstance(replay, Replay):
            view = replay(base, like)
        elif not target_requires_grad and _is_in_memory_of(like, base):
            view = like
        else:  # torch would go by the offset in memory, and that of a DTensor says nothing
            raise RuntimeError(
                f"a compiled program has a view of shape {tuple(like.shape)} of a DTensor of "
                f"shape {tuple(base.shape)} with placements {list(base.placements)}. The view "
                "ops are unknown, because the view was detached, has another dtype, or is an "
                "input, so the view cannot be taken again after the program. Return view.clone() "
                "instead, or take the view outside of the program."
            )
        if view.requires_grad and not target_requires_grad:
            return view.detach()
        return view.requires_grad_() if target_requires_grad else view

    return gen_alias_from_base


def _is_in_memory_of(view: DTensor, base: DTensor) -> bool:
    local, of_base = view._local_tensor, base._local_tensor
    return (
        not local.numel()
        or local.untyped_storage().data_ptr() == of_base.untyped_storage().data_ptr()
    )
