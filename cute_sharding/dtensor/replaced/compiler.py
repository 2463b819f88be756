"""The compiler: dynamo's guards, AOTAutograd's subclasses, proxies of symbolic expressions
(torch/_dynamo, torch/_functorch/_aot_autograd, torch/fx/experimental) and compiled code.

Nothing of it is imported before the program imports it. Caches may be reset and tagged; most of
what :class:`.tracing.Tracing` installs is made here.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch._compile import _disable_dynamo
from torch.distributed.tensor import DTensor

from cute_sharding.dtensor.replaced import compiler_patches
from cute_sharding.dtensor.replaced.symints import settled_spec

P = ParamSpec("P")
T = TypeVar("T")

__all__ = [
    "first_wins",
    "forget_compiled_code",
    "none_of_ours",
    "of_two_arguments",
    "outside_graphs",
    "settled_metadata",
    "tag_compiled_graphs",
    "traced_as_known",
    "with_rows_of_their_own",
]


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


def traced_as_known(stock: Callable[..., Any]) -> Callable[..., Any]:
    """torch's function that traces a program. It traces once more if the trace has made constants
    of sizes that were noted as symbols of its DTensors before. (Each time, fewer are left.)
    """
    from torch._functorch import aot_autograd

    def aot_stage1_graph_capture(aot_state: Any, orig_flat_fn: Any, *args: Any) -> Any:
        given: Any = list(aot_state.flat_args)
        descs = list(aot_state.flat_args_descs)
        traced = stock(aot_state, orig_flat_fn, *args)
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
            traced = stock(aot_state, orig_flat_fn, *args)
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
