"""What a device sends to all its peers, or gets from them, as a few strided copies, whatever the
number of peers is.

The blocks that a cut makes of the rows of a dim follow one another: but for the last ones, which
are shorter, block q + 1 lies where block q lies, a step further. So where a device has all rows of
a dim, the messages to peers that follow one another are one message with one more mode, the peer:
the first of them and the second say the step, in the tensor and in the buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise, product
from math import prod

from cute_sharding.exchange.by_links import LinkFlow, LinkMessage
from cute_sharding.exchange.copies import Copy, Vector, folded, minus
from cute_sharding.exchange.part import Buffer
from cute_sharding.exchange.placed import Placed
from cute_sharding.sharding.chains import Device


@lru_cache(maxsize=1 << 10)
def edges(n: int, split_factor: int, parts: int) -> tuple[int, ...] | None:
    """Where among ``parts`` devices that hold blocks of ``n`` rows those begin whose rows are those
    of the one before, a step further; and the end. None where blocks of whole pieces and of the
    last one are of other sizes, so that they drift apart.

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
    """Those on a mesh dim on which peers differ; None where they are not known: the tensor dim that
    it cuts is cut by others as well, or the device has not all of its rows.
    """
    parts = theirs.mesh.sizes[m]
    for n, own, chain in zip(theirs.shape, mine.chains, theirs.chains):
        for k, factor in chain:
            if k == m:
                return None if own or len(chain) > 1 else edges(n, factor, parts)
    return 0, parts


def at_once(
    flow: LinkFlow, device: Device, dims: Sequence[int], *, into: bool, with_own: bool
) -> Buffer | None:
    """The messages between a device and all that differ from it on the mesh dims ``dims``, in the
    order of their places; None where no layout says them.

    Args:
        flow: on one mesh, of the rows of each dim as they are.
        into: those that the device gets; else those that it sends.
        with_own: with what it keeps, as a message to itself.
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
    return Buffer(tuple(sizes), (tuple(folded(copies)),))


def _numbers(box: Sequence[tuple[int, int]], parts: Sequence[int]) -> Sequence[int]:
    """The peers of a box, by number: row-major."""
    numbers: Sequence[int] = [0]
    for (first, stop), n in zip(box, parts):
        numbers = [at * n + k for at in numbers for k in range(first, stop)]
    return numbers


def _x(message: LinkMessage, *, into: bool) -> Vector:
    """Where it begins in the tensor of the device."""
    first = message.copies[0]
    return first.y if into else first.x


def _looped(
    message: LinkMessage, outer: Sequence[tuple[int, Vector, Vector]], at: int, *, into: bool
) -> Iterator[Copy]:
    """A message's copies, with more modes: (size, step in the tensor, step in the buffer)."""
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
