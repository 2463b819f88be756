"""How the states of an op lie, and how devices combine them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch

from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Partial,
    Placement,
    Replicate,
    Shard,
    TensorMeta,
    cut_of,
)
from cute_sharding.dtensor.run.groups import all_on_all_ranks, on_all_ranks
from cute_sharding.dtensor.run.placements import placement_of
from cute_sharding.dtensor.run.redistribute import combined, redistribute_local_tensor
from cute_sharding.layout.layout import row_major

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


@dataclass(frozen=True)
class States:
    """How the states of one op lie.

    Attributes:
        mesh: the DeviceMesh.
        shape: of the first operand.
        dims: its dims that are folded.
        placements: those of the first operand.
        over: the mesh dims whose devices combine states.
        of_state: the shape of a state.
        op: the op.
        operands: how its operands lie when it runs.
        results: how its results lie; None for one that is no tensor.
    """

    mesh: Any
    shape: tuple[Any, ...]
    dims: tuple[int, ...]
    placements: tuple[Placement, ...]
    over: tuple[int, ...]
    of_state: tuple[Any, ...]
    op: Any
    operands: tuple[DTensorSpec, ...]
    results: Sequence[DTensorSpec | None]

    def of_result(self, result: int, columns: int = 0) -> States:
        """Those of states that have the shape of a result, with so many more columns."""
        spec: Any = self.results[result]
        *others, last = spec.shape
        shape = (*others, last + columns)
        return replace(
            self, shape=shape, dims=(), placements=tuple(spec.placements), of_state=shape
        )

    @property
    def rows(self) -> Any:
        """The number of rows that are folded to one state."""
        return prod([self.shape[d] for d in self.dims])

    @cached_property
    def _ends(self) -> dict[tuple[str, torch.dtype, int, int], list[DTensorSpec]]:
        """What :meth:`ends` has given: each call of an op asks again, and specs keep their hash."""
        return {}

    def ends(
        self, op: str, dtype: torch.dtype, together: int = 1, columns: int = 0
    ) -> list[DTensorSpec]:
        """How a state lies that ``op`` combines, and how it lies then; ``together``: several. For
        "gather", how the states of all devices lie, one behind the other, and where they are
        needed; ``together``: of one device; ``columns``: of a last dim that is theirs alone.
        """
        key = op, dtype, together, columns
        found = self._ends.get(key)
        if found is None:
            found = self._ends[key] = self._made_ends(*key)
        return found

    def _made_ends(
        self, op: str, dtype: torch.dtype, together: int, columns: int
    ) -> list[DTensorSpec]:
        is_gathered = op == "gather"
        parts = together * prod([self.mesh.size(m) for m in self.over if is_gathered])
        in_front = (parts,) if is_gathered or together > 1 else ()
        shape = (*in_front, *self.of_state, *((columns,) if columns else ()))
        meta = TensorMeta(torch.Size(shape), row_major(shape), dtype)
        rows = [_behind(p, len(in_front)) for p in self.placements]
        before = Shard(0) if is_gathered else Partial(op)
        return [
            DTensorSpec(
                self.mesh,
                tuple([of if m in self.over else p for m, p in enumerate(rows)]),
                meta,
            )
            for of in (before, Replicate())
        ]

    def all(self, op: str, *states: torch.Tensor) -> list[torch.Tensor]:
        """The states of all devices together, combined by ``op``; several travel in one."""
        together, state = len(states), states[0]
        if together > 1:
            state = on_all_ranks(lambda *xs: torch.stack(xs), *states)
        state = combined(state, *self.ends(op, state.dtype, together))
        return list(state.unbind()) if together > 1 else [state]

    def of_each(self, *states: torch.Tensor) -> list[torch.Tensor]:
        """The states of all devices, one device behind the other in a dim in front, in which each
        device has as many. They travel in one, as bytes.
        """
        dtypes, count = [state.dtype for state in states], states[0].shape[0]
        if len(states) == 1:
            ends = self.ends("gather", dtypes[0], count)
            return [redistribute_local_tensor(states[0], *ends, counted=False)]

        def bytes_of(*states: torch.Tensor) -> torch.Tensor:
            parts = [each.contiguous().unsqueeze(-1).view(torch.uint8) for each in states]
            return torch.cat(parts, -1)

        width = sum([dtype.itemsize for dtype in dtypes])
        ends = self.ends("gather", torch.uint8, count, width)
        given = redistribute_local_tensor(on_all_ranks(bytes_of, *states), *ends, counted=False)

        def apart(given: torch.Tensor) -> list[torch.Tensor]:
            parts = given.split([dtype.itemsize for dtype in dtypes], -1)
            copies = [each.clone(memory_format=torch.contiguous_format) for each in parts]
            return [each.view(dtype).squeeze(-1) for each, dtype in zip(copies, dtypes)]

        return all_on_all_ranks(apart, given)

    def folded(self, function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        """The local state: the sum of the function's values over the folded dims, in a wider dtype
        where these have 16 bits.
        """

        def of_rank(*xs: torch.Tensor) -> torch.Tensor:
            found = function(*xs)
            return found.sum(self.dims, keepdim=True, dtype=wider(found.dtype))

        return on_all_ranks(of_rank, *tensors)

    def greatest(self, x: torch.Tensor) -> torch.Tensor:
        """The greatest number of each row; without rows minus infinity."""

        def of_rank(x: torch.Tensor) -> torch.Tensor:
            if x.numel() or all(x.shape[d] for d in self.dims):
                return wide(x.amax(self.dims, keepdim=True))
            shape = [1 if d in self.dims else n for d, n in enumerate(x.shape)]
            return x.new_full(shape, -torch.inf, dtype=wider(x.dtype))

        return on_all_ranks(of_rank, x)

    def finish(
        self, function: Callable[..., torch.Tensor], *tensors: torch.Tensor, result: int = 0
    ) -> torch.Tensor:
        """A result of this device's own rows, from operands and combined states."""
        dtype = self.dtype(result)
        return on_all_ranks(lambda *xs: of_dtype(function(*xs), dtype), *tensors)

    def dtype(self, result: int) -> torch.dtype:
        """The dtype of a result."""
        spec: Any = self.results[result]
        dtype: torch.dtype = spec.tensor_meta.dtype
        return dtype

    def without(self, x: torch.Tensor, keepdim: bool) -> torch.Tensor:
        """A result that has the folded dims only with ``keepdim``."""
        return x if keepdim else x.squeeze(self.dims)


def _behind(placement: Placement, dims: int) -> Placement:
    """The placement of a tensor with so many more dims in front."""
    cut = cut_of(placement)
    return placement if cut is None or not dims else placement_of((cut[0] + dims, cut[1]))


def wider(dtype: torch.dtype) -> torch.dtype:
    """A dtype of at least 32 bits."""
    return _WIDER.get(dtype, dtype)


def wide(x: torch.Tensor) -> torch.Tensor:
    """The tensor with at least 32 bits a number. (An operand that meets a state, which has as many,
    needs no copy of its own: the result of the two has them.)
    """
    return of_dtype(x, wider(x.dtype))


def of_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x if x.dtype == dtype else x.to(dtype)
