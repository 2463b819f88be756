"""``plan_refit``: weights as another program has them, from code on whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cute_sharding.dtensor.models.targets import ByPattern
from cute_sharding.dtensor.refit.trace import Generator, Traced, trace
from cute_sharding.dtensor.replaced import (
    communication,
    dispatch_modes,
    tensor_specs,
)
from cute_sharding.dtensor.replaced.local_tensors import is_wrapper
from cute_sharding.dtensor.replaced.tensor_specs import Partial, Replicate
from cute_sharding.dtensor.run.groups import on_each_rank
from cute_sharding.dtensor.run.packing import in_shape
from cute_sharding.dtensor.run.placements import chains_of_placements, chains_of_spec, text
from cute_sharding.dtensor.run.runner import PlanRunner
from cute_sharding.dtensor.run.specs import OnMesh, Spec, dtype_of
from cute_sharding.dtensor.run.this_process import OfThisProcess
from cute_sharding.models import PlacedTensor
from cute_sharding.models.refit import Refit

# By names or patterns of names, or asked with name and tensor.
Target: TypeAlias = "Mapping[str, DTensor | Spec | OnMesh] | Callable[[str, torch.Tensor], OnMesh]"


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
        sources = _as_planned("the state", state or {}, self.source)
        given = (
            [None] * len(self.target) if into is None else _as_planned("into", into, self.target)
        )
        onto = {k: _local(x) for k, x in enumerate(given) if x is not None}
        with torch.no_grad():
            operands = self._as_sent(sources)
            if dispatch_modes.local_tensor_mode() is None:
                read = {i: operands[i] for i in self.relation.sources}
                self._check_apart(read, {k: [x] for k, x in onto.items()})
            written: set[int] = set()
            here = [k for k, spec in enumerate(self.target.values()) if _is_here(spec)]
            how = "the refit", "written", "Unchanged or partly written"
            with self._said(how, here, written) if onto else nullcontext():
                results = self._written(operands, onto, written)
        return {
            name: tensor_specs.dtensor_of(local, spec.to_dtensor_spec(), requires_grad=False)
            if tensor is None
            else tensor
            for (name, spec), local, tensor in zip(self.target.items(), results, given)
        }

    def _as_sent(self, sources: Sequence[DTensor | None]) -> list[torch.Tensor]:
        """The local tensors of the operands as they are sent; without elements where this rank has
        none.

        Raises:
            OtherShape: one is not of the shape that its placements give.
        """

        def checked(rank: int, local: torch.Tensor, operand: PlacedTensor) -> torch.Tensor:
            shape = operand.placed.local_shape(rank)
            if shape is None:
                return local.new_empty(0, dtype=dtype_of(operand.dtype))
            local = in_shape(local, shape, operand.name)
            return local.detach().resolve_conj().resolve_neg().contiguous()

        nothing = torch.empty(0, device=self._meshes[0][0].device_type)
        locals_ = [nothing if x is None else communication.wait_for(_local(x)) for x in sources]
        return [
            on_each_rank(partial(checked, operand=operand), x)
            for operand, x in zip(self.operands, locals_)
        ]

    def _written(
        self, operands: Sequence[torch.Tensor], onto: Mapping[int, torch.Tensor], written: set[int]
    ) -> list[torch.Tensor]:
        """The local tensors of the results, some of which are written to: what is not contiguous
        at the end. ``written`` has those that are, as soon as they are.
        """
        direct = {k: x for k, x in onto.items() if x.is_contiguous()}
        found: dict[int, torch.Tensor] = {}

        def arrived(k: int, local: torch.Tensor) -> None:
            found[k] = local
            written.update({k} & direct.keys())

        self._runner.move(operands.__getitem__, direct, arrived)
        for k in onto.keys() & found.keys() - direct.keys():
            found[k] = on_each_rank(lambda rank, x, y: x.copy_(y), onto[k], found[k])
            written.add(k)
        return [
            found[k] if k in found else self._runner.made(k, operands[0].device)
            for k in range(len(self.results))  # those without elements are not exchanged
        ]

    def send(self, state: Mapping[str, DTensor]) -> None:
        """:meth:`run` on a rank that has only sources. Returns no results.

        Raises:
            ValueError: this rank is also on a mesh of results; or as :meth:`run`.
        """
        self._check_meshes()
        self._check_side("send", is_target=True)
        self.run(state)

    def receive(self, *, into: Mapping[str, DTensor] | None = None) -> dict[str, DTensor]:
        """:meth:`run` on a rank that has only results. Returns the results by name.

        Args:
            into: tensors to write the results to, as for :meth:`run`.

        Raises:
            ValueError: this rank is also on a mesh of sources; or as :meth:`run`.
        """
        self._check_meshes()
        self._check_side("receive", is_target=False)
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
    def _meshes(self) -> tuple[Sequence[Any], Sequence[Any]]:
        return [x.mesh for x in self.source.values()], [x.mesh for x in self.target.values()]

    @property
    def _names(self) -> tuple[Sequence[Sequence[str]], Sequence[Sequence[str]]]:
        return [[name] for name in self.source], [[name] for name in self.target]

    @cached_property
    def _runner(self) -> PlanRunner:
        by_size = sorted([mesh for side in self._meshes for mesh in side], key=lambda m: -m.size())
        return PlanRunner(self, [(by_size[0], by_size[-1])] * len(self.members))

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


def _as_planned(
    what: str, given: Mapping[str, Any], specs: Mapping[str, Spec]
) -> list[DTensor | None]:
    """The DTensors of those names, which lie as it was planned; None where a rank outside of its
    mesh has none.
    """
    found: list[DTensor | None] = []
    for name, spec in specs.items():
        tensor = given.get(name)
        found.append(tensor)
        if tensor is not None:
            is_whole = all(isinstance(placement, Replicate) for placement in spec.placements)
            now = spec_of(name, tensor, spec.mesh if is_whole else None)
            if now != spec:
                raise ValueError(
                    f"{name!r} of {what} is {_said(now)}, but the refit was planned for "
                    f"{_said(spec)}: plan the refit again, or redistribute the tensor"
                )
        elif _is_here(spec) or dispatch_modes.local_tensor_mode() is not None:
            raise ValueError(
                f"{what} has no tensor {name!r}, but the refit was planned with {name!r}: add the "
                "tensor, or plan the refit again"
            )
    return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def _is_here(spec: Spec) -> bool:
    """Whether this rank is on the mesh."""
    return communication.this_rank() in spec.ranks.ranks


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
            dict of whole tensors, or an iterator of pairs of name and tensor. None is left out. It
            may use views, permutes, slices, cats, stacks, splits,
            expands, repeats, rolls, flips, pads, indices of row numbers, and one cast of each
            source. ``plan_refit`` runs it once, on tensors without data.
        source: the tensors that the generator takes, by name: DTensors, their specs, or beside
            these plain tensors, which each rank of the largest mesh has whole. Of a DTensor on a
            slice of a mesh the other slices have replicas. None is left out.
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
    whole = _mesh_of_plain(source)
    weights = {name: given for name, given in source.items() if given is not None}
    specs = {name: spec_of(name, given, whole) for name, given in weights.items()}
    if not specs:
        raise ValueError(
            "the refit has no source tensors: pass as source the tensors from which the results "
            "are made"
        )
    found = trace(generator, {name: (spec.shape, spec.dtype) for name, spec in specs.items()})
    results = _targets(target, found)
    operands = tuple([_placed(name, spec) for name, spec in specs.items()])
    made = tuple([_placed(name, spec) for name, spec in results.items()])
    return RefitPlan(found.relation, operands, made, memory_limit, specs, results)


# -- how tensors lie -------------------------------------------------------------------------------


def _placed(name: str, spec: Spec) -> PlacedTensor:
    """A tensor as a refit has it.

    Raises:
        ValueError: something is pending.
    """
    placements: Any = spec.placements
    if any(isinstance(placement, Partial) for placement in placements):
        raise ValueError(
            f"{name!r} has placements {text(placements)}, but must not have a Partial: "
            "redistribute the tensor to Shard or Replicate first"
        )
    return spec.placed(name)


def _mesh_of_plain(source: Mapping[str, Any]) -> Any:
    """The mesh on each rank of which plain tensors are whole: the largest of the others."""
    others = [
        x.device_mesh if isinstance(x, DTensor) else getattr(x, "mesh", None)
        for x in source.values()
    ]
    meshes = [mesh for mesh in others if isinstance(mesh, DeviceMesh)]
    return max(meshes, key=lambda mesh: len(communication.slices(mesh)) * mesh.size(), default=None)


def spec_of(name: str, given: Any, whole: Any = None) -> Spec:
    """The spec of a DTensor, or of what says one.

    Args:
        whole: a mesh on all ranks of which plain tensors are whole; None: there must be none.

    Raises:
        TypeError: it is neither.
        RuntimeError: it is sharded in another order than its placements say.
    """
    if isinstance(given, Spec):
        return given
    if not isinstance(given, DTensor):
        if whole is not None and isinstance(given, torch.Tensor) and not is_wrapper(given):
            replicas = [Replicate()] * whole.ndim
            return Spec(tuple(given.shape), whole, replicas, given.dtype)
        raise TypeError(
            f"{name!r} is a {type(given).__name__}: give a DTensor, a plain tensor that is whole "
            "beside DTensors, or a cute_sharding.Spec of its shape, mesh, placements and dtype"
        )
    spec = given._spec
    said = tuple(spec.shape), tuple(spec.mesh.shape), tuple(spec.placements)
    if chains_of_spec(spec) != chains_of_placements(*said):
        raise RuntimeError(
            f"{name!r} of shape {tuple(spec.shape)} with placements {text(spec.placements)} has a "
            "shard order that a refit cannot read: a later mesh dim shards the tensor first. First "
            "redistribute the tensor to Shard or Replicate"
        )
    return Spec(tuple(given.shape), spec.mesh, spec.placements, given.dtype)


def _targets(target: Target, found: Traced) -> dict[str, Spec]:
    """How the results are to lie.

    Raises:
        ValueError: a result has no entry in the target, or one of another shape or dtype; or an
            entry is of no result.
    """
    by_name = ByPattern({} if callable(target) else target)
    specs = {}
    for name, shape, dtype in zip(found.names, found.relation.outputs, found.dtypes):
        wanted: Any
        if callable(target):
            wanted = target(name, torch.empty(shape, dtype=dtype, device="meta"))
        else:
            wanted = by_name.of(name)
            if wanted is None:
                raise ValueError(
                    f"the target has no entry for result {name!r} (entries: "
                    f"{', '.join(map(repr, target)) or 'none'}): add {name!r}, or a pattern such "
                    "as '*'"
                )
        if isinstance(wanted, tuple) and len(wanted) == 2:
            wanted = Spec(shape, wanted[0], wanted[1], dtype)
        spec = spec_of(name, wanted)
        if (tuple(spec.shape), spec.dtype) != (shape, dtype):
            raise ValueError(
                f"result {name!r} has shape {shape} and dtype {dtype}, but its entry in the target "
                f"has shape {tuple(spec.shape)} and dtype {spec.dtype}: change the generator (the "
                "function that makes the results) or the target"
            )
        specs[name] = spec
    if by_name.unused:
        raise ValueError(
            f"no result has a name that matches {', '.join(map(repr, by_name.unused))}: in the "
            f"target, write names of results ({', '.join(map(repr, found.names))}), or patterns as "
            "in fnmatch"
        )
    return specs
