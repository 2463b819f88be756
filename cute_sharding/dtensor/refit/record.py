"""What code makes of tensors that have no data: each memory that it writes to is known as pieces of
operands.

A view shares the memory of its base, so views need no rule at all: where a tensor lies says which
elements it has. Ops that copy are relations (``ops.py``), in place or not. What an op computes is
an operand of its own, which carries the op's name and line: it can be moved like any other, and is
an error only where it reaches a result.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch

from cute_sharding.dtensor.refit.operands import (
    AsBits,
    Computed,
    Constant,
    Held,
    OfSource,
    Operand,
    Operands,
    RecordedCall,
    Taken,
    at,
    calling_line,
    filled_with,
    is_own,
    lying_as,
)
from cute_sharding.dtensor.refit.ops import (
    LIFTS,
    OVERWRITES,
    TAKES_NUMBERS,
    is_pointwise,
    is_random,
    name_of_op,
    packet_of,
    relation_of,
    traits_of,
    value_of,
    view_scattered,
    written_by,
)
from cute_sharding.dtensor.replaced import dispatch_modes
from cute_sharding.dtensor.replaced.local_tensors import leaves, storage_of, tree_map
from cute_sharding.dtensor.replaced.observing import LightMode
from cute_sharding.dtensor.replaced.op_schemas import decomposition
from cute_sharding.relations import NotOnlyMoved, Relation, beside, compose
from cute_sharding.relations.memory import WrittenMemory, in_parts, of_parts, overlaps, view_of
from cute_sharding.relations.relation import Piece, Shape, identity_pieces, join_pieces, piece

# Arguments that do not change which elements there are.
_HOW_IT_LIES = ("memory_format", "dtype", "layout", "device", "pin_memory", "non_blocking", "copy")
_EACH = "_foreach_"
_DRAWS = "draws random numbers"
NO_VALUES = (
    "tensors have no values while it is planned what moves where. Use only shapes, or read the "
    "values before"
)
# Dtypes in whose elements memory is counted that is seen as dtypes of several widths.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# -- recording -------------------------------------------------------------------------------------


class MemoryRecording(LightMode):
    """Knows of each memory that is made of the sources, or written to, what its elements are.

    Args:
        sources: shape and dtype of each tensor that is given, by name.
        into: tensors that are to be written to, by name. Writes to their memory are recorded and
            not carried out.
        of: what the code is, and what it makes, for errors.

    Attributes:
        given: a tensor without data for each source, in order.
        operands: by number.
        in_autocast: whether the code computes in another dtype than it says, which does not happen
            to tensors without data; set by :class:`Calls`.
        refused: what the code may not do, in order, also where it has caught the error: with data
            it would have gone another way.
    """

    def __init__(
        self,
        sources: Mapping[str, tuple[Any, torch.dtype]],
        into: Mapping[str, torch.Tensor] | None = None,
        of: str = "the generator (the function that makes the results)",
    ) -> None:
        super().__init__()
        self.names, self.of, self.in_autocast = tuple(sources), of, False
        self.refused: list[Exception] = []
        self.shapes = tuple([tuple(map(int, shape)) for shape, _ in sources.values()])
        self.dtypes = [dtype for _, dtype in sources.values()]
        self.operands = Operands(self.names)
        self._memories: dict[int, tuple[Any, WrittenMemory, int]] = {}
        # Memory with data that the code itself has made, and nothing else writes to, by id.
        self._made_here = weakref.WeakValueDictionary[int, torch.UntypedStorage]()
        self.given = [
            torch.empty(shape, dtype=dtype, device="meta")
            for shape, dtype in zip(self.shapes, self.dtypes)
        ]
        for k, tensor in enumerate(self.given):
            self._begin(tensor, OfSource(k, tensor.dtype))
        # What each memory that is written to held before, and the memory, so that it stays.
        self._held: dict[int, int] = {}
        self._kept: list[torch.UntypedStorage] = []
        self._looked_at: dict[int, torch.Tensor] = {}
        for name, tensor in (into or {}).items():
            storage, held = storage_of(tensor), Held(name, tensor.dtype)
            if id(storage) not in self._held:
                self._held[id(storage)] = self.operands.number(held)
                self._kept.append(storage)
                self._begin(tensor, held)

    # -- memories ----------------------------------------------------------------------------------

    def _begin(self, tensor: torch.Tensor, operand: Operand | None) -> WrittenMemory:
        """The memory of a tensor, all of which is an operand, element by element: each of a source,
        the same one of a constant. None: it has no value.
        """
        nbytes = storage_of(tensor).nbytes()
        width = 1 if nbytes % tensor.itemsize else tensor.itemsize
        size, pieces = nbytes // width, list[Piece]()
        if operand is not None and size:
            number = self.operands.number(operand)
            if width < tensor.itemsize:
                number = self.operands.as_bits(number, _WORDS[width])
            step = 0 if isinstance(operand, Constant) else 1
            pieces = [piece(number, 0, 0, 0, [(size, step, 1)])]
        return self._keep(tensor, WrittenMemory(size, pieces), width)

    def _keep(self, tensor: torch.Tensor, memory: WrittenMemory, width: int = 0) -> WrittenMemory:
        """Know of a tensor's memory, counted in ``width`` bytes; by default in its elements."""
        storage = storage_of(tensor)
        key, memories = id(storage), self._memories

        def ended(_: Any) -> None:
            memories.pop(key, None)

        self._memories[key] = weakref.ref(storage, ended), memory, width or tensor.itemsize
        return memory

    def _memory(self, tensor: torch.Tensor) -> WrittenMemory | None:
        """What is known of a tensor's memory, which is counted in its elements from now on, or in
        parts of them.
        """
        found = self._memories.get(id(storage_of(tensor)))
        if found is None:
            return None
        storage, memory, width = found
        if width > tensor.itemsize:
            factor = width // tensor.itemsize
            operands = {each.source: 0 for each in memory.pieces}
            operands = {k: self.operands.as_bits(k, _WORDS[tensor.itemsize]) for k in operands}
            memory.refine(factor, operands)
            self._memories[id(storage_of(tensor))] = storage, memory, tensor.itemsize
        return memory

    def _width(self, tensor: torch.Tensor) -> int:
        """The bytes in which its memory is counted."""
        return self._memories[id(storage_of(tensor))][2]

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Whether its memory is one of those that are recorded."""
        return tensor.is_meta or id(storage_of(tensor)) in self._memories

    def written(self, tensor: torch.Tensor) -> list[Piece]:
        """What a tensor that was to be written to is; without what it still holds, where it was."""
        memory = self._memory(tensor)
        held = self._held.get(id(storage_of(tensor)))
        has_moved = any(
            not _is_in_place(each)
            for each in (memory.pieces if memory is not None else ())
            if self._of_bits(each.source) == held
        )
        return [
            each for each in self.read(tensor) if has_moved or self._of_bits(each.source) != held
        ]

    def _of_bits(self, number: int) -> int:
        operand = self.operands[number]
        return operand.of if isinstance(operand, AsBits) else number

    # -- reading and writing -----------------------------------------------------------------------

    def read(self, tensor: torch.Tensor) -> list[Piece]:
        """What a tensor is, from operands to its row-major positions; nothing of elements without a
        value.
        """
        if not tensor.numel():
            return []
        memory = self._memory(tensor)
        if memory is None:
            return self._own(tensor)
        if tensor.is_conj() or tensor.is_neg():
            why = "the tensor is a lazy conjugate or negative"
            return self._all(tensor.shape, self.operands.computed_here(why, [], tensor.dtype))
        factor = tensor.itemsize // self._width(tensor)
        found: Sequence[Piece]
        if factor == 1:
            found = memory.read(_view(tensor))
        else:
            parts = view_of(
                int(tensor.storage_offset()) * factor,
                (*tensor.shape, factor),
                (*[step * factor for step in tensor.stride()], 1),
            )
            some = join_pieces(memory.read(parts))
            whole = [self._of_parts(one, factor, tensor) for one in some]
            if None in whole:
                why = f"elements of {tensor.dtype} are put together of parts of other elements"
                number = self.operands.computed_here(
                    why, [one.source for one in some], tensor.dtype
                )
                return self._all(tensor.shape, number)
            found = [one for one in whole if one is not None]
        wrong = {each.source for each in found if self.operands[each.source].dtype != tensor.dtype}
        if wrong:
            numbers = {k: self.operands.as_bits(k, tensor.dtype) for k in wrong}
            found = [each._replace(source=numbers.get(each.source, each.source)) for each in found]
        return list(found)

    def write(self, tensor: torch.Tensor, pieces: Sequence[Piece]) -> None:
        """Write what is given by pieces, from operands to the row-major positions of a tensor."""
        if not tensor.numel():
            return
        if tensor.is_conj() or tensor.is_neg():
            raise NotOnlyMoved(
                f"{self.of} writes to a lazy conjugate or negative{at(calling_line())}. Write what "
                "it is of: x.copy_(y.conj())"
            )
        self._check_apart(tensor)
        memory = self._memory(tensor)
        if memory is None:
            if self._is_elsewhere(tensor):
                self._check_elsewhere(tensor, pieces)
                return
            memory = self._begin_own(tensor)
        view, factor = _view(tensor), tensor.itemsize // self._width(tensor)
        if factor > 1:
            words = _WORDS[self._width(tensor)]
            numbers = {each.source: self.operands.as_bits(each.source, words) for each in pieces}
            pieces = [in_parts(each, factor, numbers) for each in pieces]
            view = in_parts(view, factor, {0: 0})
        memory.write(view, pieces)

    def _check_apart(self, tensor: torch.Tensor) -> None:
        """Raise if elements of a tensor that is written to lie at one place."""
        if overlaps(_view(tensor)):
            raise NotOnlyMoved(
                f"{self.of} writes to a tensor of shape {tuple(tensor.shape)} and strides "
                f"{tensor.stride()}{at(calling_line())}, of which several elements lie at one "
                "place, as those of windows do. clone() it first"
            )

    def _of_parts(self, one: Piece, factor: int, tensor: torch.Tensor) -> Piece | None:
        return of_parts(one, factor, {one.source: self.operands.as_bits(one.source, tensor.dtype)})

    def _own(self, tensor: torch.Tensor, func: Any = None) -> list[Piece]:
        """Of a tensor of the program's own, in which its values are: one all over, or no constant.
        ``func``: what has made them.
        """
        with dispatch_modes.no_modes():
            flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
            flat = flat.clone(memory_format=torch.contiguous_format)
            bits = flat.view(torch.uint8).view(len(flat), -1)  # 0.0 and -0.0 are two
            is_one = not tensor.is_meta and not bool((bits != bits[0]).any())
            value: Any = flat[0].item() if is_one else None
            if is_one and value != value:  # one of several NaNs
                is_one = torch.equal(torch.full_like(flat[:1], value).view(torch.uint8), bits[0])
        if func is not None and is_random(func):
            why = f"{func} {_DRAWS}"
        elif is_one:
            return self._all(tensor.shape, self.operands.number(Constant(value, tensor.dtype)))
        else:
            why = (
                f"{self.of} makes a tensor of shape {tuple(tensor.shape)} with different values, "
                "which must be a source instead"
            )
        return self._all(tensor.shape, self.operands.computed_here(why, [], tensor.dtype))

    def _begin_own(self, tensor: torch.Tensor) -> WrittenMemory:
        """The memory of a tensor of the program's own, which is about to be written to."""
        with dispatch_modes.no_modes():
            size = storage_of(tensor).nbytes() // tensor.itemsize
            whole = tensor.detach().as_strided((size,), (1,), 0)
        return self._keep(tensor, WrittenMemory(size, self._own(whole)))

    def _is_elsewhere(self, tensor: torch.Tensor) -> bool:
        """Whether others may read and write a tensor's memory, which has its values."""
        key = id(storage_of(tensor))
        return key not in self._memories and key not in self._made_here

    def _check_elsewhere(self, tensor: torch.Tensor, pieces: Sequence[Piece]) -> None:
        """Raises:
        NotOnlyMoved: elements of sources are written to such memory.
        """
        if not all(is_own(self.operands[each.source]) for each in pieces):
            of = self.operands.names_of([each.source for each in pieces])
            raise NotOnlyMoved(
                f"{self.of} writes {of} to a tensor of shape {tuple(tensor.shape)}"
                f"{at(calling_line())} that is not one of those to be written to, and that others "
                "may read, since it was made before, or shares its memory with another library. "
                "Make the tensor in the function itself, or add it to those to be written to"
            )

    def _make_here(self, made: Any) -> Any:
        """Know that an op has made these tensors with data."""
        for x in leaves(made):
            if isinstance(x, torch.Tensor) and not x.is_meta:
                storage = storage_of(x)
                if storage.resizable():  # others' memory is not, such as numpy's
                    self._made_here[id(storage)] = storage
        return made

    def _all(self, shape: Sequence[int], number: int) -> list[Piece]:
        """All elements of a tensor, each the first of an operand."""
        return [piece(number, 0, 0, 0, [(prod(shape), 0, 1)])] if prod(shape) else []

    def _made(self, tensor: torch.Tensor, pieces: Sequence[Piece]) -> None:
        """What a new tensor without data is."""
        if id(storage_of(tensor)) not in self._memories:
            self._begin(tensor, None)
        self.write(tensor, pieces)

    # -- an op -------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            return self._record(func, args, kwargs or {})
        except (NotOnlyMoved, NotImplementedError) as error:
            self.refused.append(error)
            raise

    def _record(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        traits = traits_of(func)
        if traits.communicates:
            raise NotOnlyMoved(
                f"{self.of} calls {func}{at(calling_line())}, which communicates, but each rank "
                "plans by itself. Communicate before or after it"
            )
        if traits.is_view and not traits.resizes:
            out = func(*args, **kwargs)
            return self._make_here(out) if name_of_op(func) == LIFTS else out
        if traits.copies and (args[0].is_meta or self.is_into(args[0])):  # most of what loaders do
            self._copy(args[0], args[1])
            return args[0]
        tensors = [x for x in leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if traits.asks:
            return func(*args, **kwargs)
        if traits.is_new:
            return self._allocate(func, args, kwargs)
        if not traits.resizes and not any(map(self.is_known, tensors)):
            out = func(*args, **with_data(kwargs))
            if not traits.writes:
                self._make_here(out)
            if is_random(func):
                self._note_random(func, out)
            return out
        if traits.writes:
            return self._write_by(func, args, kwargs)
        if not traits.gives_tensors:
            return self._read_by(func, tensors, args, kwargs)
        return self._make_by(func, tensors, args, kwargs)

    def _note_random(self, func: Any, out: Any) -> None:
        """The results of an op that draws random numbers: no constants, since ranks and runs draw
        others.
        """
        for x in leaves(out):
            if isinstance(x, torch.Tensor) and x.numel():
                number = self.operands.computed_here(f"{func} {_DRAWS}", [], x.dtype)
                size = storage_of(x).nbytes() // x.itemsize
                self._keep(x, WrittenMemory(size, [piece(number, 0, 0, 0, [(size, 0, 1)])]))

    def _draws(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has random numbers."""
        operands = [self.operands[k] for k in self._of([tensor])]
        return any(isinstance(x, Computed) and x.why.endswith(_DRAWS) for x in operands)

    def _allocate(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A new tensor, without values or one value all over."""
        out, value = self._make_here(func(*args, **kwargs)), value_of(name_of_op(func), args)
        if value is None:
            self._begin(out, None)
        elif out.is_meta:
            self._begin(out, Constant(filled_with(value, out.dtype), out.dtype))
        return out

    def _read_by(self, func: Any, tensors: Sequence[Any], args: Any, kwargs: Any) -> Any:
        """An op that gives no tensor: it reads values, which only constants have."""
        values = self._values_of(tensors, tables=True)
        if values is None:
            lacking = [(self.lacks(x), x.shape) for x in tensors if self.lacks(x)]
            why = without_value(*lacking[0]) if lacking else NO_VALUES
            of, name = self.named(tensors), func.__name__
            where = at(calling_line())
            raise NotOnlyMoved(
                f"{self.of} reads the values of {of} with aten.{name}{where}, but {why}"
            )
        return func(*replaced(args, values), **replaced(kwargs, values))

    def hand_out(self, tensor: torch.Tensor) -> None:
        """Others may write to a tensor's memory from now on, which has its values."""
        if not tensor.is_meta and not self._draws(tensor):
            for known in (self._memories, self._made_here):
                known.pop(id(storage_of(tensor)), None)

    def _is_table(self, tensor: torch.Tensor) -> bool:
        """Whether these are integers that the engine holds, and that nothing is written to."""
        found = self._memories.get(id(storage_of(tensor)))
        held = self._held.get(id(storage_of(tensor)))
        if found is None or held is None or tensor.is_meta or tensor.dtype.is_floating_point:
            return False
        pieces = found[1].pieces
        return all(self._of_bits(each.source) == held and _is_in_place(each) for each in pieces)

    def is_of_sources(self, tensor: torch.Tensor) -> bool:
        """Whether it has one element, which is of a source."""
        is_one = tensor.numel() == 1 and self.is_known(tensor)
        return is_one and self._values_of([tensor], tables=True) is None

    def check_looked_at(self) -> None:
        """
        Raises:
            NotOnlyMoved: the code has read values of a tensor that it also writes to.
        """
        for tensor in self._looked_at.values():
            if not self._is_table(tensor):
                held = self.operands[self._held[id(storage_of(tensor))]]
                assert isinstance(held, Held)
                raise NotOnlyMoved(
                    f"{self.of} reads values of {held.name!r}, which it also writes to, but "
                    f"{NO_VALUES}"
                )

    def stays(self) -> str:
        """The sources of which memory has elements that the code has made itself, and that is still
        there at its end; empty without any.
        """
        for collected in (False, True):
            found = [x for storage in self._made_here.values() for x in self._others_in(storage)]
            if found and not collected:
                gc.collect()
        return self.operands.names_of(found) if found else ""

    def _others_in(self, storage: torch.UntypedStorage) -> list[int]:
        """The operands of a memory that are of sources."""
        _, memory, _ = self._memories.get(id(storage), (None, None, 0))
        numbers = {each.source for each in memory.pieces} if memory is not None else ()
        return [k for k in numbers if not is_own(self.operands[k])]

    def has_own(self, tensor: torch.Tensor) -> bool:
        """Whether all values of a tensor are in its memory."""
        if self.is_into(tensor):
            return False
        return all(is_own(self.operands[each.source]) for each in self.read(tensor))

    def _write_by(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An op that writes to operands: what it would give otherwise is written to them."""
        name, written = packet_of(func), written_by(func, args, kwargs)
        if traits_of(func).resizes:
            return self._resize(func, written, args, kwargs)
        if name.startswith(_EACH) and name.removeprefix(_EACH) in OVERWRITES:
            return self._each(name, args, kwargs)
        tensors = [x for x in leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        onto = {id(x) for x in written}
        read = [x for x in tensors if id(x) not in onto]
        is_over = (
            name in OVERWRITES or is_random(func) or any(id(x) in onto for x in leaves(kwargs))
        )
        if not is_over:
            read += written
        is_own = not any(x.is_meta or self.is_into(x) for x in written)
        values = self._values_of(read, any_memory=True) if is_own else None
        if values is not None:
            func(*replaced(args, values), **replaced(kwargs, values))
        if traits_of(func).copies:
            self._copy(args[0], args[1])
        elif values is not None:
            is_without = any(map(self.lacks, read))
            for x in written:
                self.write(x, [] if is_without else self._own(x, func))
        elif name in OVERWRITES:
            self._fill(args[0], *args[1:], **kwargs)
        else:
            self._as_functional(func, written, args, kwargs)
        if not func._schema.returns:
            return None
        return written[0] if len(written) == 1 else written

    def _fill(self, onto: torch.Tensor, value: Any = 0) -> None:
        """Write one value all over."""
        if isinstance(value, torch.Tensor):
            found = self.operands.cast(self.read(value), onto.dtype)
        else:
            found = self._all(
                (1,), self.operands.number(Constant(filled_with(value, onto.dtype), onto.dtype))
            )
        many = onto.numel()
        self.write(onto, [piece(e.source, 0, e.x, 0, [(many, 0, 1)]) for e in found if many])

    def _copy(self, onto: torch.Tensor, x: torch.Tensor) -> None:
        """Write a tensor's elements to another one."""
        if x.shape != onto.shape:
            x = x.expand(onto.shape)
        if _overlap(onto, x):
            raise RuntimeError(
                f"{self.of} copies elements to memory that some of them lie in"
                f"{at(calling_line())}: clone() the tensor first"
            )
        if not self._copy_of_source(onto, x):
            self.write(onto, self.operands.cast(self.read(x), onto.dtype))

    def _copy_of_source(self, onto: torch.Tensor, x: torch.Tensor) -> bool:
        """:meth:`_copy` of a part of one operand, as most of what loaders copy is: a piece whose
        modes are the dims. False: it is another tensor.
        """
        read, written = (self._memories.get(id(storage_of(each))) for each in (x, onto))
        if read is None or written is None or not read[2] == written[2] == x.itemsize:
            return False
        pieces, size = read[1].pieces, read[1].size
        if onto.itemsize != x.itemsize or not onto.numel() or len(pieces) != 1:
            return False
        if any(y.is_conj() or y.is_neg() for y in (onto, x)):
            return False
        if not onto.is_contiguous() and overlaps(_view(onto)):
            return False
        one = pieces[0]
        if one.modes != ((size, 1, 1),) or self.operands[one.source].dtype != x.dtype:
            return False
        number = self.operands.cast_one(one.source, onto.dtype)
        modes = [*zip(onto.shape, x.stride(), onto.stride())]
        first = one.x - one.y + int(x.storage_offset())
        written[1].write_piece(piece(number, 0, first, int(onto.storage_offset()), modes))
        return True

    def _each(self, name: str, args: Any, kwargs: dict[str, Any]) -> None:
        """An op that writes over lists: the same op of each of their tensors."""
        packet, many = getattr(torch.ops.aten, name.removeprefix(_EACH)), len(args[0])
        for k in range(many):
            some = [x[k] if isinstance(x, (list, tuple)) and len(x) == many else x for x in args]
            with self:
                packet(*some, **kwargs)

    def _as_functional(
        self, func: Any, written: Sequence[torch.Tensor], args: Any, kwargs: dict[str, Any]
    ) -> None:
        """What an op would give if it did not write, written to its operands."""
        onto = {x.name for x in func._schema.arguments if x.is_write}
        given = {key: x for key, x in kwargs.items() if key not in onto}
        packet = getattr(torch.ops.aten, packet_of(func).removesuffix("_"), None)
        found, refused = list[Any](), len(self.refused)
        try:
            with self:
                found = leaves(packet(*args, **given)) if packet is not None else []
        except (NotImplementedError, RuntimeError, TypeError):
            del self.refused[refused:]  # it has no such form
        if any(x.dtype != y.dtype for x, y in zip(found, written)) and not is_pointwise(func):
            found = []  # it may compute in the dtype of what it writes to
        for k, x in enumerate(written):
            if len(found) == len(written):
                if not torch.can_cast(found[k].dtype, x.dtype):
                    raise RuntimeError(
                        f"{func} gives {found[k].dtype}, which cannot be cast to {x.dtype}"
                    )
                if x.shape != found[k].shape:  # as out= allows
                    with self:
                        x.resize_(found[k].shape)
                self._copy(x, found[k])
            else:
                read = [y for y in leaves((args, kwargs)) if isinstance(y, torch.Tensor)]
                number = self.operands.computed_here(_computes(func), self._of(read), x.dtype)
                self.write(x, self._all(x.shape, number))

    def _resize(self, func: Any, written: Sequence[Any], args: Any, kwargs: Any) -> Any:
        """An op that gives a tensor other memory, or more."""
        (x,) = written
        if self.is_into(x):
            raise NotOnlyMoved(
                f"{self.of} gives a tensor that it writes to other memory with aten."
                f"{func.__name__}{at(calling_line())}. Write to the tensor as it lies"
            )
        had = storage_of(x).nbytes() // x.itemsize
        if had and self._is_elsewhere(x):
            return func(*args, **kwargs)
        if self._memory(x) is None:
            self._begin_own(x) if had else self._begin(x, None)
        pieces = list(self._memories[id(storage_of(x))][1].pieces)
        out, size = func(*args, **kwargs), storage_of(x).nbytes() // x.itemsize
        if size > had:
            self._keep(x, WrittenMemory(size, pieces))
        return out

    def is_into(self, tensor: torch.Tensor) -> bool:
        return id(storage_of(tensor)) in self._held

    # -- ops that make tensors ---------------------------------------------------------------------

    def _make_by(self, func: Any, tensors: Sequence[Any], args: Any, kwargs: Any) -> Any:
        """An op that makes tensors, of operands of which some are known."""
        base = view_scattered(func)
        if base is not None:
            return self._scatter(base, args, kwargs)
        numbers = self._rows_by_number(func, args)
        moved = [x for x in tensors if id(x) not in numbers]
        with dispatch_modes.no_modes():
            at_meta = _on_meta(args, numbers), {**_on_meta(kwargs, numbers), **_device(kwargs)}
        out, why = self._moved(func, moved, numbers, (args, kwargs), at_meta)
        if out is not None:
            return out
        apart = self._taken_apart(func, at_meta, tensors)
        if apart is not None:
            return apart
        values = self._values_of(tensors)
        if values is not None:
            out = self._make_here(func(*replaced(args, values), **replaced(kwargs, values)))
            if is_random(func) or any(map(self._draws, tensors)):
                self._note_random(func, out)
            return out
        out = func(*at_meta[0], **at_meta[1])
        call, of, where = self._call(func, tensors, args, kwargs), self._of(tensors), calling_line()
        for k, x in enumerate(leaves(out)):
            if isinstance(x, torch.Tensor):
                said = why or _computes(func)
                number = self.operands.number(
                    Computed(said, frozenset(of), x.dtype, where, call, k)
                )
                self._made(x, identity_pieces(number, 0, x.numel()))
        return out

    def _call(
        self, func: Any, tensors: Sequence[Any], args: Any, kwargs: Any
    ) -> RecordedCall | None:
        """The op, to be called again where its operands are; None: it cannot be, since it draws
        random numbers, or an operand has elements without a value, or that are not known here.
        """
        known = [x for x in tensors if self.is_known(x)]
        taken = {id(x): self._taken(x) for x in known}
        if is_random(func) or any(map(self.lacks, known)) or None in taken.values():
            return None
        if self.in_autocast:
            return None

        def as_taken(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            return (
                taken[id(x)] if id(x) in taken else lying_as(x, x.stride())
            )  # it may be written to later

        with dispatch_modes.no_modes():
            return RecordedCall(
                func,
                tree_map(as_taken, args),
                tree_map(as_taken, kwargs),
                calling_line(),
                torch.get_default_dtype(),
            )

    def _taken(self, tensor: torch.Tensor) -> Taken | None:
        pieces = tuple(self.read(tensor))
        for number in {each.source for each in pieces}:
            if not self.operands.arrives(number):
                return None
        return Taken(pieces, tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def _scatter(self, base: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """A copy of the first operand, into a view of which the second is copied. torch gives the
        copy of windows overlapping memory too.
        """
        self._check_apart(args[0])
        with self:
            out = torch.ops.aten.clone.default(args[0])
            base(out, *args[2:], **kwargs).copy_(args[1])
        return out

    def _rows_by_number(self, func: Any, args: Sequence[Any]) -> dict[int, Any]:
        """By id, the operands that are numbers of rows, with their values."""
        place = TAKES_NUMBERS.get(name_of_op(func))
        given = leaves(args[place]) if place is not None and place < len(args) else []
        found = {}
        for x in [x for x in given if isinstance(x, torch.Tensor)]:
            values = self._values_of([x], tables=True)
            if values is not None:
                rows = values.get(id(x), x)
                is_mask = rows.dtype is torch.bool and rows.ndim == 1
                found[id(x)] = rows.nonzero().view(-1) if is_mask else rows
        return found

    def _moved(
        self,
        func: Any,
        moved: Sequence[torch.Tensor],
        numbers: Mapping[int, torch.Tensor],
        given: tuple[Any, Any],
        at_meta: tuple[Any, Any],
    ) -> tuple[Any, str]:
        """The results of an op that a table says to move, made known; else None, and why not."""

        def shape_of(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            return numbers[id(x)] if id(x) in numbers else tuple(x.shape)

        args, kwargs = tree_map(shape_of, given)
        kwargs = {key: value for key, value in kwargs.items() if key not in _HOW_IT_LIES}
        try:
            said = relation_of(name_of_op(func), args, kwargs)
        except (NotOnlyMoved, ValueError, TypeError, IndexError) as error:
            return None, f"{func} does not fit here with these arguments ({error})"
        if said is None:
            return None, ""
        out = func(*at_meta[0], **at_meta[1])
        results = out if isinstance(out, (tuple, list)) else [out]
        before = self._relation([self.read(x) for x in moved[: len(said.inputs)]], said.inputs)
        found = compose(before, said)
        constants = [
            self.operands.number(Constant(filled_with(value, results[0].dtype), results[0].dtype))
            for value in found.constants
        ]
        for k, x in enumerate(results):
            pieces = [
                each._replace(
                    target=0,
                    source=each.source if each.source >= 0 else constants[-1 - each.source],
                )
                for each in found.by_target.get(k, ())
            ]
            self._made(x, self.operands.cast(pieces, x.dtype))
        return out, ""

    def _relation(self, pieces: Sequence[Sequence[Piece]], shapes: Sequence[Shape]) -> Relation:
        """Tensors as a relation of operands, whose shapes nobody asks for."""
        every = [
            Relation((), (shape,), tuple(some)) for shape, some in zip(shapes, pieces, strict=True)
        ]
        return beside(every)

    def _taken_apart(self, func: Any, given: tuple[Any, Any], tensors: Sequence[Any]) -> Any:
        """The result of an op as torch takes it apart into others that only move. None: torch does
        not, or some compute.
        """
        apart = decomposition(func)
        if apart is None:
            return None
        args, kwargs = given
        before, refused = len(self.operands), len(self.refused)
        try:
            with self:
                out = apart(*args, **kwargs)
        except (NotOnlyMoved, NotImplementedError):
            del self.refused[refused:]
            return None
        results = [x for x in leaves(out) if isinstance(x, torch.Tensor)]
        new = {
            each.source
            for x in results
            for each in self.read(x)
            if each.source >= before and isinstance(self.operands[each.source], Computed)
        }
        return out if results and not new else None

    # -- constants ---------------------------------------------------------------------------------

    def _values_of(
        self, tensors: Sequence[torch.Tensor], *, any_memory: bool = False, tables: bool = False
    ) -> dict[int, torch.Tensor] | None:
        """By id, those of the tensors that have no data and are constants, with their values; None:
        some are made of what is not known here. ``any_memory``: elements without a value are what
        the memory holds. ``tables``: integers that the engine holds count as constants.
        """
        found = {}
        for x in tensors:
            if not self.is_known(x):
                continue
            if tables and self._is_table(x):
                self._looked_at[id(storage_of(x))] = x
                continue
            pieces = self.read(x)
            if not any_memory and sum(each.size for each in pieces) < x.numel():
                return None
            operands = {each.source: self.operands[each.source] for each in pieces}
            if x.is_meta or self.is_into(x):
                if not all(isinstance(operand, Constant) for operand in operands.values()):
                    return None
                with dispatch_modes.no_modes():
                    found[id(x)] = self._filled(x, pieces)
            elif not all(map(is_own, operands.values())):
                return None
        return found

    def _filled(self, tensor: torch.Tensor, pieces: Sequence[Piece]) -> torch.Tensor:
        made = torch.zeros(tensor.numel(), dtype=tensor.dtype)
        for each in pieces:
            operand = self.operands[each.source]
            assert isinstance(operand, Constant)
            sizes, steps = [n for n, _, _ in each.modes], [dy for _, _, dy in each.modes]
            made.as_strided(sizes, steps, each.y).fill_(operand.value)
        return made.view(tensor.shape)

    # -- what computes -----------------------------------------------------------------------------

    def _of(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """The operands that tensors are made of."""
        found = {each.source: None for x in tensors if self.is_known(x) for each in self.read(x)}
        return [*found]

    def named(self, tensors: Sequence[torch.Tensor]) -> str:
        return self.operands.names_of(self._of(tensors))

    def lacks(self, tensor: torch.Tensor) -> int:
        """How many elements of a tensor have no value."""
        if not self.is_known(tensor):
            return 0
        return tensor.numel() - sum(each.size for each in self.read(tensor))


@contextmanager
def at_meta_only(of: str, moves: str) -> Iterator[None]:
    """What torch says of tensors without data, as an error of the code that reads them."""
    try:
        yield
    except (NotImplementedError, RuntimeError, TypeError, AttributeError) as error:
        said = str(error)
        if "full_tensor" in said or "to_local" in said:
            raise NotOnlyMoved(
                f"{of} takes a tensor as a DTensor ({error}), but its tensors are whole and plain "
                "while it is planned what moves where: remove the call"
            ) from error
        if "incompatible tensor type" in said:
            raise NotOnlyMoved(
                f"{of} gives a parameter another tensor as its data, which has no values while it "
                "is planned what moves where. Write to the parameter: param.data.copy_(weight)"
            ) from error
        if "meta" not in said.lower() and "unallocated storage" not in said:
            raise
        raise NotOnlyMoved(
            f"{of} reads values or moves a tensor to a device, but tensors have no values while it "
            f"is planned what moves where ({error}). It may only move elements ({moves})"
        ) from error


def without_value(left: int, shape: Sequence[int]) -> str:
    """So many elements of a tensor have no value."""
    return (
        f"{left} of the {prod(shape)} elements of a tensor of shape {tuple(shape)} have no value, "
        "because they come from torch.empty (or new_empty, resize_) and nothing has been written "
        "to them. Use torch.zeros or torch.full, or write to all elements"
    )


# -- tensors -------------------------------------------------------------------------------------


def replaced(given: Any, values: Mapping[int, torch.Tensor]) -> Any:
    return tree_map(lambda x: values.get(id(x), x) if isinstance(x, torch.Tensor) else x, given)


def _on_meta(given: Any, numbers: Mapping[int, Any]) -> Any:
    """Arguments with tensors without data; masks of rows as their numbers."""

    def without_data(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or (x.is_meta and id(x) not in numbers):
            return x
        return numbers.get(id(x), x).to("meta")

    return tree_map(without_data, given)


def with_data(kwargs: dict[str, Any]) -> dict[str, Any]:
    """What is made beside a weight has its values."""
    is_meta = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta"
    return {**kwargs, "device": "cpu"} if is_meta else kwargs


def _device(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Nothing leaves the memory that has no data."""
    return {"device": torch.device("meta")} if kwargs.get("device") is not None else {}


def _overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors, each without gaps, share a part of their memory. torch refuses to copy
    one to the other, where it has data.
    """
    if storage_of(x) is not storage_of(y) or not (x.is_contiguous() and y.is_contiguous()):
        return False
    (first, size), (second, _) = sorted(
        (int(z.storage_offset()) * z.itemsize, z.nbytes) for z in (x, y)
    )
    return first < second < first + size


def _is_in_place(one: Piece) -> bool:
    """Whether elements are where they were."""
    return one.x == one.y and all(dx == dy for _, dx, dy in one.modes)


def _view(tensor: torch.Tensor) -> Piece:
    return view_of(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())


def _computes(func: Any) -> str:
    return f"{func} computes new values, or is an op that is not known to move elements"
