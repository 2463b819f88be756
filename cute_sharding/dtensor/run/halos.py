"""Windows: ops of which a result row reads some rows of a sharded dim, such as pools. Each device
gets the rows that its own windows read, its own rows and a halo, and runs the op on them.

The rows come in one exchange, in which rows before the first and after the last are filled in
(:mod:`.moving`). So each device has a tensor with one window after the other from its first row on,
and the op runs on it without padding in these dims. What it then says of rows is put right: the
numbers of rows, and averages of padding. A gradient is the exchange turned around: what a device
adds to rows of others goes to them. A device without windows computes one of zeros, and drops it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from itertools import product
from math import floor, prod
from typing import Any, NamedTuple

import torch

from cute_sharding._memory import remembered
from cute_sharding.dtensor.replaced import dispatch_modes
from cute_sharding.dtensor.replaced.op_schemas import overload
from cute_sharding.dtensor.run.folds.states import wide
from cute_sharding.dtensor.run.groups import all_on_each_rank, on_all_ranks, place
from cute_sharding.dtensor.run.in_graphs import moved_in_graph
from cute_sharding.dtensor.run.moving import Movement, numbers_of, places_of
from cute_sharding.propagation.signatures import Part, halos_of
from cute_sharding.relations.moves import Window
from cute_sharding.relations.signature import Reads, Signature
from cute_sharding.relations.table.windows import NEAREST, each
from cute_sharding.sharding.rows import Device, Runs, count_rows, rows_held


class WindowsAlong(NamedTuple):
    """A dim whose windows mesh dims shard.

    Attributes:
        dim: its position, counted from the last dim.
        reads: the rows that a window reads.
        rows, windows: the number of all rows, and of all windows.
        chain: (split factor, devices, mesh dim) of the mesh dims that shard the windows.
    """

    dim: int
    reads: Reads
    rows: int
    windows: int
    chain: tuple[tuple[int, int, int], ...]

    @property
    def first(self) -> int:
        """The number of the first row that the first window reads; below 0 in padding."""
        return floor(self.reads.first)

    def own(self, device: Device) -> Own:
        """What a device has of the dim."""
        chain = tuple([(factor, parts, device[m]) for factor, parts, m in self.chain])
        size, step, first = self.reads
        window = Window(None, size, step, first - floor(first))
        windows = rows_held(self.windows, chain)
        rows = window.held((self.windows,), (chain,))
        own = None if window.is_fractional else window.evenly(windows, window.every)
        return Own(self, windows, rows, own or floor(step))


class Own(NamedTuple):
    """What a device has of a dim.

    Attributes:
        windows: the numbers of its windows (x).
        rows: the numbers of the rows that these read, counted from the first row of padding (x).
        step: how many rows of its own there are from one window to the next.
    """

    of: WindowsAlong
    windows: Runs
    rows: Runs
    step: int

    @property
    def form(self) -> tuple[Any, ...]:
        """All but where the rows and the windows begin."""
        runs = [tuple([(run.y, run.length, run.loops) for run in self.windows])]
        return self.counts, self.step, *runs

    @property
    def counts(self) -> tuple[int, int]:
        """The numbers of rows and of windows on which the op runs: those of one if it has none."""
        count = count_rows(self.windows)
        return (count_rows(self.rows), count) if count else (self.of.reads.size, 1)

    def numbers(self, positions: torch.Tensor, dilation: int) -> torch.Tensor:
        """The numbers among all rows of rows at these positions. (A maximum of which all rows are
        the least number is in the first of them; of those that are no padding that is the one given
        here.)
        """
        found = (
            numbers_of(self.rows, positions.device)[positions] + self.of.first
            if self.begins is None
            else positions + self.begins
        )
        if self.begins is not None and self.begins >= 0:
            return found
        return torch.where(found < 0, found.remainder(dilation), found)

    def positions(self, numbers: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`numbers`."""
        if self.begins is None:
            return places_of(numbers - self.of.first, self.rows)
        return numbers - self.begins

    @property
    def begins(self) -> int | None:
        """The number of the first row, if the others follow on it."""
        if len(self.rows) > 1 or any(run.loops for run in self.rows):
            return None
        return self.rows[0].x + self.of.first if self.rows else 0


class OnDevice(NamedTuple):
    """What a device has of the dims that are read in windows.

    Attributes:
        spatial: the number of these dims, the last ones.
        dims: those whose windows mesh dims shard.
    """

    spatial: int
    dims: tuple[Own, ...]

    @property
    def is_empty(self) -> bool:
        """Whether the device has no windows."""
        return not all(own.windows for own in self.dims)

    def with_rows(self, shape: Sequence[int], *, windows: bool = False) -> list[int]:
        """The shape of a tensor with the rows on which the op runs; or with their windows."""
        sizes = list(shape)
        for own in self.dims:
            sizes[own.of.dim] = own.counts[windows]
        return sizes

    def without_windows(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor with no rows of dims of which the device has no windows."""
        for own in self.dims:
            if not own.windows:
                x = x.narrow(own.of.dim, 0, 0)
        return x

    def option(self, given: Any, of: Callable[[Own], int]) -> list[int]:
        """An option of the op for each dim, with that of the device in dims that are sharded."""
        found = each(given, self.spatial)
        for own in self.dims:
            found[own.of.dim] = of(own)
        return found

    def steps(self, stride: Any) -> list[int]:
        return self.option(stride, lambda own: own.step)

    def pads(self, padding: Any) -> list[int]:
        return self.option(padding, lambda own: 0)

    def windows(self, sizes: Any) -> list[int]:
        return self.option(sizes, lambda own: own.counts[1])

    # -- indices -----------------------------------------------------------------------------------

    def renumbered(
        self,
        indices: torch.Tensor,
        before: Sequence[int],
        after: Sequence[int],
        of: Callable[[Own, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Indices of elements of images of the sizes ``before``, among those of ``after``."""
        owns, found, below = {own.of.dim: own for own in self.dims}, torch.zeros_like(indices), 1
        for d in range(-1, -self.spatial - 1, -1):
            digit, indices = indices % before[d], indices // before[d]
            found = found + below * (of(owns[d], digit) if d in owns else digit)
            below = below * after[d]
        return found

    def shift(self, shape: Sequence[int]) -> int | None:
        """By how much indices in an image of this shape are below those in the whole one; None if
        that is not the same for all.
        """
        own, inner = self.dims[0], shape[len(shape) - self.spatial + 1 :]
        if len(self.dims) > 1 or own.of.dim != -self.spatial or own.begins is None:
            return None
        return own.begins * prod(inner)

    def whole(self, shape: Sequence[int]) -> list[int]:
        """The shape of a tensor with all rows."""
        sizes = list(shape)
        for own in self.dims:
            sizes[own.of.dim] = own.of.rows
        return sizes


class Asked(NamedTuple):
    """What :func:`.propagation.signatures.halos_of` is asked for an op."""

    signature: Signature
    shapes: tuple[tuple[int, ...] | None, ...]
    parts: tuple[tuple[Part, ...], ...]
    mesh: tuple[int, ...]
    fill: float


@dataclass(frozen=True, eq=False)
class Windows:
    """How the windows of one op lie. (torch keeps it for as long as the program runs; the exchanges
    are made again when they are asked for, as those of a :class:`.ops.Runner`.)

    Attributes:
        mesh: the DeviceMesh.
        asked: for the exchanges.
        places: of the operands among the op's arguments.
        dims: by the number of the tensor, operands before results, those that get the rows that
            windows read, or of which windows add to rows; and the mesh dims whose ranks exchange
            them.
        along: the dims whose windows mesh dims shard.
        spatial: the number of dims that are read in windows, the last ones.
    """

    mesh: Any
    asked: Asked
    places: tuple[int, ...]
    dims: dict[int, tuple[int, ...]]
    along: tuple[WindowsAlong, ...]
    spatial: int

    @cached_property
    def _in_rows(self) -> frozenset[int]:
        """The tensors that have rows which windows read."""
        return frozenset([i for i, *_ in self.asked.signature.halos])

    @cached_property
    def _in_windows(self) -> frozenset[int]:
        """The tensors that have a row for each window."""
        signature, names = self.asked.signature, self.asked.signature.in_halos
        tensors = enumerate((*signature.operands, *signature.results))
        every = [i for i, of in tensors if not names.keys().isdisjoint(of)]
        return frozenset(every) - self._in_rows

    @cached_property
    def _on_devices(self) -> dict[Device, OnDevice]:
        return {}

    def on(self, rank: int) -> OnDevice:
        """What a device has."""
        device = place(self.mesh, rank)
        found = self._on_devices.get(device)
        if found is None:
            found = OnDevice(self.spatial, tuple([along.own(device) for along in self.along]))
            self._on_devices[device] = found
        return found

    @cached_property
    def _is_alike(self) -> bool:
        """Whether each device has as many windows, that lie alike."""
        dims = {m for along in self.along for *_, m in along.chain}
        sizes = [self.mesh.size(m) if m in dims else 1 for m in range(self.mesh.ndim)]
        devices = product(*map(range, sizes))
        return len({tuple([along.own(d).form for along in self.along]) for d in devices}) == 1

    def exchanged(self, i: int, x: torch.Tensor | None) -> torch.Tensor | None:
        """The tensor with the rows that windows read; a result with what all windows add to its
        rows.
        """
        if x is None or i not in self.dims:
            return x
        movement = _movements(self)[i]
        tracing = dispatch_modes.is_tracing()
        (found,) = moved_in_graph(movement, [x]) if tracing else movement([x])
        return found

    def run(
        self, function: Callable[..., Any], *args: Any, by_count: bool = False, **kwargs: Any
    ) -> Any:
        """The local results of ``function(what the device has, *local arguments)``.

        Args:
            by_count: whether the function depends on how many windows the device has, and not on
                which: if each has as many, all ranks have the same nodes in a graph.
        """
        given, count = list(args), len(self.places)
        places = {i: at for i, at in enumerate(self.places) if given[at] is not None}
        for i, at in places.items():
            given[at] = self.exchanged(i, given[at])
        there: list[bool] = []

        def of_rank(rank: int, *tensors: torch.Tensor) -> list[torch.Tensor]:
            own, local = self.on(rank), list(given)
            for (i, at), x in zip(places.items(), tensors):
                if i in self._in_rows and (own.is_empty or i in self.asked.signature.sized):
                    x = x.new_zeros(own.with_rows(x.shape))
                elif i in self._in_windows and own.is_empty:
                    x = x.new_zeros(own.with_rows(x.shape, windows=True))
                local[at] = x
            found = function(own, *local, **kwargs)
            results = list(found) if isinstance(found, (tuple, list)) else [found]
            there[:] = [x is not None for x in results]
            return [
                own.without_windows(x)
                if own.is_empty and count + k in self._in_rows | self._in_windows
                else x
                for k, x in enumerate(results)
                if x is not None
            ]

        alike = by_count and self._is_alike
        with dispatch_modes.of_each_rank() if alike else nullcontext():
            made = iter(all_on_each_rank(of_rank, *[given[at] for at in places.values()]))
        results = [
            self.exchanged(count + k, next(made)) if is_there else None
            for k, is_there in enumerate(there)
        ]
        return results[0] if len(results) == 1 else tuple(results)


@remembered
def _movements(windows: Windows) -> dict[int, Movement]:
    halos = halos_of(*windows.asked)
    return {i: Movement(halos[i], windows.mesh, dims) for i, dims in windows.dims.items()}


# -- pools -----------------------------------------------------------------------------------------


def _with_shares(own: OnDevice, x: torch.Tensor, *, padding_counts: bool) -> torch.Tensor:
    """Averages over all rows of windows as averages over the rows that count."""
    dtype = x.dtype
    for one in own.dims:
        of, (size, step, first) = one.of, one.of.reads
        after = of.rows - of.first if padding_counts else of.rows
        if (of.windows - 1) * step + first + size <= after and (padding_counts or first >= 0):
            continue  # all rows of all windows count
        starts = numbers_of(one.windows, x.device) * floor(step) + of.first
        low = starts if padding_counts else starts.clamp(min=0)
        counts = ((starts + size).clamp(max=after) - low).clamp(min=1)
        shape = [1] * x.ndim
        shape[of.dim] = one.counts[1]
        shares = size / counts.to(torch.float64) if one.windows else counts.new_ones(1)
        x = x * shares.to(torch.promote_types(dtype, torch.float32)).reshape(shape)
    return x.to(dtype)


def average(
    op: Any,
    own: OnDevice,
    x: torch.Tensor,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil: bool = False,
    padding_counts: bool = True,
    divisor: int | None = None,
) -> torch.Tensor:
    steps, pads = own.steps(stride or kernel), own.pads(padding)
    y = op(x, kernel, steps, pads, ceil, padding_counts, divisor)
    return y if divisor else _with_shares(own, y, padding_counts=padding_counts)


def average_gradient(
    op: Any,
    own: OnDevice,
    grad: torch.Tensor,
    x: torch.Tensor,
    kernel: Any,
    stride: Any,
    padding: Any,
    ceil: bool,
    padding_counts: bool,
    divisor: int | None,
) -> torch.Tensor:
    if not divisor:
        grad = _with_shares(own, grad, padding_counts=padding_counts)
    steps, pads = own.steps(stride or kernel), own.pads(padding)
    return op(grad, x, kernel, steps, pads, ceil, padding_counts, divisor)


def maximum(
    op: Any,
    own: OnDevice,
    x: torch.Tensor,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    steps, pads, apart = own.steps(stride or kernel), own.pads(padding), each(dilation, own.spatial)
    y, indices = op(x, kernel, steps, pads, dilation, ceil)
    return y, _in_whole(own, indices, x, apart)


def _in_whole(
    own: OnDevice, indices: torch.Tensor, x: torch.Tensor, dilation: Sequence[int]
) -> torch.Tensor:
    shift = own.shift(x.shape)
    if shift is not None:
        indices.add_(shift)
        if shift < 0:  # the first windows read padding: see Own.numbers
            one, dim = own.dims[0], own.dims[0].of.dim
            inner = prod(x.shape[x.ndim + dim + 1 :])
            count = -(shift // (inner * max(one.step, 1)))
            first = indices.narrow(dim, 0, min(count, one.counts[1]))
            first.copy_(torch.where(first < 0, first.remainder(dilation[dim] * inner), first))
        return indices
    return own.renumbered(
        indices,
        x.shape,
        own.whole(x.shape),
        lambda one, positions: one.numbers(positions, dilation[one.of.dim]),
    )


def _in_own(own: OnDevice, indices: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    shift = 0 if own.is_empty else own.shift(x.shape)
    if shift is not None:
        return indices - shift
    return own.renumbered(indices, own.whole(x.shape), x.shape, Own.positions)


def maximum_gradient(
    op: Any,
    own: OnDevice,
    grad: torch.Tensor,
    x: torch.Tensor,
    kernel: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil: bool,
    indices: torch.Tensor,
) -> torch.Tensor:
    steps, pads = own.steps(stride or kernel), own.pads(padding)
    return op(grad, x, kernel, steps, pads, dilation, ceil, _in_own(own, indices, x))


def adaptive(op: Any, own: OnDevice, x: torch.Tensor, sizes: Any) -> torch.Tensor:
    return op(x, own.windows(sizes))


def adaptive_maximum(
    op: Any, own: OnDevice, x: torch.Tensor, sizes: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    y, indices = op(x, own.windows(sizes))
    return y, _in_whole(own, indices, x, [1] * own.spatial)


def adaptive_maximum_gradient(
    op: Any, own: OnDevice, grad: torch.Tensor, x: torch.Tensor, indices: torch.Tensor
) -> torch.Tensor:
    return op(grad, x, _in_own(own, indices, x))


def as_it_is(op: Any, own: OnDevice, *args: Any) -> Any:
    return op(*args)


# -- convolutions ----------------------------------------------------------------------------------


def _convolved(
    op: Any,
    own: OnDevice,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    more: Any,
    groups: int,
) -> torch.Tensor:
    steps, pads, more = own.steps(stride), own.pads(padding), own.pads(more)
    return op(x, weight, bias, steps, pads, dilation, transposed, more, groups)


def convolution(
    windows: Windows,
    op: Any,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *options: Any,
) -> torch.Tensor:
    """A transposed one adds to rows of others; the bias is added once, by the device that has the
    row.
    """
    transposed = options[3]
    convolved = partial(_convolved, op)
    if bias is None or not transposed:
        return windows.run(convolved, x, weight, bias, *options, by_count=True)
    y = windows.run(convolved, x, weight, None, *options, by_count=True)
    shape = (-1, *[1] * windows.spatial)
    return on_all_ranks(lambda y, bias: y + bias.reshape(shape), y, bias)


def _gradient_of_convolution(
    op: Any,
    own: OnDevice,
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    biases: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    more: Any,
    groups: int,
    mask: Sequence[bool],
) -> Any:
    steps, pads, more = own.steps(stride), own.pads(padding), own.pads(more)
    return op(grad, x, weight, biases, steps, pads, dilation, transposed, more, groups, mask)


def convolution_gradient(
    windows: Windows, op: Any, grad: torch.Tensor, *others: Any
) -> tuple[torch.Tensor | None, ...]:
    """A transposed one reads rows of others; a bias has the sum of the device's own rows."""
    *options, mask = others
    transposed, function = options[6], partial(_gradient_of_convolution, op)
    if not (transposed and mask[2]):
        return windows.run(function, grad, *options, mask, by_count=True)
    dims = [d for d in range(grad.ndim) if d != 1]
    bias = on_all_ranks(lambda grad: grad.sum(dims), grad)
    if not any(mask[:2]):
        return None, None, bias
    mask = [*mask[:2], False]
    return *windows.run(function, grad, *options, mask, by_count=True)[:2], bias


def _on_device(function: Callable[..., Any], *, by_count: bool = False) -> Callable[..., Any]:
    """A function of what a device has as a function of all windows."""
    return lambda windows, op, *args: windows.run(partial(function, op), *args, by_count=by_count)


# -- interpolations --------------------------------------------------------------------------------
# Along each dim by itself: first along the dims that are sharded, by rows with weights, then by the
# op along the others.

# The rows (their positions on the device) that a row is made of, each with its weights.
Taps = list[tuple[torch.Tensor, torch.Tensor | None]]


def _sources(own: Own, align: bool, scale: float | None, device: torch.device) -> torch.Tensor:
    """For each of the device's windows, where it is among all rows, before the first to after the
    last.
    """
    n, count = own.of.rows, own.of.windows
    numbers = _numbers_of_windows(own, device).to(torch.float64)
    if align:
        return numbers * ((n - 1) / (count - 1) if count > 1 else 0)
    return (numbers + 0.5) * (1 / scale if scale else n / count) - 0.5


def _numbers_of_windows(own: Own, device: torch.device) -> torch.Tensor:
    if not own.windows:
        return torch.zeros(1, dtype=torch.int64, device=device)
    return numbers_of(own.windows, device)


def _positions(own: Own, rows: torch.Tensor) -> torch.Tensor:
    """The positions of rows; of rows beyond the ends those of the first and the last."""
    rows = rows.clamp(0, own.of.rows - 1)
    if not own.windows:
        return torch.zeros_like(rows)
    return own.positions(rows).clamp(0, own.counts[0] - 1)


def _nearest(name: str) -> Callable[..., Taps]:
    """The rows that the op itself takes, to the last rounding of a fraction."""

    def taps(own: Own, _: bool, scale: float | None, x: torch.Tensor) -> Taps:
        numbers = torch.arange(own.of.rows, dtype=x.dtype, device=x.device)
        op: Any = overload(name)
        taken = op(numbers.reshape(1, 1, -1), [own.of.windows], scale).reshape(-1)
        rows = taken.to(torch.int64)[_numbers_of_windows(own, x.device)]
        return [(_positions(own, rows), None)]

    return taps


def _linear(own: Own, align: bool, scale: float | None, x: torch.Tensor) -> Taps:
    source = _sources(own, align, scale, x.device).clamp(min=0)
    row = source.floor()
    weight, rows = (source - row).to(x.dtype), row.to(torch.int64)
    return [(_positions(own, rows), 1 - weight), (_positions(own, rows + 1), weight)]


def _cubic(own: Own, align: bool, scale: float | None, x: torch.Tensor) -> Taps:
    """Keys's convolution, with -3/4 as PyTorch has it."""
    source, a = _sources(own, align, scale, x.device), -0.75
    row = source.floor()
    t, rows = source - row, row.to(torch.int64)

    def near(t: torch.Tensor) -> torch.Tensor:
        return ((a + 2) * t - (a + 3)) * t * t + 1

    def far(t: torch.Tensor) -> torch.Tensor:
        return ((a * t - 5 * a) * t + 8 * a) * t - 4 * a

    weights = far(t + 1), near(t), near(1 - t), far(2 - t)
    return [(_positions(own, rows + k), weight.to(x.dtype)) for k, weight in enumerate(weights, -1)]


def _shaped(weight: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    return weight.reshape([-1 if d == dim % x.ndim else 1 for d in range(x.ndim)])


def _interpolation(taps_of: Callable[..., Taps], *, aligns: bool) -> Callable[..., torch.Tensor]:
    """``aligns``: the op is told whether to align corners."""

    def interpolated(
        op: Any, own: OnDevice, x: torch.Tensor, sizes: Sequence[int], *options: Any
    ) -> torch.Tensor:
        align, scales = _told(own, options, aligns)
        y = wide(x)
        for one in own.dims:
            taps, dim = taps_of(one, align, scales[one.of.dim], y), one.of.dim
            rows = [
                y.index_select(dim, at)
                if weight is None
                else y.index_select(dim, at) * _shaped(weight, y, dim)
                for at, weight in taps
            ]
            y = reduce(torch.add, rows)
        if len(own.dims) < own.spatial:
            onto = own.windows(sizes)
            y = op(y, onto, *_for_others(own, options, aligns))
        return y.to(x.dtype)

    return interpolated


def _interpolation_gradient(
    taps_of: Callable[..., Taps], *, aligns: bool
) -> Callable[..., torch.Tensor]:
    def gradient(
        op: Any,
        own: OnDevice,
        grad: torch.Tensor,
        sizes: Sequence[int],
        before: Sequence[int],
        *options: Any,
    ) -> torch.Tensor:
        align, scales = _told(own, options, aligns)
        found = wide(grad)
        for one in own.dims:
            taps, dim = taps_of(one, align, scales[one.of.dim], found), one.of.dim
            shape = list(found.shape)
            shape[dim] = one.counts[0]
            rows = found.new_zeros(shape)
            for at, weight in taps:
                some = found if weight is None else found * _shaped(weight, found, dim)
                rows = rows.index_add(dim, at, some)
            found = rows
        if len(own.dims) < own.spatial:
            onto, shape = list(sizes), [*found.shape[:2], *before[2:]]
            for one in own.dims:
                onto[one.of.dim] = shape[one.of.dim] = one.counts[0]
            found = op(found, onto, shape, *_for_others(own, options, aligns))
        return found.to(grad.dtype)

    return gradient


def _told(own: OnDevice, options: Sequence[Any], aligns: bool) -> tuple[bool, list[float | None]]:
    """Whether to align corners, and the scale of each dim, of an op's last arguments."""
    scales = [*options[int(aligns) :], *[None] * own.spatial][: own.spatial]
    return bool(aligns and options and options[0]), scales


def _for_others(own: OnDevice, options: Sequence[Any], aligns: bool) -> list[Any]:
    """The last arguments of an op that leaves dims that are sharded as they are."""
    align, scales = _told(own, options, aligns)
    for one in own.dims:
        scales[one.of.dim] = None
    return [*[align] * aligns, *scales]


_INTERPOLATED: dict[str, tuple[Callable[..., Taps], bool]] = {
    "nearest": (_nearest(NEAREST["nearest"]), False),
    "nearest_exact": (_nearest(NEAREST["nearest_exact"]), False),
    "linear": (_linear, True),
    "cubic": (_cubic, True),
}


_ON_DEVICES: dict[str, Callable[..., Any]] = {
    "maximum": maximum,
    "maximum_gradient": maximum_gradient,
    "adaptive": adaptive,
    "adaptive_maximum": adaptive_maximum,
    "adaptive_maximum_gradient": adaptive_maximum_gradient,
    "as_it_is": as_it_is,
    **{name: _interpolation(taps, aligns=told) for name, (taps, told) in _INTERPOLATED.items()},
    **{
        f"{name}_gradient": _interpolation_gradient(taps, aligns=told)
        for name, (taps, told) in _INTERPOLATED.items()
    },
}
# By the names in the rows of the table: called with how the windows lie, the op, and its arguments.
HALOS: dict[str, Callable[..., Any]] = {
    **{name: _on_device(function) for name, function in _ON_DEVICES.items()},
    "average": _on_device(average, by_count=True),
    "average_gradient": _on_device(average_gradient, by_count=True),
    "convolution": convolution,
    "convolution_gradient": convolution_gradient,
}
