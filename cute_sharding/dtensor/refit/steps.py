"""What an engine's loader computes, called again on each rank once the weights that it takes are
there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from cute_sharding.dtensor.refit.operands import AsBits, Cast, RecordedCall, Taken, lying_as
from cute_sharding.dtensor.refit.record import MemoryRecording
from cute_sharding.dtensor.replaced.local_tensors import leaves, tree_map
from cute_sharding.relations.relation import Piece, piece


@dataclass(frozen=True, eq=False)
class OfCall:
    """Elements of a tensor that a call gives: the call, which of its tensors, and from their
    row-major positions to those of another tensor.
    """

    call: RecordedCall
    result: int
    piece: Piece


@dataclass(frozen=True, eq=False)
class LoaderStep:
    """A call, and what it takes.

    Attributes:
        call: what is called.
        names: of each tensor that it takes, the name under which weights are brought for it; none
            where it has no elements of weights, and no constants.
        computed: of each tensor that it takes, the elements that other calls give.
    """

    call: RecordedCall
    names: tuple[str | None, ...]
    computed: tuple[tuple[OfCall, ...], ...]

    @property
    def taken(self) -> list[Taken]:
        """The tensors that it takes."""
        return taken_by(self.call)


def taken_by(call: RecordedCall) -> list[Taken]:
    """The tensors that a call takes, in order."""
    return [x for x in leaves(call.args, call.kwargs) if isinstance(x, Taken)]


def of_calls(
    recording: MemoryRecording, pieces: Iterable[Piece]
) -> tuple[list[Piece], list[OfCall]]:
    """Those of the pieces that are moved, and those that calls give."""
    moved, computed = [], []
    for each in pieces:
        found = recording.operands.computed(each.source)
        again = recording.operands.retyped(each.source)
        if found is not None:
            assert found.call is not None, "as recording.computed says"
            computed.append(OfCall(found.call, found.result, each))
        elif again is not None:
            computed.append(_retyped(each, again, recording.operands[again.of].dtype))
        else:
            moved.append(each)
    return moved, computed


def _retyped(one: Piece, operand: Cast | AsBits, dtype: torch.dtype) -> OfCall:
    """The elements of a piece, which are those of another operand in ``dtype``: a call that takes
    these alone, in a row.
    """
    in_a_row = [prod([n for n, _, _ in one.modes[k + 1 :]]) for k in range(len(one.modes))]
    modes = [*zip(one.modes, in_a_row)]
    given = piece(operand.of, 0, one.x, 0, [(n, dx, step) for (n, dx, _), step in modes])
    taken = Taken((given,), (one.size,), (1,), dtype)
    aten = torch.ops.aten
    op = aten.to.dtype if isinstance(operand, Cast) else aten.view.dtype
    call = RecordedCall(op, (taken, operand.dtype), {}, "", torch.get_default_dtype())
    found = [(n, step, dy) for (n, _, dy), step in modes]
    return OfCall(call, 0, piece(one.source, one.target, 0, one.y, found))


def steps_of(
    recording: MemoryRecording, computed: Iterable[OfCall]
) -> tuple[list[LoaderStep], dict[str, tuple[Taken, list[Piece]]]]:
    """The calls that give some elements, each after those that it takes from; and by name, what is
    brought for them: the tensor, and its pieces from weights and constants.
    """
    steps: dict[RecordedCall, LoaderStep] = {}
    brought: dict[str, tuple[Taken, list[Piece]]] = {}

    def add(call: RecordedCall) -> None:
        if call in steps:
            return
        names: list[str | None] = []
        given = []
        for taken in taken_by(call):
            moved, others = of_calls(recording, taken.pieces)
            for each in others:
                add(each.call)
            given.append(tuple(others))
            names.append(f"{call.op} {call.line} {len(brought)}" if moved else None)
            if names[-1] is not None:
                brought[names[-1]] = taken, moved
        steps[call] = LoaderStep(call, tuple(names), tuple(given))

    for each in computed:
        add(each.call)
    return list(steps.values()), brought


# -- running ---------------------------------------------------------------------------------------


class Results:
    """What calls have given so far."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._found: dict[RecordedCall, list[torch.Tensor]] = {}

    def run(self, step: LoaderStep, brought: Mapping[str, torch.Tensor]) -> None:
        """Call a step again, on what was brought and what other calls have given."""
        made = iter(
            [
                self._tensor(taken, None if name is None else brought[name], computed)
                for taken, name, computed in zip(step.taken, step.names, step.computed)
            ]
        )

        def filled(x: Any) -> Any:
            if isinstance(x, Taken):
                return next(made)
            if isinstance(x, torch.device):
                return self._device
            return x.to(self._device) if isinstance(x, torch.Tensor) else x

        args, kwargs = tree_map(filled, step.call.args), tree_map(filled, step.call.kwargs)
        default = torch.get_default_dtype()
        torch.set_default_dtype(step.call.default)
        try:
            self._found[step.call] = leaves(step.call.op(*args, **kwargs))
        finally:
            torch.set_default_dtype(default)

    def _tensor(
        self, taken: Taken, moved: torch.Tensor | None, computed: Sequence[OfCall]
    ) -> torch.Tensor:
        """A tensor that a call takes, which lies as it did when the call was recorded."""
        tensor = torch.empty(taken.shape, dtype=taken.dtype, device=self._device)
        if moved is not None:
            tensor.copy_(moved)
        self.write(computed, tensor)
        is_so = tensor.stride() == taken.strides or not tensor.numel()
        return tensor if is_so else lying_as(tensor, taken.strides)

    def write(self, computed: Iterable[OfCall], tensor: torch.Tensor) -> None:
        """Write elements that calls have given."""
        computed = list(computed)
        if not computed:
            return
        onto = tensor if tensor.is_contiguous() else tensor.contiguous()
        flat = onto.view(-1)
        for each in computed:
            given = self._found[each.call][each.result].contiguous().view(-1)
            one = each.piece
            sizes = [n for n, _, _ in one.modes]
            if min([dx for _, dx, _ in one.modes], default=0) < 0:  # torch has no such strides
                at = torch.tensor(one.x, device=given.device)
                for n, dx, _ in one.modes:
                    at = at.unsqueeze(-1) + torch.arange(n, device=given.device) * dx
                some = given[at]
            else:
                first = int(given.storage_offset()) + one.x
                some = given.as_strided(sizes, [dx for _, dx, _ in one.modes], first)
            first = int(flat.storage_offset()) + one.y
            flat.as_strided(sizes, [dy for _, _, dy in one.modes], first).copy_(some)
        if onto is not tensor:
            tensor.copy_(onto)
