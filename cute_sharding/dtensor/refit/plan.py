"""``plan_refit``: weights as another program has them, from code on whole tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cute_sharding.dtensor.bookkeeping.stats import as_text
from cute_sharding.dtensor.models.running import ReshardError
from cute_sharding.dtensor.refit.running import Running
from cute_sharding.dtensor.refit.specs import (
    Target,
    check_all_used,
    named_tensor,
    spec_of,
    target_of,
)
from cute_sharding.dtensor.refit.trace import Generator, trace
from cute_sharding.dtensor.replaced import communication, dispatch_modes, tensor_specs
from cute_sharding.dtensor.run.packing import lie_alike, meetings
from cute_sharding.dtensor.run.placements import text
from cute_sharding.dtensor.run.specs import OfThisProcess, Spec
from cute_sharding.models.refit import Refit


@dataclass(frozen=True, eq=False)
class RefitPlan(OfThisProcess, Refit):
    """A planned refit, which may be run any number of times.

    A plan also has the attributes and methods of a :class:`cute_sharding.models.refit.Refit`:
    ``received_bytes``, ``received_by(rank)``, ``collectives``, ``buffer_bytes``, ``coverage``,
    ``unread``, ``parts(rank)`` and ``to_dict()``.

    Attributes:
        source, target: the spec of each tensor, by name.

    >>> import torch
    >>> from torch.distributed.tensor import Shard
    >>> source = {name: Spec((4, 6), (2,), [Shard(0)]) for name in ("gate", "up")}
    >>> fused = lambda w: {"gate_up": torch.cat([w["gate"], w["up"]])}
    >>> plan = plan_refit(fused, source, {"*": ((2,), [Shard(0)])})
    >>> isinstance(plan, RefitPlan), plan.received_bytes, plan.collectives
    (True, 48, 1)
    """

    source: dict[str, Spec] = field(default_factory=dict)
    target: dict[str, Spec] = field(default_factory=dict)

    def run(
        self,
        state: Mapping[str, DTensor] | None = None,
        *,
        into: Mapping[str, DTensor] | None = None,
    ) -> dict[str, DTensor]:
        """The results, by name, from the tensors of ``state``.

        Call it on every rank of all meshes. On a rank outside of the mesh of a source tensor, the
        state need not have the tensor. On a rank outside of the mesh of a result, the result has no
        data. A run plans nothing and sends no metadata.

        Args:
            state: the sources, by name, with the shapes and placements of the plan. The run ignores
                all other tensors.
            into: tensors to write the results to, by name; by default new tensors. They must not
                share memory with the tensors of ``state``.

        Raises:
            TypeError: the plan was made for sizes or for an exchange.Mesh, on which it cannot run.
            ValueError: a tensor of ``state`` or ``into`` is missing, or has other placements than
                planned.
            ReshardError: the run failed. ``moved`` of the error names the tensors of ``into`` that
                are completely written, and ``left`` names all others.
        """
        self._check_meshes()
        rank = communication.this_rank()
        locals_ = [self._local(state or {}, name, spec) for name, spec in self.source.items()]
        given = [
            None
            if into is None
            else _as_planned("into", into, name, spec, rank in spec.ranks.ranks, spec.dtype)
            for name, spec in self.target.items()
        ]
        onto = [None if x is None else x._local_tensor for x in given]
        with torch.no_grad():
            operands = self._running.given(locals_)
            self._check_into(operands, onto)
            with self._said(onto) as written:
                results = self._running.run(operands, onto, written.add)
        return {
            name: tensor_specs.dtensor_of(local, spec.to_dtensor_spec(), requires_grad=False)
            if tensor is None
            else tensor
            for (name, spec), local, tensor in zip(self.target.items(), results, given)
        }

    def send(self, state: Mapping[str, DTensor]) -> None:
        """:meth:`run` on a rank that has only sources. Returns no results.

        Raises:
            ValueError: this rank also has results; or as :meth:`run`.
        """
        self._check_side("send", "results", self.target)
        self.run(state)

    def receive(self, *, into: Mapping[str, DTensor] | None = None) -> dict[str, DTensor]:
        """:meth:`run` on a rank that has only results. Returns the results by name.

        Args:
            into: tensors to write the results to, as for :meth:`run`.

        Raises:
            ValueError: this rank also has sources; or as :meth:`run`.
        """
        self._check_side("receive", "sources", self.source)
        return self.run(into=into)

    def inverse(self) -> RefitPlan:
        """The plan from the results back to the sources, with the placements of the sources.

        If results have an element several times (a repeated head, a tied weight), the inverse uses
        the first copy. The inverse drops padding. Values that a cast has rounded stay rounded.

        Raises:
            ValueError: the results do not have all elements of the sources, or the inverse does not
                keep within the ``memory_limit``.

        >>> import torch
        >>> from torch.distributed.tensor import Shard
        >>> source = {"w": Spec((4, 6), (2,), [Shard(0)])}
        >>> turned = plan_refit(lambda w: {"v": w["w"].mT}, source, {"v": ((2,), [Shard(0)])})
        >>> print(turned.inverse().relation)
        (6, 4) -> (4, 6)
          operand 0 (4,6):(1,4) -> result 0 (4,6):(6,1)
        """
        back = super().inverse()
        fields = back.relation, back.operands, back.results, back.memory_limit
        return RefitPlan(*fields, self.target, self.source)

    # -- as it runs --------------------------------------------------------------------------------

    @property
    def _meshes(self) -> list[Any]:
        """The meshes of all tensors."""
        return [spec.mesh for spec in (*self.source.values(), *self.target.values())]

    @cached_property
    def _running(self) -> Running:
        return Running(self, self._meshes, [spec.dtype for spec in self.target.values()])

    def _check_into(
        self, given: Sequence[torch.Tensor], onto: Sequence[torch.Tensor | None]
    ) -> None:
        """Raises:
        ValueError: a source is written over before it is sent, for all that is known.
        """
        if dispatch_modes.local_tensor_mode() is not None:
            return
        written = {k: [x] for k, x in enumerate(onto) if x is not None}
        for i, k, x in meetings({i: given[i] for i in self.relation.sources}, written):
            if not lie_alike(self._running.kept_view(k, given), x):
                raise ValueError(
                    f"the target tensor {self.results[k].name!r} shares memory with the source "
                    f"tensor {self.operands[i].name!r}: give into= tensors with memory of their own"
                )

    @contextmanager
    def _said(self, onto: Sequence[torch.Tensor | None]) -> Iterator[set[int]]:
        """What fails is said by the tensors that are written to: those of the buckets that it is
        told, and the others.
        """
        written: set[int] = set()
        try:
            yield written
        except Exception as error:
            if all(x is None for x in onto):
                raise
            some, left = self._moved_and_left(written, onto)
            raise ReshardError(
                f"the refit failed with {type(error).__name__}: {error}. Completely written "
                f"tensors: {as_text(some)}. Unchanged or partly written tensors: {as_text(left)}",
                some,
                left,
            ) from error

    def _moved_and_left(
        self, written: Collection[int], onto: Sequence[torch.Tensor | None]
    ) -> tuple[list[str], list[str]]:
        rank = communication.this_rank()
        waiting = {
            result
            for number, each in enumerate(self.packed)
            if number not in written
            for i in each.members
            for result in self.members[i].results
        }
        # What is not contiguous is written at the end.
        waiting.update(k for k, x in enumerate(onto) if x is not None and not x.is_contiguous())
        mine = [
            (k, name) for k, (name, x) in enumerate(self.target.items()) if rank in x.ranks.ranks
        ]
        some = [name for k, name in mine if k not in waiting]
        return some, [name for k, name in mine if k in waiting]

    def _check_meshes(self) -> None:
        found = set()
        for name, spec in (*self.source.items(), *self.target.items()):
            if not isinstance(spec.mesh, DeviceMesh):
                raise TypeError(
                    f"the plan cannot run, because the mesh {spec.mesh} of {name!r} is not a "
                    "DeviceMesh: call plan_refit with DeviceMeshes"
                )
            found.add(spec.mesh.device_type)
        kinds = sorted(found)
        if len(kinds) > 1:
            raise ValueError(
                f"the meshes of source and target have the device types {' and '.join(kinds)}: "
                "move the tensors to one device type first"
            )

    def _check_side(self, what: str, others: str, specs: Mapping[str, Spec]) -> None:
        """Raises:
        ValueError: some of those tensors are on this rank.
        """
        self._check_meshes()
        rank = communication.this_rank()
        if any(rank in spec.ranks.ranks for spec in specs.values()):
            raise ValueError(
                f"{what} cannot run on rank {rank}, because rank {rank} has {others} of the "
                f"refit. Call run(state) on rank {rank}"
            )

    def _local(self, state: Mapping[str, DTensor], name: str, spec: Spec) -> torch.Tensor:
        is_ours = communication.this_rank() in spec.ranks.ranks
        tensor = _as_planned("the state", state, name, spec, is_ours, spec.dtype)
        if tensor is None:
            mesh: Any = spec.mesh
            return torch.empty(0, dtype=spec.dtype, device=mesh.device_type)
        return tensor._local_tensor


def _as_planned(
    what: str, given: Mapping[str, Any], name: str, spec: Spec, is_ours: bool, dtype: torch.dtype
) -> DTensor | None:
    """A DTensor by its name, which lies as it was planned; None where a rank outside of its mesh
    has none.
    """
    tensor = given.get(name)
    if tensor is None and not is_ours and dispatch_modes.local_tensor_mode() is None:
        return None
    if tensor is None:
        raise ValueError(
            f"{what} has no tensor {name!r}, but the refit was planned with {name!r}: add the "
            "tensor, or plan the refit again"
        )
    found = spec_of(name, tensor)
    if (found.mesh, found.shape, found.dtype) != (spec.mesh, spec.shape, dtype) or tuple(
        found.placements
    ) != tuple(spec.placements):
        raise ValueError(
            f"{name!r} of {what} is {_said(found)}, but the refit was planned for {_said(spec)}: "
            "plan the refit again, or redistribute the tensor"
        )
    return tensor


def _said(spec: Spec) -> str:
    placements: Any = spec.placements
    return f"{tuple(spec.shape)} {spec.dtype} as {text(placements)} on {spec.mesh}"


def plan_refit(
    generator: Generator,
    source: Mapping[str, DTensor | Spec],
    target: Target,
    *,
    memory_limit: int | None = None,
) -> RefitPlan:
    """Plan to convert weights to the names and shapes of another program, directly from shards to
    shards.

    Args:
        generator: ordinary torch code, which takes a dict of whole tensors by name, and returns a
            dict of whole tensors. It may use views, permutes, slices, cats, stacks, splits,
            expands, repeats, rolls, flips, pads, indices of row numbers, and one cast of each
            source. ``plan_refit`` runs it once, on tensors without data.
        source: the tensors that the generator takes, by name: DTensors, or their specs.
        target: for each result, by name or by a pattern of names (``"*.qkv_proj.weight"``), a pair
            of mesh and placements, a DTensor or a spec; or a function of name and tensor that
            returns mesh and placements.
        memory_limit: the most bytes of buffers that a rank may hold, in addition to the state and
            the results. With a limit, the tensors move in more exchanges. By default, one exchange
            has an eighth of the bytes that a rank sends and receives, at least 64 MiB and at most 1
            GiB.

    Returns:
        The plan: ``.run(state)``, ``.inverse()``, ``str()``, ``.to_dict()``.

    Raises:
        cute_sharding.relations.NotOnlyMoved: the generator computes new values. The error names the
            op and the result, and is a ValueError.
        ValueError, TypeError, RuntimeError: the arguments do not fit together.

    The method is in docs/refit.md.

    >>> import torch
    >>> from torch.distributed.tensor import Replicate, Shard
    >>> def fused(w):
    ...     return {"qkv.weight": torch.cat([w["q"], w["k"], w["v"]]).to(torch.bfloat16)}
    >>> source = {name: Spec((8 if name == "q" else 4, 6), (2,), [Shard(0)]) for name in "qkv"}
    >>> print(plan_refit(fused, source, {"*.weight": ((2,), [Shard(1)])}))
    refit of 3 tensors to 1, mesh (2,) of ranks 0, 1
      qkv.weight (16, 6) bfloat16 as [S(1)]: 3 pieces of q, k, v
    in all: 1 exchange, a rank receives 48 bytes at the most; 192 bytes of results, all covered
    """
    specs = {name: spec_of(name, given) for name, given in source.items()}
    if not specs:
        raise ValueError(
            "the refit has no source tensors: pass as source the tensors from which the results "
            "are made"
        )
    found = trace(generator, {name: (spec.shape, spec.dtype) for name, spec in specs.items()})
    results = {
        name: target_of(target, name, shape, dtype)
        for name, shape, dtype in zip(found.names, found.relation.outputs, found.dtypes)
    }
    check_all_used(target, found.names)
    operands = tuple([named_tensor(name, spec) for name, spec in specs.items()])
    made = tuple([named_tensor(name, spec) for name, spec in results.items()])
    return RefitPlan(found.relation, operands, made, memory_limit, specs, results)
