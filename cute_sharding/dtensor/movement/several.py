"""Ops that are several steps, views and movements (propagation/steps.py), run one after the other
on local tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cute_sharding.dtensor.movement.running import Runner
from cute_sharding.dtensor.replaced import collective_ops, dispatch_modes, local_tensors
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec, Placement
from cute_sharding.dtensor.run.order import laid_out
from cute_sharding.dtensor.run.ranks import on_each_rank, place
from cute_sharding.dtensor.run.redistribute import redistribute_local_tensor
from cute_sharding.propagation.steps import Placed
from cute_sharding.sharding.chains import chain_of, chains_of
from cute_sharding.sharding.meeting import count_rows, rows_held


@dataclass(frozen=True, eq=False)
class Steps:
    """What stands in for the local form of such an op: called with the local tensor first.

    Attributes:
        steps: from the operand's placements to the result's.
        movements: of each step what runs it; None: a view.
        spec: of the operand.
        placements: to which it is brought first.
        meta: of the result, which lies in the order of its strides.
    """

    steps: tuple[Placed, ...]
    movements: tuple[Runner | None, ...]
    spec: DTensorSpec
    placements: tuple[Placement, ...]
    meta: Any

    def __call__(self, local: torch.Tensor, *_: Any) -> torch.Tensor:
        given = local = collective_ops.waited(local)
        mesh = self.spec.mesh
        if self.placements != tuple(self.spec.placements):
            target = DTensorSpec(mesh, self.placements, self.spec.tensor_meta)
            local = redistribute_local_tensor(local, self.spec, target, counted=False)
        for step, movement in zip(self.steps, self.movements):
            if movement is not None:
                (local,) = movement.copies([local])
            else:
                local = on_each_rank(
                    lambda rank, x, step=step: _viewed(x, step, place(mesh, rank), mesh),
                    local,
                )
        return laid_out(on_each_rank(lambda _, x, y: _own(x, y), local, given), self.meta)


def _own(x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """In memory of its own: these ops are no views, though all their steps may be."""
    is_shared = (
        dispatch_modes.is_tracing()
        or local_tensors.is_imagined(x)
        or x.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
    )
    return x.clone() if is_shared else x


def _viewed(local: torch.Tensor, to: Placed, device: Sequence[int], mesh: Any) -> torch.Tensor:
    """A view carries each device's elements, in their order: so it is one of the local tensor."""
    if to.step.row.op == "torch.permute":
        return local.permute(*to.step.args)
    chains = chains_of(to.cuts, len(to.shape), tuple(mesh.shape))
    return local.reshape(
        [
            count_rows(rows_held(n, chain_of(chain, tuple(mesh.shape), device)))
            for n, chain in zip(to.shape, chains)
        ]
    )
