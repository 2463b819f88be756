"""The Layout value: a nested shape and stride, read as a function from coordinates to integers.

Layouts are row-major (lexicographic), as in PyTorch and ``torch.distributed._pycute``: the last
mode varies fastest. CuTe proper is column-major; reversing every mode order converts one to the
other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

from cute_sharding._words import counted
from cute_sharding.layout.errors import LayoutError
from cute_sharding.layout.symbolic import Int, as_int, parse_expr

IntTuple: TypeAlias = Any
"""A shape, a stride or a coordinate: an int (or a sympy expression that is one), or a tuple of
IntTuples.

>>> shape: IntTuple = (4, (2, 3))
>>> Layout(shape).stride
(6, (3, 1))
"""
Leaves: TypeAlias = tuple[tuple[Int, Int], ...]


class Layout:
    """A layout ``shape : stride``; immutable, hashable, callable.

    Args:
        shape: an int (sympy expressions in positive integer symbols count as ints), or a nested
            tuple of them; sizes are >= 0.
        stride: congruent with ``shape``; left out, the row-major strides of ``shape``.

    The function: a coordinate ``(c0, c1, ...)`` of the leaves maps to ``sum(ci * stride_i)``, and
    an index to the value at its lexicographic coordinate. An index at or beyond ``size`` runs on
    along the outermost leaf, as in CuTe: this is what makes a tile that does not divide a layout
    well defined. Equality is equality of shape and stride; :func:`coalesce` gives the normal form
    of the function. The source is CuTe (see cute_sharding/layout/algebra).

    Raises:
        LayoutError: shape and stride are nested differently, a size is negative, or one of them is
            no integer.

    >>> layout = Layout((4, (2, 3)), (6, (3, 1)))
    >>> layout
    (4,(2,3)):(6,(3,1))
    >>> layout(7), layout(1, 1), layout(1, (0, 1)), layout(1, 0, 1)
    (7, 7, 7, 7)
    >>> layout[1], layout.size, layout.cosize, layout.rank, layout.depth
    ((2,3):(3,1), 24, 24, 2, 2)
    """

    __slots__ = ("_leaves", "shape", "stride")

    shape: IntTuple
    stride: IntTuple
    _leaves: Leaves | None

    def __init__(self, shape: IntTuple, stride: IntTuple | None = None) -> None:
        shape = _checked(shape, "shape", minimum=0)
        stride = row_major(shape) if stride is None else _checked(stride, "stride", minimum=None)
        _check_congruent(shape, stride, shape, stride)
        _set_shape(self, shape)
        _set_stride(self, stride)
        _set_leaves(self, None)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"Layout is immutable: make a new Layout instead of setting {name!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"Layout is immutable: {name!r} cannot be deleted")

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout, (self.shape, self.stride)

    @classmethod
    def parse(cls, text: str) -> Layout:
        """The layout that ``repr`` wrote as ``text``; names become positive integer symbols.

        Raises:
            LayoutError: the text is no layout.

        >>> Layout.parse("(4,(2,3)):(6,(3,1))") == Layout((4, (2, 3)), (6, (3, 1)))
        True
        """
        if not isinstance(text, str) or text.count(":") != 1:
            raise LayoutError(
                f"cannot read {text!r} as a layout: expected 'shape:stride', such as '(4,2):(2,1)'"
            )
        shape, stride = text.split(":")
        return cls(parse_expr(shape), parse_expr(stride))

    # -- structure ---------------------------------------------------------------------------------

    @property
    def leaves(self) -> Leaves:
        """The (size, stride) pairs of the leaf modes, outermost first."""
        leaves = self._leaves
        if leaves is None:
            pairs: list[tuple[Int, Int]] = []
            _collect(self.shape, self.stride, pairs)
            leaves = tuple(pairs)
            _set_leaves(self, leaves)
        return leaves

    @property
    def rank(self) -> int:
        """The number of top-level modes; an int shape is one mode."""
        return len(self.shape) if type(self.shape) is tuple else 1

    @property
    def depth(self) -> int:
        """0 for an int shape, else one more than the deepest mode."""
        return _depth(self.shape)

    @property
    def size(self) -> Int:
        """The number of coordinates."""
        result: Int = 1
        for n, _ in self.leaves:
            result = result * n
        return result

    @property
    def cosize(self) -> Int:
        """One more than the largest value reached; 0 for an empty layout.

        A stride that is a symbol counts as positive.
        """
        result: Int = 1
        for n, d in self.leaves:
            if type(n) is int and n == 0:
                return 0
            if type(d) is not int or d > 0:
                result = result + (n - 1) * d
        return result

    def __len__(self) -> int:
        return self.rank

    def __iter__(self) -> Iterator[Layout]:
        if type(self.shape) is not tuple:
            yield self
        else:
            for n, d in zip(self.shape, self.stride, strict=True):
                yield make(n, d)

    def __getitem__(self, mode: int | slice | tuple[int, ...]) -> Layout:
        """Mode ``i``, the modes of a slice, or the mode at a path of indices such as ``layout[1,
        0]``.
        """
        if isinstance(mode, tuple):
            result = self
            for step in mode:
                result = result[step]
            return result
        if type(self.shape) is not tuple:
            if isinstance(mode, slice):
                return make((self.shape,), (self.stride,))[mode]
            if mode not in (0, -1):
                raise IndexError(f"mode {mode} does not exist: {self!r} has only mode 0")
            return self
        try:
            return make(self.shape[mode], self.stride[mode])
        except IndexError:
            raise IndexError(
                f"mode {mode} does not exist: {self!r} has {counted(self.rank, 'mode')}, counted "
                "from 0"
            ) from None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return bool(self.shape == other.shape and self.stride == other.stride)

    def __hash__(self) -> int:
        return hash((self.shape, self.stride))

    def __repr__(self) -> str:
        return f"{_text(self.shape)}:{_text(self.stride)}"

    def _repr_html_(self) -> str:
        """The text; and, with one or two modes of few numbers, the values as a table."""
        from cute_sharding._html import ROWS, table

        sizes = (*[1] * (2 - self.rank), *(mode.size for mode in self))
        is_shown = len(sizes) == 2 and all(type(n) is int for leaf in self.leaves for n in leaf)
        if not is_shown or max(sizes) > ROWS:
            return f"<code>{self!r}</code>"
        rows, columns = sizes
        values = ([self(i * columns + j) for j in range(columns)] for i in range(rows))
        return table(values, caption=repr(self))

    # -- function ----------------------------------------------------------------------------------

    def __call__(self, *coordinate: IntTuple) -> Int:
        """The value at an index, at a flat coordinate (one int a leaf) or at a coordinate nested
        like the shape.

        An int in place of a nested mode is an index into that mode. Raises :class:`LayoutError` for
        a negative index, for a coordinate of another structure or outside its mode.
        """
        if len(coordinate) == 1 and not isinstance(coordinate[0], tuple):
            return _at_index(self.leaves, coordinate[0], self, extend=True)
        if len(coordinate) == 1:
            coordinate = coordinate[0]
        modes = tuple(self)
        if type(self.shape) is tuple and len(coordinate) == len(modes):
            return _at_coordinate(self, coordinate, coordinate)
        if len(coordinate) == len(self.leaves) and not any(
            isinstance(c, tuple) for c in coordinate
        ):
            flat = make(tuple(n for n, _ in self.leaves), tuple(d for _, d in self.leaves))
            return _at_coordinate(flat, coordinate, coordinate)
        if len(modes) == 1 and type(self.shape) is tuple:  # a coordinate of the only mode
            return _at_coordinate(modes[0], coordinate, coordinate)
        raise LayoutError(
            f"coordinate {coordinate} does not fit {self!r}: give one index, one index for each "
            f"mode ({len(modes)}), or one index for each leaf ({len(self.leaves)})"
        )


# The slots' own setters: they bypass the __setattr__ that keeps a Layout immutable, and cost half
# of object.__setattr__.
_set_shape, _set_stride, _set_leaves = (
    Layout.__dict__[name].__set__ for name in ("shape", "stride", "_leaves")
)
_new = object.__new__


def make(shape: IntTuple, stride: IntTuple, leaves: Leaves | None = None) -> Layout:
    """A Layout of a shape and a stride that are known to be congruent and valid; with its leaves if
    the caller has them.
    """
    layout = _new(Layout)
    _set_shape(layout, shape)
    _set_stride(layout, stride)
    _set_leaves(layout, leaves)
    return layout


def make_layout(*layouts: Layout) -> Layout:
    """The layout whose modes are ``layouts``, in order.

    Raises:
        LayoutError: an argument is no layout.

    >>> make_layout(Layout(4, 2), Layout((2, 3)))
    (4,(2,3)):(2,(3,1))
    """
    if len(layouts) == 1 and isinstance(layouts[0], (tuple, list)):
        layouts = tuple(layouts[0])
    for layout in layouts:
        if not isinstance(layout, Layout):
            raise LayoutError(f"make_layout takes layouts, got {layout!r}")
    return make(tuple(a.shape for a in layouts), tuple(a.stride for a in layouts))


def from_leaves(leaves: Any) -> Layout:
    """The flat layout of (size, stride) pairs, outermost first: an int mode for a single pair,
    ``1:0`` for none.
    """
    if not leaves:
        return make(1, 0)
    if len(leaves) == 1:
        return make(*leaves[0])
    return make(tuple([n for n, _ in leaves]), tuple([d for _, d in leaves]), tuple(leaves))


def row_major(shape: IntTuple) -> IntTuple:
    """The row-major strides of ``shape``, nested like it. A mode of size 0 counts as 1, as in
    ``torch.empty``.
    """

    def walk(part: IntTuple, current: Int) -> tuple[IntTuple, Int]:
        if type(part) is not tuple:
            return current, current * part if not (type(part) is int and part == 0) else current
        strides = []
        for item in reversed(part):
            stride, current = walk(item, current)
            strides.append(stride)
        return tuple(reversed(strides)), current

    return walk(shape, 1)[0]


def _checked(value: IntTuple, what: str, minimum: int | None) -> IntTuple:
    """``value`` with lists as tuples and sympy Integers as ints; raises if an element is not an
    int.
    """
    if type(value) is int:
        if minimum is not None and value < minimum:
            raise LayoutError(f"{what} {value} is negative; sizes are 0 or more")
        return value
    if isinstance(value, (tuple, list)):
        return tuple([_checked(item, what, minimum) for item in value])
    if isinstance(value, bool) or (
        not hasattr(value, "free_symbols") and not hasattr(value, "__index__")
    ):
        raise LayoutError(
            f"{what} {value!r} is a {type(value).__name__}; expected an int, a sympy expression or "
            "a tuple of them"
        )
    if hasattr(value, "free_symbols"):
        if value.is_integer is False or any(not s.is_integer for s in value.free_symbols):
            raise LayoutError(
                f"{what} {value} is not an integer expression: create each symbol with "
                "integer=True, positive=True"
            )
        if minimum is not None and value.is_negative:
            raise LayoutError(f"{what} {value} is negative; sizes are 0 or more")
        return _checked(int(value), what, minimum) if value.is_Integer else value
    return _checked(int(value), what, minimum)


def _check_congruent(
    shape: IntTuple, stride: IntTuple, whole_shape: IntTuple, whole_stride: IntTuple
) -> None:
    if type(shape) is tuple and type(stride) is tuple and len(shape) == len(stride):
        for n, d in zip(shape, stride, strict=True):
            _check_congruent(n, d, whole_shape, whole_stride)
    elif type(shape) is tuple or type(stride) is tuple:
        raise LayoutError(
            f"shape {_text(whole_shape)} and stride {_text(whole_stride)} are nested differently: "
            f"the part {_text(shape)} of the shape does not match the part {_text(stride)} of the "
            "stride"
        )


def _collect(shape: IntTuple, stride: IntTuple, pairs: list[tuple[Int, Int]]) -> None:
    if type(shape) is tuple:
        for n, d in zip(shape, stride, strict=True):
            _collect(n, d, pairs)
    else:
        pairs.append((shape, stride))


def _depth(shape: IntTuple) -> int:
    return 1 + max((_depth(item) for item in shape), default=0) if type(shape) is tuple else 0


def _text(value: IntTuple) -> str:
    if type(value) is tuple:
        return f"({','.join(map(_text, value))}{',' if len(value) == 1 else ''})"
    return str(value).replace(" ", "")


def _at_index(leaves: Leaves, index: Int, layout: Layout, *, extend: bool) -> Int:
    if type(index) is not int and not hasattr(index, "free_symbols"):
        if isinstance(index, bool) or not hasattr(index, "__index__"):
            raise LayoutError(
                f"index {index!r} of {layout!r} is a {type(index).__name__}; expected an int"
            )
        index = int(index)
    if type(index) is int and index < 0:
        raise LayoutError(f"index {index} of {layout!r} is negative; indices start at 0")
    if not extend and type(index) is int and type(layout.size) is int and index >= layout.size:
        raise LayoutError(
            f"coordinate {index} is outside the mode {layout!r}, which has size {layout.size}"
        )
    if not leaves:
        if index != 0:
            raise LayoutError(
                f"index {index} of {layout!r}: a layout without modes has only the index 0"
            )
        return 0
    if type(index) is int and index == 0:
        return 0  # for an empty layout too, as in composition
    result: Int = 0
    for n, d in reversed(leaves[1:]):
        if type(n) is int and n == 0:
            raise LayoutError(
                f"index {index} of {layout!r}: a layout of size 0 has no index {index}"
            )
        result = result + index % n * d
        index = index // n
    return as_int(result + index * leaves[0][1])


def _at_coordinate(layout: Layout, coordinate: IntTuple, whole: IntTuple) -> Int:
    if not isinstance(coordinate, tuple):
        return _at_index(layout.leaves, coordinate, layout, extend=False)
    if type(layout.shape) is not tuple or len(coordinate) != layout.rank:
        raise LayoutError(
            f"coordinate {whole} does not fit the layout: its part {coordinate} is not a "
            f"coordinate of the mode {layout!r}"
        )
    return sum(
        (_at_coordinate(mode, c, whole) for mode, c in zip(layout, coordinate, strict=True)), 0
    )
