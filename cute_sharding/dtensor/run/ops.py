"""Runs an op of rows in place of torch's local op: movements and views of the local tensors, one
after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch

from cute_sharding._memory import remembered
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
from cute_sharding.dtensor.run.in_graphs import moved_in_graph, write_back_in_graph
from cute_sharding.dtensor.run.lists import LocalMove, redistribute_all
from cute_sharding.dtensor.run.moved_views import note_parts
from cute_sharding.dtensor.run.moving import Movement
from cute_sharding.dtensor.run.op_plan import as_list
from cute_sharding.dtensor.run.order import lie_in, order_of
from cute_sharding.dtensor.run.placements import text
from cute_sharding.dtensor.run.ranks import on_each_rank, place
from cute_sharding.exchange import Mesh, Placed
from cute_sharding.exchange.slices import ends_otherwise
from cute_sharding.propagation.steps import PlacedView as PlacedStep
from cute_sharding.relations.forms import Fold, Window
from cute_sharding.relations.moves import are_apart
from cute_sharding.sharding.chains import chains_of


class LocalView(NamedTuple):
    """A view under which each device keeps its elements in their order: a view of the local tensor.

    Attributes:
        to: the step's output, as a sharded tensor.
        mesh: the DeviceMesh.
    """

    to: PlacedStep
    mesh: Any
    dims: tuple[int, ...] = ()

    def __call__(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [on_each_rank(self._viewed, x) for x in operands]

    def _viewed(self, rank: int, local: torch.Tensor) -> torch.Tensor:
        if self.to.step.row.op == "torch.permute":
            return local.permute(*self.to.step.args)
        shape, on = self.to.shape, Mesh.numbered(tuple(self.mesh.shape))
        placed = Placed(shape, on, chains_of(self.to.cuts, len(shape), on.sizes))
        return local.reshape(placed.shape_of(place(self.mesh, rank)))


class LocalStep(Protocol):
    """A function of local tensors: a :class:`Movement`, also one of any size, or a
    :class:`LocalView`.

    Attributes:
        dims: the mesh dims whose ranks exchange rows.
    """

    @property
    def dims(self) -> tuple[int, ...]: ...

    def __call__(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]: ...


@dataclass(frozen=True, eq=False)
class Runner:
    """Runs an op, called with the op's arguments in which local tensors stand for DTensors.

    Attributes:
        name: the op's.
        specs: the operands'.
        placements: to which the operands are redistributed first.
        plan: makes the steps that run then, each on the results of the one before it. torch keeps
            a runner for as long as the program runs; its steps, which are far larger, are
            remembered while there is room (cute_sharding/_memory.py), and made again.
        metas: the results' TensorMetas; results are laid out by their strides. No list for a single
            result.
        note: for an op whose results are views, which is a single movement: called for those that
            are copies, with (runner, local tensor, its spec, results).
    """

    name: str
    specs: Sequence[DTensorSpec]
    placements: Sequence[tuple[Placement, ...]]
    plan: Callable[[], tuple[LocalStep, ...]]
    metas: TensorMeta | Sequence[TensorMeta]
    note: Callable[[Any, torch.Tensor, DTensorSpec, list[torch.Tensor]], None] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(_tensors_of((*args, *kwargs.values())), self.moved)

    def run(
        self,
        given: list[torch.Tensor],
        moved: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]],
    ) -> Any:
        """Run the op on local tensors; ``moved`` makes results of the redistributed ones."""
        for spec, whole in _gathered(self):
            dispatch.observe(spec, whole, self.name)
        operands = self._brought([collective_ops.wait_for(x) for x in given])
        step, results = self.steps[0], None
        if self.note is not None and isinstance(step, Movement):
            results = step.views(operands) if self._steps_fit else None
        if results is not None:
            note_parts(self, given[0], results)
        else:
            results = list(map(lie_in, moved(operands), self._orders))
            if self.note is not None:
                self.note(self, given[0], self.specs[0], results)
        return results[0] if isinstance(self.metas, TensorMeta) else results

    @property
    def steps(self) -> tuple[LocalStep, ...]:
        return _steps(self)

    @cached_property
    def _steps_fit(self) -> bool:
        """Whether dims of a result that a global view may merge can be merged on each device too.
        Counterexample: every other row of a cut dim, if devices have odd numbers of rows.
        """
        return not any(
            meta.shape[d] * meta.stride[d] in meta.stride
            for k, meta in enumerate(as_list(self.metas))
            for d in ends_otherwise(self.movement.exchange, k)
        )

    @property
    def movement(self) -> Any:
        """The movement, of a runner with a single step."""
        (step,) = self.steps
        return step

    @cached_property
    def _orders(self) -> list[tuple[int, ...] | None]:
        """For each result, the memory order of its dims."""
        return list(map(order_of, as_list(self.metas)))

    @cached_property
    def _targets(self) -> dict[int, DTensorSpec]:
        """By number, the specs of the operands that have to be redistributed."""
        return {
            i: DTensorSpec(spec.mesh, placements, spec.tensor_meta)
            for i, (spec, placements) in enumerate(zip(self.specs, self.placements))
            if placements != tuple(spec.placements)
        }

    def _brought(self, given: list[torch.Tensor]) -> list[torch.Tensor]:
        """The operands, redistributed to where the steps start."""
        if not self._targets:
            return given
        wanted = [LocalMove(given[i], self.specs[i], to) for i, to in self._targets.items()]
        moved = dict(zip(self._targets, redistribute_all(wanted, counted=False)))
        return [moved.get(i, x) for i, x in enumerate(given)]

    def moved(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results' local tensors, in memory of their own."""
        results = list(operands)
        for step in self.steps:
            if isinstance(step, Movement) and dispatch_modes.is_tracing():
                results = moved_in_graph(step, results)
            else:
                results = step(results)
        if isinstance(self.steps[-1], LocalView):  # the op is no view op: those are one movement
            results = [on_each_rank(lambda _, x, y: _in_own_memory(x, y), *results, *operands)]
        return results

    def back(self, output: int, moved: torch.Tensor, source: torch.Tensor) -> None:
        """Write the rows of one result, ``moved``, back to ``source``, the operand's local tensor;
        its other rows stay. All ranks together.
        """
        movement = self.movement
        if isinstance(movement, Movement) and dispatch_modes.is_tracing():
            write_back_in_graph(movement, output, moved, source)
        else:
            movement.back(output, moved, source)

    def is_apart(self, output: int, other: Any) -> bool:
        """Whether a result has no row in common with any result of ``other``, which ran on the same
        operand. False also where that is not known.
        """
        one, two = self.movement, getattr(other, "movement", None)
        if not isinstance(one, Movement) or not isinstance(two, Movement):
            return False
        moves = one.exchange.move, two.exchange.move
        return all(are_apart(moves[0], output, moves[1], k) for k in range(len(moves[1].outputs)))

    def check_back(self, writer: str, tensor: Any) -> None:
        """
        Raises:
            RuntimeError: an element that ``writer`` writes to has no single place in the operand:
                the result is windows, which may overlap, or the operand was expanded.
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
                f"{writer} cannot write in place to the result of {self.name} of a DTensor of "
                f"shape {tuple(spec.shape)} with placements {text(spec.placements)}. Windows of a "
                "sharded dim, or parts of an expanded tensor, may have one element in several "
                "places. Write to a .clone() instead."
            )


@remembered
def _steps(runner: Runner) -> tuple[LocalStep, ...]:
    return runner.plan()


@remembered
def _gathered(runner: Runner) -> list[tuple[DTensorSpec, DTensorSpec]]:
    """For each operand of which rows are sent: its spec, and the one that torch would have
    redistributed it to.
    """
    dims = {m for step in runner.steps for m in step.dims}
    found = []
    for spec in runner.specs:
        whole = [Replicate() if m in dims else p for m, p in enumerate(spec.placements)]
        if tuple(whole) != tuple(spec.placements):
            found.append((spec, DTensorSpec(spec.mesh, tuple(whole), spec.tensor_meta)))
    return found


def _tensors_of(arguments: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors among an op's arguments, also those in a list."""
    found: list[torch.Tensor] = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            found.append(argument)
        elif isinstance(argument, (list, tuple)):
            found += [x for x in argument if isinstance(x, torch.Tensor)]
    return found


def _in_own_memory(x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """A tensor in memory of its own: these ops are no views, though all their steps may be."""
    is_shared = (
        dispatch_modes.is_tracing()
        or local_tensors.is_imagined(x)
        or x.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
    )
    return x.clone() if is_shared else x
