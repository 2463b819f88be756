"""Ops that are several steps, each a view or a movement op: the same elements in new dims, as
pixel_shuffle, or windows of two dims, as torch.nn.functional.unfold.

Each step is decided from the cuts that the one before it leaves. Views carry them; of a movement
what is missing is received. A mesh dim that a view cannot carry is given up before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cute_sharding.exchange import Exchange
from cute_sharding.movement.choose import chosen
from cute_sharding.movement.free import Cuts
from cute_sharding.movement.table import BY_OP as MOVES
from cute_sharding.movement.table import Signed
from cute_sharding.relations.moves import Shape
from cute_sharding.views import BY_OP as VIEWS
from cute_sharding.views import carry


class Step(NamedTuple):
    """One step: the op, a row of the table of views or of movement ops, and its arguments."""

    op: str
    args: tuple[Any, ...]


class Placed(NamedTuple):
    """A step between sharded tensors.

    Attributes:
        step: the step.
        shape, cuts: of what comes of it.
        exchange: None: a view.
    """

    step: Step
    shape: Shape
    cuts: Cuts
    exchange: Exchange | None


Rule = Callable[..., "list[Step] | None"]
VIEW, PERMUTE = "Tensor.view", "torch.permute"


class Several(NamedTuple):
    """An op that is several steps.

    Attributes:
        rule: from the operand's shape and the arguments to the steps; None: none are known.
        signed: how it is by its signature, where that answers; None: it does not.
    """

    rule: Rule
    signed: Signed | None = None


def _shuffled(x: Shape, factor: int) -> list[Step] | None:
    """Channels (C, r, r) go to rows and columns (H, r), (W, r)."""
    if len(x) < 3 or factor < 1 or x[-3] % factor**2:
        return None
    *batch, channels, height, width = x
    k, c = len(batch), channels // factor**2
    return [
        Step(VIEW, ((*batch, c, factor, factor, height, width),)),
        Step(PERMUTE, ((*range(k), k, k + 3, k + 1, k + 4, k + 2),)),
        Step(VIEW, ((*batch, c, height * factor, width * factor),)),
    ]


def _unshuffled(x: Shape, factor: int) -> list[Step] | None:
    """And back."""
    if len(x) < 3 or factor < 1 or x[-2] % factor or x[-1] % factor:
        return None
    *batch, c, height, width = x
    k, (h, w) = len(batch), (height // factor, width // factor)
    return [
        Step(VIEW, ((*batch, c, h, factor, w, factor),)),
        Step(PERMUTE, ((*range(k), k, k + 2, k + 4, k + 1, k + 3),)),
        Step(VIEW, ((*batch, c * factor**2, h, w),)),
    ]


def _interleaved(x: Shape, groups: int) -> list[Step] | None:
    """The channels of several groups, the first of each and so on."""
    if len(x) < 3 or groups < 1 or x[1] % groups:
        return None
    images, channels, *sizes = x
    return [
        Step(VIEW, ((images, groups, channels // groups, *sizes),)),
        Step(PERMUTE, ((0, 2, 1, *range(3, len(x) + 1)),)),
        Step(VIEW, (x,)),
    ]


def _turned(x: Shape, turns: int = 1, dims: Sequence[int] = (0, 1)) -> list[Step] | None:
    """Quarter turns: an odd number is a flip of one of the dims, and they change places."""
    if len(dims) != 2 or len(x) < 2:
        return None
    a, b = (d % len(x) for d in dims)
    if a == b:
        return None
    if not turns % 4:
        return []
    if turns % 4 == 2:
        return [Step("torch.flip", ((a, b),))]
    order = [*range(len(x))]
    order[a], order[b] = b, a
    return [Step("torch.flip", ((b if turns % 4 == 1 else a,),)), Step(PERMUTE, (tuple(order),))]


def _squeezed(x: Shape, *dims: int | Sequence[int]) -> list[Step]:
    """A copy without dims of size 1: of the tensor, not of what a device holds of it."""
    return [Step("torch.squeeze", dims)]


def _narrowed(x: Shape, dim: int, start: int, length: int) -> list[Step] | None:
    """A slice, given by its length."""
    if not x or not -x[dim] <= start <= x[dim]:
        return None
    start = start % x[dim] if start < 0 else start
    return [Step("Tensor.__getitem__", (dim % len(x), start, start + length))]


def _pads(padding: Sequence[int], sign: int) -> list[Step]:
    down, right = (sign * n for n in padding)
    if not down and not right:
        return []
    return [Step("torch.nn.functional.pad", ((right, right, down, down),))]


def _counts(sizes: Sequence[int], kernel: Sequence[int], stride: Sequence[int]) -> list[int]:
    return [(n - size) // step + 1 for n, size, step in zip(sizes, kernel, stride)]


def _columns(
    x: Shape,
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> list[Step] | None:
    """Windows of both dims, each a column: (C, kh, kw) by (rows, columns)."""
    if len(x) < 3 or any(n > 1 and size > 1 for n, size in zip(dilation, kernel)):
        return None
    *batch, c, height, width = x
    k = len(batch)
    counts = _counts((height + 2 * padding[0], width + 2 * padding[1]), kernel, stride)
    if min(counts) < 1:
        return None
    return [
        *_pads(padding, 1),
        Step("Tensor.unfold", (k + 1, kernel[0], stride[0])),
        Step("Tensor.unfold", (k + 2, kernel[1], stride[1])),
        Step(PERMUTE, ((*range(k), k, k + 3, k + 4, k + 1, k + 2),)),
        Step(VIEW, ((*batch, c * kernel[0] * kernel[1], counts[0] * counts[1]),)),
    ]


def _of_columns(
    x: Shape,
    size: Sequence[int],
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> list[Step] | None:
    """Back to the sum of the windows that an element is in."""
    per = kernel[0] * kernel[1]
    if len(x) < 2 or x[-2] % per or any(n > 1 and s > 1 for n, s in zip(dilation, kernel)):
        return None
    *batch, channels, columns = x
    k, c = len(batch), channels // per
    height, width = (n + 2 * pad for n, pad in zip(size, padding))
    counts = _counts((height, width), kernel, stride)
    if min(counts) < 1 or counts[0] * counts[1] != columns:
        return None
    gradient = "unfold's gradient"
    return [
        Step(VIEW, ((*batch, c, *kernel, *counts),)),
        Step(PERMUTE, ((*range(k), k, k + 3, k + 4, k + 1, k + 2),)),
        Step(gradient, ((*batch, c, counts[0], width, kernel[0]), k + 2, kernel[1], stride[1])),
        Step(gradient, ((*batch, c, height, width), k + 1, kernel[0], stride[0])),
        *_pads(padding, -1),
    ]


SEVERAL: dict[str, Several] = {
    "pixel_shuffle.default": Several(_shuffled, Signed(filled=True)),
    "pixel_unshuffle.default": Several(_unshuffled, Signed(filled=True)),
    "channel_shuffle.default": Several(_interleaved, Signed()),
    "im2col.default": Several(_columns),
    "col2im.default": Several(_of_columns),
    "rot90.default": Several(_turned, Signed()),
    "narrow_copy.default": Several(_narrowed, Signed()),
    "squeeze_copy.default": Several(_squeezed),
    "squeeze_copy.dim": Several(_squeezed),
    "squeeze_copy.dims": Several(_squeezed),
}
"""By overload the steps.

>>> [step.op for step in SEVERAL["pixel_shuffle.default"].rule((8, 4, 4), 2)]
['Tensor.view', 'torch.permute', 'Tensor.view']
"""


def placed(
    steps: Sequence[Step],
    shape: Shape,
    cuts: Cuts,
    mesh: tuple[int, ...],
    *,
    spare: tuple[int, ...] = (),
) -> tuple[Cuts, list[Placed]] | None:
    """The cuts that the operand is to have, and the steps from there; None: a step has no map.

    ``spare``: mesh dims that may cut what comes of a step though they do not cut the operand.
    """
    found: list[Placed] = []
    x, now = shape, cuts
    for step in steps:
        if step.op in VIEWS:
            view = VIEWS[step.op].view(x, *step.args)
            carried = carry(view, now, mesh)
            if carried.blocked is not None:
                return placed(steps, shape, _given_up(cuts, carried.blocked), mesh, spare=spare)
            found.append(Placed(step, tuple(view.output_shape), tuple(carried.cuts), None))
        else:
            move = MOVES[step.op].move(x, *step.args)
            choice = move and chosen(move, (now,), mesh, anyway=True, spare=spare)
            if not move or not choice:
                return None
            found.append(Placed(step, move.outputs[0], choice.cuts[0], choice.exchange))
        x, now = found[-1].shape, found[-1].cuts
    return cuts, found


def _given_up(cuts: Cuts, m: int) -> Cuts:
    """Without the cut of a mesh dim; without any, where it came of a step before."""
    if cuts[m] is None:
        return (None,) * len(cuts)
    return (*cuts[:m], None, *cuts[m + 1 :])
