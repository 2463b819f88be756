"""The elements that a device holds of a tensor, and those that two devices both hold, as boxes.

A device holds a few strided runs (:mod:`.rows`) of a dim's rows, however many rows there are; a
box is one run of each dim. So a ``_StridedShard`` is one box and not thousands; where sizes do not
divide there are a few more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from cute_sharding._memory import remembered
from cute_sharding.sharding.rows import Chain, Loop, Run, each_turn, rows_held, same_rows


@dataclass(frozen=True)
class Box:
    """Elements of a tensor that one device holds: one strided run of rows for each dim, with the
    run's place in the local tensor.

    Rows of dim d: ``global_offset[d] + i * global_step + ... + j`` for each loop ``(count,
    global_step, local_step)`` of ``loops[d]``, i < count, and j < ``length[d]``; in the local
    tensor they are ``local_offset[d] + i * local_step + ... + j``. Without loops, a box is
    contiguous rows of each dim: a chunk or shard, by offset and size.

    Attributes:
        global_offset: the first row of each dim in the global tensor.
        size: the number of rows of each dim.
        local_offset: the first row of each dim in the local tensor.
        loops: for each dim, outermost first; none by default.
        pending: the names of the reductions of which the device's elements are terms; () if the
            elements are values.

    Raises:
        ValueError: offsets, sizes and loops differ in the number of dims; a number is below 0; a
            size is not a multiple of its loops' counts; or turns of a loop overlap.

    >>> from cute_sharding.sharding import Shard, Sharding
    >>> s = Sharding((12, 4), (2,), (Shard(0, split_factor=3),))
    >>> (box,) = s.boxes((1,))
    >>> box.global_offset, box.size, box.local_offset, box.loops
    ((2, 0), (6, 4), (0, 0), (((3, 4, 2),), ()))
    >>> [(each.global_offset, each.size, each.local_offset) for each in box.contiguous()]
    [((2, 0), (2, 4), (0, 0)), ((6, 0), (2, 4), (2, 0)), ((10, 0), (2, 4), (4, 0))]
    >>> Box((2, 0), (2, 4), (0, 0)).is_contiguous
    True
    """

    global_offset: tuple[int, ...]
    size: tuple[int, ...]
    local_offset: tuple[int, ...]
    loops: tuple[tuple[Loop, ...], ...] = ()
    pending: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("global_offset", "size", "local_offset"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        loops = tuple(map(tuple, self.loops)) or ((),) * len(self.size)
        object.__setattr__(self, "loops", loops)
        object.__setattr__(self, "pending", tuple(self.pending))
        columns = self.global_offset, self.size, self.local_offset, self.loops
        if len({*map(len, columns)}) > 1 or min(sum(columns[:3], (0,))) < 0:
            raise ValueError(
                f"{self}: global_offset, size, local_offset and loops need one entry for each "
                "tensor dim, and all numbers must be 0 or more"
            )
        for size, dim in zip(self.size, self.loops):
            _check_loops(self, size, dim)

    @property
    def length(self) -> tuple[int, ...]:
        """How many rows of each dim are contiguous: the size divided by the loops' counts."""
        return tuple([run.length for run in runs_of(self)])

    @property
    def elements(self) -> int:
        """The number of elements."""
        return prod(self.size)

    @property
    def count(self) -> int:
        """The number of contiguous boxes in it."""
        return prod(count for dim in self.loops for count, _, _ in dim)

    @property
    def is_contiguous(self) -> bool:
        """Whether the box is a slice of each dim, in the global tensor and in the local one."""
        return self.count == 1

    def contiguous(self) -> Iterator[Box]:
        """Yield its contiguous boxes (:attr:`count` of them) in the order of the global tensor."""
        for runs in _each(runs_of(self)):
            yield _box(runs, self.pending)

    @property
    def global_slices(self) -> tuple[slice, ...]:
        """The slices that index the global tensor with a contiguous box.

        Raises:
            ValueError: the box is not contiguous.
        """
        return _slices(self, self.global_offset)

    @property
    def local_slices(self) -> tuple[slice, ...]:
        """The slices that index the local tensor with a contiguous box.

        Raises:
            ValueError: the box is not contiguous.
        """
        return _slices(self, self.local_offset)

    def global_view(self, strides: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """The arguments of ``as_strided`` (sizes, strides and offset, in elements) for the whole
        box in a global tensor of ``strides``. Each tensor dim gives a dim for each loop and one for
        the contiguous rows; the sizes are those of :meth:`local_view`.
        """
        return _view(runs_of(self), strides)

    def local_view(self, strides: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """The same for a local tensor of ``strides``.

        >>> from cute_sharding.sharding import Shard, Sharding
        >>> (box,) = Sharding((12, 4), (2,), (Shard(0, split_factor=3),)).boxes((1,))
        >>> box.local_view((4, 1)), box.global_view((4, 1))
        (((3, 2, 4), (8, 4, 1), 0), ((3, 2, 4), (16, 4, 1), 8))
        """
        return _view([run.flipped() for run in runs_of(self)], strides)


def boxes(
    shape: Sequence[int], chains: Sequence[Chain], pending: Iterable[str] = ()
) -> tuple[Box, ...]:
    """The boxes that one device holds of a tensor of ``shape``; empty if it holds no element.

    Args:
        chains: for each dim, (split factor, devices, the device's coordinate) of each mesh dim that
            cuts it, in order.
    """
    held = [rows_held(n, tuple(chain)) for n, chain in zip(shape, chains, strict=True)]
    pending = tuple(pending)
    return tuple([_box(runs, pending) for runs in product(*held)])


def intersection(a: Box | Iterable[Box], b: Box | Iterable[Box]) -> tuple[tuple[Box, Box], ...]:
    """The elements of a global tensor that two devices both hold, as boxes of each device, for any
    shardings and meshes.

    Args:
        a, b: each side's boxes, which do not overlap among themselves, as from
            ``Sharding.boxes`` or ``local_boxes``; or one box.

    Returns:
        Pairs of a box of the first device and a box of the second device. The boxes of a pair have
            the same rows of the global tensor, and each has the local offsets and steps of its
            device. The number of pairs grows with the number of sharded mesh dims, not with the
            number of rows.

    Raises:
        ValueError: the boxes have different numbers of dims.

    >>> from cute_sharding.sharding import Shard, Sharding
    >>> one = Sharding((12,), (2,), (Shard(0, split_factor=3),)).boxes((1,))  # 2 3, 6 7, 10 11
    >>> other = Sharding((12,), (3,), (Shard(0),)).boxes((1,))  # 4 5 6 7
    >>> for a, b in intersection(one, other):
    ...     print(a.global_offset, a.size, "at", a.local_offset, "and at", b.local_offset)
    (6,) (2,) at (2,) and at (2,)
    """
    ones, others = ([x] if isinstance(x, Box) else list(x) for x in (a, b))
    found = []
    for one, other in product(ones, others):
        if len(one.size) != len(other.size):
            raise ValueError(
                f"intersection of {one} and {other}: the boxes have {len(one.size)} and "
                f"{len(other.size)} dims, but must belong to one tensor"
            )
        for pairs in product(*map(_same_rows, runs_of(one), runs_of(other))):
            mine, its = ([pair[side] for pair in pairs] for side in (0, 1))
            found.append((_box(mine, one.pending), _box(its, other.pending)))
    return tuple(found)


@remembered
def _same_rows(one: Run, other: Run) -> tuple[tuple[Run, Run], ...]:
    return tuple(same_rows([one], [other])) if one.size and other.size else ()


def runs_of(box: Box) -> list[Run]:
    """The run of each dim: x in the global tensor, y in the local one."""
    return [
        Run(x, y, loops, size // prod(count for count, _, _ in loops))
        for x, y, loops, size in zip(box.global_offset, box.local_offset, box.loops, box.size)
    ]


def _box(runs: Sequence[Run], pending: tuple[str, ...]) -> Box:
    return Box(
        tuple([run.x for run in runs]),
        tuple([run.size for run in runs]),
        tuple([run.y for run in runs]),
        tuple([run.loops for run in runs]),
        pending,
    )


def _check_loops(box: Box, size: int, loops: tuple[Loop, ...]) -> None:
    turns = prod(count for count, _, _ in loops)
    if any(count < 1 for count, _, _ in loops) or size % turns:
        raise ValueError(
            f"{box}: each loop is (count, global_step, local_step). In the loops {loops}, each "
            f"count must be 1 or more, and the product of the counts, {turns}, must divide the "
            f"{size} rows"
        )
    dx = dy = size // turns
    for count, x_step, y_step in reversed(loops):
        if x_step < dx or y_step < dy:
            raise ValueError(
                f"{box}: each loop is (count, global_step, local_step). In the loops {loops}, each "
                "step must go beyond all rows of one iteration: use larger steps"
            )
        dx, dy = dx + (count - 1) * x_step, dy + (count - 1) * y_step


def _each(runs: Sequence[Run]) -> Iterator[list[Run]]:
    """Yield all iterations of the loops of all dims, one at a time: there may be very many."""
    if not runs:
        yield []
        return
    for first in each_turn(runs[0]):
        for rest in _each(runs[1:]):
            yield [first, *rest]


def _slices(box: Box, offset: tuple[int, ...]) -> tuple[slice, ...]:
    if not box.is_contiguous:
        raise ValueError(
            f"{box} is not contiguous. Use the slices of the {box.count} boxes of "
            "box.contiguous(), or as_strided with box.global_view(...) or box.local_view(...)"
        )
    return tuple([slice(start, start + size) for start, size in zip(offset, box.size)])


def _view(
    runs: Sequence[Run], strides: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """The view (sizes, strides, offset) of the runs' x in a tensor of ``strides``."""
    modes = [
        (count, step * stride)
        for run, stride in zip(runs, strides, strict=True)
        for count, step in (*((count, dx) for count, dx, _ in run.loops), (run.length, 1))
    ]
    offset = sum(run.x * stride for run, stride in zip(runs, strides))
    return tuple([count for count, _ in modes]), tuple([step for _, step in modes]), offset
