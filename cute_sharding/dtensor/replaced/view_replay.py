"""Views that leave a compiled program (torch/_functorch/_aot_autograd): a program returns them as
views of an input or of another result, and torch makes them anew from that after the graph has run.

For a plain tensor torch keeps the view ops that made it. For a DTensor it keeps none, and would
make the view from its size and stride. DTensors refuse that, and if rows have moved, size and
stride do not determine them. Here the view ops of DTensors are kept too (:class:`Replay`), as
autograd knows them, and run again: the result is that of an eager program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from operator import attrgetter
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from cute_sharding.dtensor.replaced.dispatch_modes import no_modes
from cute_sharding.dtensor.replaced.symints import size_text

__all__ = ["Replay", "by_view_ops", "with_view_ops"]


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
