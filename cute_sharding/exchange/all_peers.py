"""The messages between a device and all its peers as a few strided copies, however many peers
there are.

A cut makes consecutive blocks of the rows of a dim. Except for the last ones, which are shorter,
block q + 1 is block q, moved by one step. So if a device has all rows of a dim, its messages to
consecutive peers are one message with one more mode, the peer. The first two of them give the step,
in the tensor and in the buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise, product
from math import prod

from cute_sharding._memory import remembered
from cute_sharding.exchange.by_links import LinkFlow, LinkMessage
from cute_sharding.exchange.copies import Copy, Vector, fold, minus
from cute_sharding.exchange.part import Buffer
from cute_sharding.exchange.placed import Placed
from cute_sharding.sharding.chains import Device


@remembered
def edges(n: int, split_factor: int, parts: int) -> tuple[int, ...] | None:
    """The first devices of ranges, among ``parts`` devices that hold blocks of ``n`` rows: within a
    range, each device's rows are those of the device before, moved by one step; and the end. None
    if blocks of whole pieces and of the last piece have different sizes, so their distance changes.

    >>> edges(10, 1, 4)  # 3, 3, 3 and 1
    (0, 3, 4)
    """
    if n == 0:
        return 0, parts
    piece = -(-n // split_factor)
    lengths = [length for length in (piece, n % piece) if length]
    blocks = [-(-length // parts) for length in lengths]
    found = {0, parts}
    for length, block in zip(lengths, blocks):
        short = length // block  # the first device without a whole block
        found |= {edge for edge in (short, short + 1) if edge < parts}
    for first, stop in pairwise(sorted(found)):
        steps = {block for length, block in zip(lengths, blocks) if first * block < length}
        if len(steps) > 1 and stop - first > 1:
            return None
    return tuple(sorted(found))


def _edges_on(m: int, mine: Placed, theirs: Placed) -> tuple[int, ...] | None:
    """The edges on a mesh dim on which peers differ. None if they are not known: other mesh dims
    also cut the tensor dim that it cuts, or the device does not have all of its rows.
    """
    parts = theirs.mesh.sizes[m]
    for n, own, chain in zip(theirs.shape, mine.chains, theirs.chains):
        for k, factor in chain:
            if k == m:
                return None if own or len(chain) > 1 else edges(n, factor, parts)
    return 0, parts


def messages_at_once(
    flow: LinkFlow, device: Device, dims: Sequence[int], *, into: bool, with_own: bool
) -> Buffer | None:
    """The messages between a device and all that differ from it on the mesh dims ``dims``, in the
    order of their places; None if no layout describes them.

    Args:
        flow: on one mesh, without windows or other forms of rows.
        into: messages that the device receives; else those that it sends.
        with_own: whether the rows that it keeps count as a message to itself.
    """
    mine, theirs = (flow.target, flow.source) if into else (flow.source, flow.target)
    parts = [mine.mesh.sizes[m] for m in dims]
    ranges = []
    for m in dims:
        found = _edges_on(m, mine, theirs)
        if found is None:
            return None
        apart = set() if with_own else {device[m], device[m] + 1}
        ranges.append([*pairwise(sorted({*found, *apart}))])

    def message(at: Sequence[int]) -> LinkMessage:
        other = dict(zip(dims, at))
        peer = tuple([other.get(m, k) for m, k in enumerate(device)])
        return flow.of_devices(*((peer, device) if into else (device, peer)))

    boxes = [*product(*ranges)]
    firsts = [message([first for first, _ in box]) for box in boxes]
    sizes = [0] * prod(parts)
    for box, first in zip(boxes, firsts):
        is_own = all(at == device[m] for m, (at, _) in zip(dims, box))
        size = first.size if with_own or not is_own else 0
        for number in _numbers(box, parts) if size else ():
            sizes[number] = size
    starts = [0, *accumulate(sizes)]
    copies: list[Copy] = []
    for box, first in zip(boxes, firsts):
        corner = [at for at, _ in box]
        (number,) = _numbers([(at, at + 1) for at in corner], parts)
        if not sizes[number]:
            continue
        outer: list[tuple[int, Vector, Vector]] = []
        for i, (at, stop) in enumerate(box):
            if stop - at > 1:
                following = message([*corner[:i], at + 1, *corner[i + 1 :]])
                x, beyond = (_x(each, into=into) for each in (first, following))
                step = prod(parts[i + 1 :])
                outer.append(
                    (stop - at, minus(beyond, x), (starts[number + step] - starts[number],))
                )
        copies += _looped(first, outer, starts[number], into=into)
    return Buffer(tuple(sizes), (tuple(fold(copies)),))


def _numbers(box: Sequence[tuple[int, int]], parts: Sequence[int]) -> Sequence[int]:
    """The row-major numbers of the peers in a box."""
    numbers: Sequence[int] = [0]
    for (first, stop), n in zip(box, parts):
        numbers = [at * n + k for at in numbers for k in range(first, stop)]
    return numbers


def _x(message: LinkMessage, *, into: bool) -> Vector:
    """The message's first element in the tensor of the device."""
    first = message.copies[0]
    return first.y if into else first.x


def _looped(
    message: LinkMessage, outer: Sequence[tuple[int, Vector, Vector]], at: int, *, into: bool
) -> Iterator[Copy]:
    """A message's copies with outer modes: (size, step in the tensor, step in the buffer)."""
    sides = message.out_of(at) if into else message.into(at)
    for copy in (copy for _, some in sides for copy in some):
        in_tensor, in_buffer = zip(*[(dx, dy) for _, dx, dy in outer]) if outer else ((), ())
        dx, dy = (in_buffer, in_tensor) if into else (in_tensor, in_buffer)
        yield Copy(
            (*[n for n, _, _ in outer], *copy.sizes),
            copy.x,
            (*dx, *copy.dx),
            copy.y,
            (*dy, *copy.dy),
        )
