"""The ops of a program on DTensors, forward and backward, and what it asks of DTensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from cute_sharding.dtensor.programs.numbers import Key, Numbers, given_key, is_same, key_of
from cute_sharding.dtensor.programs.parts import CallPart, parts_of
from cute_sharding.dtensor.replaced.asked import Ask, watched
from cute_sharding.dtensor.replaced.local_tensors import tree_map
from cute_sharding.dtensor.replaced.observing import Line, TorchDispatchMode
from cute_sharding.dtensor.replaced.op_schemas import is_written
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec
from cute_sharding.dtensor.run.any_mesh import BY_AUTOGRAD
from cute_sharding.programs.program import Price

# Counts what is received while something runs, as the function says after it.
Counting: TypeAlias = Callable[[], AbstractContextManager[Callable[[], Price]]]


@dataclass(frozen=True)
class OpKind:
    """Calls that are the same op on values of the same numbers; or the same part of such calls, as
    of an op on lists.

    Attributes:
        key: what tells the calls from others.
        places: of its operands among those of the calls.
        func: the op, or what the program asks of a DTensor.
        args, kwargs: of the first call, with specs in place of DTensors.
        operands: the numbers of its operands, in the order of its arguments.
        specs: theirs.
        as_lies: positions of operands that it writes to, or of which it returns views; or of which
            the program asks something.
        written: positions of operands that it writes to and does not return. They follow its
            results, as if it did.
        results: the numbers of its results; None for what is no DTensor, or an operand that it
            writes to.
        made: the specs of its results.
        within: for each result the position of the operand in whose memory it is; None if it has
            memory of its own.
        returned: all that it returns, with specs in place of DTensors.
    """

    key: Key
    places: tuple[int, ...]
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: tuple[int, ...]
    specs: tuple[DTensorSpec, ...]
    as_lies: frozenset[int]
    written: tuple[int, ...]
    results: tuple[int | None, ...]
    made: tuple[DTensorSpec, ...]
    within: tuple[int | None, ...]
    returned: Any


@dataclass(frozen=True)
class Call:
    """A call of a kind.

    Attributes:
        kind: its number.
        number: of the call in the program; that of the whole, if this is a part.
        operands, results: which tensors, counted in the order in which they are seen.
        line: of the program; of a gradient the line of which it is the gradient.
    """

    kind: int
    number: int
    operands: tuple[int, ...]
    results: tuple[int, ...]
    line: Line | None


@dataclass
class Recorded:
    """A program that ran.

    Attributes:
        kinds: the kinds of its calls.
        calls: in order.
        given: the numbers of values that no call makes -> their specs.
        numbers: for each tensor the number of its value.
        handed: tensors whose local tensors the program gets, to which a rank may then write alone.
        received: what its calls received.
        kept: tensors that are alive at the end.
        keys: what tells values that are given from others -> their numbers.
        gradients: for the number of a value that of its gradient.
    """

    kinds: list[OpKind] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    given: dict[int, DTensorSpec] = field(default_factory=dict)
    numbers: list[int] = field(default_factory=list)
    handed: set[int] = field(default_factory=set)
    received: Price = field(default_factory=Price)
    kept: frozenset[int] = frozenset()
    keys: dict[Key, int] = field(default_factory=dict)
    gradients: dict[int, int] = field(default_factory=dict)


class Recording(TorchDispatchMode):
    """Records the ops on DTensors inside the ``with`` block.

    Args:
        line: gives the line of the program for which the last op ran.
        counting: counts what is received in its context, as the function that it gives says after.
        key: tells a value that is given from others.

    Attributes:
        recorded: what ran so far.
    """

    def __init__(
        self,
        line: Callable[[], Line | None] = lambda: None,
        counting: Counting = lambda: nullcontext(Price),
        key: Callable[[DTensor], Key] = given_key,
    ) -> None:
        super().__init__()
        self._line, self._counting, self._key = line, counting, key
        self.recorded = Recorded()
        self._values, self._tensors = Numbers(), Numbers()
        self._kinds: dict[tuple[Key, int], int] = {}
        self._counted = 0  # values
        self._called = 0  # times
        self._watched: Any = None
        self._gradients = _Gradients(self._values.get, self.recorded.gradients)
        self._is_inside = False  # an op, or what the program asks for

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> Recording:
        self._watched = watched(self._asked, BY_AUTOGRAD)
        self._watched.__enter__()
        self._gradients.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._gradients.__exit__(*raised)
        self._watched.__exit__(*raised)
        self.recorded.kept = frozenset(self._tensors.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(issubclass(kind, DTensor) for kind in types):
            return func(*args, **kwargs)
        return self._recorded(func, args, kwargs, partial(func, *args, **kwargs))

    def _asked(self, tensor: DTensor, ask: Ask, run: Callable[[], Any]) -> Any:
        if self._is_inside:
            return run()
        result = self._recorded(ask, (tensor,), {}, run)
        if tensors_in(result) and not dtensors_in(result):
            self.recorded.handed.add(self._tensor(tensor))
        return result

    def _recorded(self, func: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        operands = dtensors_in((args, kwargs))
        before = [(self._number(x), self._tensor(x), x._spec) for x in operands]
        key = key_of(func, args, kwargs, self._number)
        with self._inside(), self._counting() as price:
            result = run()
        self.recorded.received = self.recorded.received.plus(price())
        if not isinstance(func, Ask) and len(operands) == 1 and is_same(func, operands[0], result):
            self._values.put(result, before[0][0])
            self._tensors.put(result, before[0][1])
            return result
        self._called += 1
        for part in parts_of(func, args, kwargs, result):
            self._note(_Called(func, key, part, operands), before)
        return result

    def _note(self, called: _Called, before: Sequence[tuple[int, int, DTensorSpec]]) -> None:
        """Note a call, or a part of one. ``before``: the number of each operand of the call, its
        tensor and its spec, as they were.
        """
        of_part = [before[place] for place in called.part.places]
        key = (called.key, called.part.number)
        kind = self._kinds.get(key)
        if kind is None:
            # A mode does not see what is asked for: what it gives has the number of its spec.
            number_of = self._number if isinstance(called.func, Ask) else self._new
            kind = self._kinds[key] = len(self.recorded.kinds)
            numbers = [
                None if _is_one_of(x, called.operands) else number_of(x) for x in called.made
            ]
            self.recorded.kinds.append(called.kind(of_part, numbers))
        results = []
        for x, number in zip(called.made, self.recorded.kinds[kind].results):
            if number is None:  # written in place: the same value for a plan, but other elements
                number = self._number(x)
            results.append(self._tensor_made(x, number))
        tensors = tuple([tensor for _, tensor, _ in of_part])
        self.recorded.calls.append(Call(kind, self._called, tensors, tuple(results), self._line()))

    @contextmanager
    def _inside(self) -> Iterator[None]:
        before, self._is_inside = self._is_inside, True
        try:
            yield
        finally:
            self._is_inside = before

    def _new(self, _: DTensor | None = None) -> int:
        self._counted += 1
        return self._counted - 1

    def _number(self, x: DTensor) -> int:
        number = self._values.get(x)
        if number is None:
            key = self._key(x)
            number = self.recorded.keys.get(key)
            if number is None:
                number = self.recorded.keys[key] = self._new()
                self.recorded.given[number] = x._spec
            self._values.put(x, number)
        return number

    def _tensor(self, x: DTensor) -> int:
        found = self._tensors.get(x)
        return self._tensor_made(x, self._number(x)) if found is None else found

    def _tensor_made(self, x: DTensor, number: int | None) -> int:
        assert number is not None
        self.recorded.numbers.append(number)
        self._values.put(x, number)
        self._tensors.put(x, len(self.recorded.numbers) - 1)
        return len(self.recorded.numbers) - 1


@dataclass(frozen=True)
class _Called:
    """A part of a call that has run.

    Attributes:
        key: what tells the call from others.
        all_operands: those of the call.
    """

    func: Any
    key: Key
    part: CallPart
    all_operands: list[DTensor]

    @property
    def operands(self) -> list[DTensor]:
        return [self.all_operands[place] for place in self.part.places]

    @cached_property
    def unreturned(self) -> list[int]:
        """Positions of operands that it writes to and does not return."""
        if isinstance(self.func, Ask):
            return []
        written = as_lies(self.func, self.part.args, self.part.kwargs, writes=True)
        returned = dtensors_in(self.part.result)
        return [i for i in sorted(written) if not _is_one_of(self.operands[i], returned)]

    @cached_property
    def made(self) -> list[DTensor]:
        """Its results, and what it writes to beside."""
        return [*dtensors_in(self.part.result), *[self.operands[i] for i in self.unreturned]]

    @cached_property
    def lies(self) -> frozenset[int]:
        """The operands that are read as they lie."""
        if isinstance(self.func, Ask):
            return frozenset((0,))
        return as_lies(self.func, self.part.args, self.part.kwargs) | self.part.shared

    def kind(
        self, before: Sequence[tuple[int, int, DTensorSpec]], numbers: Sequence[int | None]
    ) -> OpKind:
        """What it is, with these numbers of results."""
        specs = iter([spec for _, _, spec in before])
        args, kwargs = tree_map(
            lambda leaf: next(specs) if isinstance(leaf, DTensor) else leaf,
            (self.part.args, self.part.kwargs),
        )
        return OpKind(
            key=self.key,
            places=self.part.places,
            func=self.func,
            args=args,
            kwargs=kwargs,
            operands=tuple([number for number, _, _ in before]),
            specs=tuple([spec for _, _, spec in before]),
            as_lies=self.lies,
            written=tuple(self.unreturned),
            results=tuple(numbers),
            made=tuple([x._spec for x in self.made]),
            within=tuple([_memory_of(self.func, x, self.operands, self.lies) for x in self.made]),
            returned=tree_map(_spec_of, self.part.result),
        )


class _Gradients(TorchFunctionMode):
    """Notes which value is the gradient of which, of what torch's functions return."""

    def __init__(self, number: Callable[[DTensor], int | None], found: dict[int, int]) -> None:
        super().__init__()
        self._number, self._found = number, found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in dtensors_in(result):
            number = self._number(x) if x.grad_fn is not None else None
            if number is not None:
                x.register_hook(partial(self._note, number))
        return result

    def _note(self, of: int, gradient: torch.Tensor) -> None:
        number = self._number(gradient) if isinstance(gradient, DTensor) else None
        if number is not None:
            self._found.setdefault(of, number)


def dtensors_in(tree: Any) -> list[DTensor]:
    """The DTensors in arguments or results."""
    if isinstance(tree, DTensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return []
    return [x for each in tree for x in dtensors_in(each)]


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors of any kind in an argument."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [x for each in tree for x in tensors_in(each)] if isinstance(tree, (list, tuple)) else []


def as_lies(func: Any, args: Any, kwargs: Any, *, writes: bool = False) -> frozenset[int]:
    """The positions, among the DTensors of the arguments, of those that the op writes to or returns
    views of; or of those alone that it ``writes`` to.
    """
    found, position = set[int](), 0
    for i, argument in enumerate(func._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        count = len(dtensors_in(value))
        if is_written(func, argument) or (argument.alias_info is not None and not writes):
            found.update(range(position, position + count))
        position += count
    return frozenset(found)


def _memory_of(func: Any, x: DTensor, operands: list[DTensor], lies: frozenset[int]) -> int | None:
    """The position of the operand in whose memory a result is: itself, or what it is a view of."""
    same = next((i for i, operand in enumerate(operands) if operand is x), None)
    if same is not None or isinstance(func, Ask):
        return same
    is_view = any(returned.alias_info is not None for returned in func._schema.returns)
    return min(lies) if is_view and lies else None


def _is_one_of(x: DTensor, operands: list[DTensor]) -> bool:
    return any(x is operand for operand in operands)


def _spec_of(leaf: Any) -> Any:
    return leaf._spec if isinstance(leaf, DTensor) else leaf
