"""What stands in for the local form of an op of rows: movements and views of the local tensors, one
after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch

from cute_sharding.dtensor.answer.answers import listed
from cute_sharding.dtensor.replaced import (
    collective_ops,
    dispatch,
    dispatch_modes,
    local_tensors,
)
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Placement,
    Replicate,
    TensorMeta,
)
from cute_sharding.dtensor.run.lists import Wanted, redistribute_all
from cute_sharding.dtensor.run.moving import Movement
from cute_sharding.dtensor.run.order import lie_in, order_of
from cute_sharding.dtensor.run.placements import text
from cute_sharding.dtensor.run.ranks import on_each_rank, place
from cute_sharding.exchange.slices import ends_otherwise
from cute_sharding.propagation.steps import Placed
from cute_sharding.relations.forms import Fold, Window
from cute_sharding.sharding.chains import chain_of, chains_of
from cute_sharding.sharding.meeting import count_rows, rows_held


@dataclass(frozen=True, eq=False)
class LocalView:
    """A view that carries each device's elements, in their order: so it is one of the local tensor.

    Attributes:
        to: what comes of it, between sharded tensors.
        mesh: the DeviceMesh.
    """

    to: Placed
    mesh: Any
    dims: tuple[int, ...] = ()

    def __call__(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [on_each_rank(self._viewed, x) for x in operands]

    def _viewed(self, rank: int, local: torch.Tensor) -> torch.Tensor:
        if self.to.step.row.op == "torch.permute":
            return local.permute(*self.to.step.args)
        sizes, device = tuple(self.mesh.shape), place(self.mesh, rank)
        chains = chains_of(self.to.cuts, len(self.to.shape), sizes)
        held = [rows_held(n, chain_of(c, sizes, device)) for n, c in zip(self.to.shape, chains)]
        return local.reshape(list(map(count_rows, held)))


class Step(Protocol):
    """From local tensors to local tensors: a :class:`Movement`, also of any size, or a
    :class:`LocalView`.

    Attributes:
        dims: the mesh dims whose ranks exchange.
    """

    @property
    def dims(self) -> tuple[int, ...]: ...

    def __call__(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]: ...


@dataclass(frozen=True, eq=False)
class Runner:
    """Called with the op's arguments, in which local tensors stand for DTensors.

    Attributes:
        name: of the op.
        specs: of the operands.
        placements: to which these are brought first.
        steps: what is done then, each with what comes of the one before it.
        metas: of the results, which lie in the order of their strides; no list, of an op that gives
            none.
        note: where its results are views: is told of those that are copies, as ``note(runner, local
            tensor, its spec, results)``. They are of one movement then.
    """

    name: str
    specs: Sequence[DTensorSpec]
    placements: Sequence[tuple[Placement, ...]]
    steps: tuple[Step, ...]
    metas: TensorMeta | Sequence[TensorMeta]
    note: Callable[[Any, torch.Tensor, DTensorSpec, list[torch.Tensor]], None] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(_tensors_of((*args, *kwargs.values())), self.moved)

    def run(
        self,
        given: list[torch.Tensor],
        moved: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]],
    ) -> Any:
        """The op on local tensors, of which ``moved`` makes its results."""
        for spec, whole in self._gathered:
            dispatch.observe(spec, whole, self.name)
        operands = self._brought([collective_ops.waited(x) for x in given])
        step, results = self.steps[0], None
        if self.note is not None and isinstance(step, Movement):
            results = step.views(operands) if self._steps_fit else None
        if results is None:
            results = list(map(lie_in, moved(operands), self._orders))
            if self.note is not None:
                self.note(self, given[0], self.specs[0], results)
        return results[0] if isinstance(self.metas, TensorMeta) else results

    @cached_property
    def _steps_fit(self) -> bool:
        """Whether dims that are one in a result that is a view are one in a view on each device: of
        every other row of a dim that is cut, not where devices have odd numbers of rows.
        """
        return not any(
            meta.shape[d] * meta.stride[d] in meta.stride
            for k, meta in enumerate(listed(self.metas))
            for d in ends_otherwise(self.movement.exchange, k)
        )

    @property
    def movement(self) -> Any:
        """The one movement that it is."""
        (step,) = self.steps
        return step

    @cached_property
    def _gathered(self) -> list[tuple[DTensorSpec, DTensorSpec]]:
        """Of each operand of which something is sent, its spec, and to what torch would have
        redistributed it.
        """
        dims = {m for step in self.steps for m in step.dims}
        found = []
        for spec in self.specs:
            whole = [Replicate() if m in dims else p for m, p in enumerate(spec.placements)]
            if tuple(whole) != tuple(spec.placements):
                found.append((spec, DTensorSpec(spec.mesh, tuple(whole), spec.tensor_meta)))
        return found

    @cached_property
    def _orders(self) -> list[tuple[int, ...] | None]:
        """In which order the dims of each result lie."""
        return list(map(order_of, listed(self.metas)))

    @cached_property
    def _targets(self) -> dict[int, DTensorSpec]:
        """Where operands are to be that are not there, by number."""
        return {
            i: DTensorSpec(spec.mesh, placements, spec.tensor_meta)
            for i, (spec, placements) in enumerate(zip(self.specs, self.placements))
            if placements != tuple(spec.placements)
        }

    def _brought(self, given: list[torch.Tensor]) -> list[torch.Tensor]:
        """The operands where the movement starts."""
        if not self._targets:
            return given
        wanted = [Wanted(given[i], self.specs[i], to) for i, to in self._targets.items()]
        moved = dict(zip(self._targets, redistribute_all(wanted, counted=False)))
        return [moved.get(i, x) for i, x in enumerate(given)]

    def moved(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of each result the local tensor, in memory of its own."""
        results = list(operands)
        for step in self.steps:
            results = step(results)
        if isinstance(self.steps[-1], LocalView):  # of no view op: those are one movement
            results = [on_each_rank(lambda _, x, y: _own(x, y), *results, *operands)]
        return results

    def again(self, output: int, source: torch.Tensor) -> torch.Tensor:
        """One of the results, of what the operand's local tensor now has."""
        return lie_in(self.movement.again(output, source), self._orders[output])

    def back(self, output: int, moved: torch.Tensor, source: torch.Tensor) -> None:
        """Write to the operand's local tensor what one of the results, ``moved``, has of it. Its
        other rows stay. All ranks together.
        """
        self.movement.back(output, moved, source)

    @property
    def has(self) -> None:
        """What a result has of the operand is not known to be what another's has: to compare that
        costs as much as to move it again.
        """

    def check_back(self, writer: str, tensor: Any) -> None:
        """
        Raises:
            RuntimeError: what ``writer`` writes to a result has no one place in the operand: it is
                windows, which may have rows in common, or what it is of was expanded.
        """
        windows = any(
            isinstance(rows.form, (Window, Fold))
            for part in self.movement.exchange.move.links
            for pair in part.pairs
            for rows in pair
        )
        spec = self.specs[0]
        meta = spec.tensor_meta
        expanded = meta is not None and any(
            n > 1 and not step for n, step in zip(meta.shape, meta.stride)
        )
        if windows or expanded:
            raise RuntimeError(
                f"{writer} writes in place to the result of {self.name} of a "
                f"DTensor of shape {tuple(spec.shape)} with placements "
                f"{text(spec.placements)}: windows of a sharded dim, or part of an expanded "
                "tensor. These may have one element in several places, so the write is not "
                "defined. Write to .clone() of it."
            )


def _tensors_of(arguments: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors among an op's arguments, also those in a list."""
    found: list[torch.Tensor] = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            found.append(argument)
        elif isinstance(argument, (list, tuple)):
            found += [x for x in argument if isinstance(x, torch.Tensor)]
    return found


def _own(x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """In memory of its own: these ops are no views, though all their steps may be."""
    is_shared = (
        dispatch_modes.is_tracing()
        or local_tensors.is_imagined(x)
        or x.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
    )
    return x.clone() if is_shared else x
