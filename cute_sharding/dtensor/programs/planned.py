"""Runs a program as a plan says: brings values to the placements that it names, before ops run and
after. A mode of torch does it, the official way to stand in front of ops; nothing is replaced.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch.distributed.tensor import DTensor

from cute_sharding.dtensor.bookkeeping.settings import in_force
from cute_sharding.dtensor.bookkeeping.stats import logger
from cute_sharding.dtensor.decide.redistributions import all_redistributed
from cute_sharding.dtensor.programs.numbers import (
    Float,
    Key,
    Numbers,
    given_key,
    is_same,
    key_of,
    without_floats,
)
from cute_sharding.dtensor.programs.recording import as_lies, dtensors_in, tensors_in
from cute_sharding.dtensor.replaced import compiler, observing
from cute_sharding.dtensor.replaced.dispatch_modes import is_tracing
from cute_sharding.dtensor.replaced.local_tensors import (
    is_wrapper,
    leaves,
    storage_of,
    tree_map,
)
from cute_sharding.dtensor.replaced.op_schemas import is_written
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec, Placement, placed_as
from cute_sharding.dtensor.run import in_graphs
from cute_sharding.dtensor.run.ops import Copies, copies_of, forget_copies, keep_copies
from cute_sharding.dtensor.run.placements import checked_placements, text
from cute_sharding.programs.plan import PlannedOp, StepPlan


@contextmanager
def planned(plan: StepPlan | str | Path) -> Iterator[None]:
    """Run the program inside the ``with`` block as the plan says, one step or many, on the ranks of
    the plan's mesh. The program does not change, and results are right whatever the plan says.

    An op is recognized by its arguments and by what its operands are made of, all the way back to
    weights and inputs with their shapes and placements. What the plan does not know, such as a last
    smaller batch or another branch, is decided op by op; the log says so once. Programs that
    ``torch.compile`` compiles inside the block run as planned too; for another plan, or outside of
    the block, they are compiled anew. All ranks must have the same plan.

    Args:
        plan: from :func:`cute_sharding.plan_step`, or the path of a file that ``plan.save`` wrote.

    Raises:
        RuntimeError: the package is switched off, by whose rules a step is planned.
        ValueError: the file is no plan, or names an op that this process does not have.

    >>> with planned("step.json"):
    ...     pass
    Traceback (most recent call last):
    RuntimeError: a plan is made for the rules of this package, which are switched off: set \
USE_CUTE_SHARDING=1, or call cute_sharding.enable(redistribution=True, movement=True)
    """
    if in_force() is None:
        raise RuntimeError(
            "a plan is made for the rules of this package, which are switched off: set "
            "USE_CUTE_SHARDING=1, or call cute_sharding.enable(redistribution=True, movement=True)"
        )
    with Planned(plan if isinstance(plan, StepPlan) else StepPlan.load(plan)):
        yield


# -- plans in force --------------------------------------------------------------------------------

_of_thread = threading.local()
# The digests of plans, or None, for which graphs were traced that may still be run.
_graphs_of: set[str | None] = set()


def _running() -> list[Planned]:
    if not hasattr(_of_thread, "running"):
        _of_thread.running = []
    found: list[Planned] = _of_thread.running
    return found


def plan_in_force() -> Planned | None:
    """The plan by which this thread runs."""
    return next(reversed(_running()), None)


def note_graph() -> None:
    """Note that a graph is traced for the plan in force, or for none."""
    running = plan_in_force()
    _graphs_of.add(None if running is None else running.plan.digest)


def _change_graphs(plan: StepPlan | None) -> None:
    """Have programs compiled anew that were compiled for another plan."""
    digest = None if plan is None else plan.digest
    in_graphs.tag_plan(digest)
    if _graphs_of.difference((digest,)):
        _graphs_of.clear()
        compiler.forget_compiled_code()


# -- running ---------------------------------------------------------------------------------------


class _Entry(NamedTuple):
    results: tuple[int | None, ...]
    reads: tuple[str | None, ...]
    keeps: tuple[bool, ...]
    gives: tuple[str | None, ...]
    is_read: bool
    is_given: bool


class _Wanted(NamedTuple):
    """A tensor that is read in other placements, and whether a later op reads it there too."""

    tensor: DTensor
    placements: str
    keeps: bool


class _Copy(NamedTuple):
    """A tensor in other placements, and the versions of what it was made of."""

    tensor: DTensor
    versions: tuple[int, int]


class _CopyPlace(NamedTuple):
    """Where a copy is kept: beside the memory of what it was made of. None: nowhere."""

    memory: Any
    key: Any

    def copy_of(self, x: DTensor) -> DTensor | None:
        """The copy of a tensor that is kept here; None if there is none, or the tensor has changed
        since.
        """
        kept = copies_of(self.memory)
        found = None if kept is None else kept.made.get(self.key)
        return found.tensor if found is not None and found.versions == _versions(x) else None

    def clear(self) -> None:
        """Keep no copy here."""
        kept = copies_of(self.memory)
        if kept is not None:
            kept.made.pop(self.key, None)


def _versions(x: DTensor) -> tuple[int, int]:
    """They tell of writes without an op, as of compiled code to the tensors that it is given."""
    return x._version, x._local_tensor._version


class Planned(observing.TorchDispatchMode):
    """Brings the values of a program to where a plan wants them."""

    is_traced = False

    def __init__(self, plan: StepPlan) -> None:
        super().__init__()
        self.plan = plan
        self.returned: tuple[int, ...] = ()  # by the program that was last noted while traced
        self._given = dict(zip(plan.given, plan.numbers))
        # For meshes without names, and those of a plan without.
        self._by_sizes = {key[:-1]: number for key, number in self._given.items()}
        self._entries = {_key(op): _entry(op) for op in plan.ops}
        # For calls that have other floats.
        self._nearly = {without_floats(key): entry for key, entry in self._entries.items()}
        self._values = Numbers()
        self._of_specs: dict[DTensorSpec, int] = {}
        self._kept = WeakSet[Copies]()
        self._own = object()  # tells its copies from those of other plans
        self._has_said = False

    def __enter__(self) -> Planned:
        _running().append(self)
        if not self.is_traced:
            _change_graphs(self.plan)
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        _running().remove(self)
        for copies in self._kept:
            for key in [key for key in copies.made if key[0] is self._own]:
                del copies.made[key]
        if not self.is_traced:  # while a graph is traced, nothing is compiled anew
            running = plan_in_force()
            _change_graphs(None if running is None else running.plan)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if DTensor not in types or (is_tracing() and not self.is_traced):
            if self._kept:
                _forget_written(func, args, kwargs)
            return func(*args, **kwargs)
        key = key_of(func, args, kwargs, self._number)
        entry = self._entries.get(key) or self._nearly.get(without_floats(key))
        if entry is not None and entry.is_read:
            if not self.is_traced:
                observing.note_op(func, args, kwargs)
            args, kwargs = self._read(entry, func, args, kwargs)
        if self._kept:
            _forget_written(func, args, kwargs)
        result = func(*args, **kwargs)
        if entry is None:
            first = args[0] if args else None
            if isinstance(first, DTensor) and is_same(func, first, result):
                number = self._values.get(first)
                if number is not None:
                    self._values.put(result, number)
            elif not self._has_said:
                self._has_said = True
                logger.info("%s is not in the plan: it is decided op by op, as are others", func)
            return result
        if entry.is_given:
            given = zip(dtensors_in(result), chain(entry.gives, repeat(None)))
            result = with_tensors(result, brought(given))
        made = (result,) if type(result) is DTensor else dtensors_in(result)
        for x, number in zip(made, entry.results):
            if number is not None:
                self._values.put(x, number)
        return result

    def _number(self, x: DTensor) -> int:
        number = self._values.get(x)
        return self._given_number(x) if number is None else number

    def _given_number(self, x: DTensor) -> int:
        """That of a value that no op has made: it has the number of its spec."""
        spec = x._spec
        try:
            number = self._of_specs.get(spec)
        except TypeError:  # sizes that are left open have no hash
            return self._looked_up(x)
        if number is None:
            number = self._of_specs[spec] = self._looked_up(x)
        return number

    def _looked_up(self, x: DTensor) -> int:
        key = given_key(x)
        number = self._given.get(key, -1)
        if number < 0 and not (key[-1] and self.plan.names):
            number = self._by_sizes.get(key[:-1], -1)
        return number

    def _read(self, entry: _Entry, func: Any, args: Any, kwargs: Any) -> Any:
        aliased = as_lies(func, args, kwargs) if is_aliased(func) else ()
        operands = dtensors_in((args, kwargs))
        moved = {
            i: _Wanted(x, placements, keeps)
            for i, (x, placements, keeps) in enumerate(zip(operands, entry.reads, entry.keeps))
            if placements is not None
            and i not in aliased
            and placements != text(x._spec.placements)
        }
        for i, copy in zip(moved, self._copies([*moved.values()])):
            operands[i] = copy
        return with_tensors((args, kwargs), operands)

    def _copies(self, wanted: Sequence[_Wanted]) -> list[DTensor]:
        """Tensors in other placements: as they were brought there before, if they have not changed.
        All others are brought there together.
        """
        places = [self._place_of(each) or _CopyPlace(None, i) for i, each in enumerate(wanted)]
        found, missing = dict[_CopyPlace, DTensor](), dict[_CopyPlace, _Wanted]()
        for place, each in zip(places, wanted):
            copy = place.copy_of(each.tensor)
            if copy is None:
                missing[place] = each
            else:
                found[place] = copy
        found |= zip(missing, brought([each[:2] for each in missing.values()]))
        for place, each in zip(places, wanted):
            if each.keeps and place.memory is not None:
                kept = keep_copies(place.memory)
                kept.made[place.key] = _Copy(found[place], _versions(each.tensor))
                self._kept.add(kept)
            else:
                place.clear()
        return [found[place] for place in places]

    def _place_of(self, wanted: _Wanted) -> _CopyPlace | None:
        """Where a copy is kept; None if none can be."""
        x, local = wanted.tensor, wanted.tensor._local_tensor
        if is_wrapper(local) or local.is_inference() or x.is_inference():
            return None
        where: Any = (local.storage_offset(), tuple(local.shape), local.stride())
        if type(local) is not torch.Tensor:
            where = str(where)  # sizes of all ranks have no hash
        key = (
            self._own,
            self._number(x),  # the same on all ranks, also where a rank has no elements
            where,
            local.dtype,
            tuple(x.shape),
            text(x._spec.placements),
            wanted.placements,
        )
        return _CopyPlace(storage_of(local), key)


def _forget_written(func: Any, args: Any, kwargs: Any) -> None:
    """Forget copies of what an op writes to, also if it is a local tensor."""
    for i, name in written(func):
        for x in tensors_in(args[i] if i < len(args) else kwargs.get(name)):
            local = x._local_tensor if isinstance(x, DTensor) else x
            if local.layout is torch.strided and not is_wrapper(local):
                forget_copies(storage_of(local))


@cache
def written(func: Any) -> tuple[tuple[int, str], ...]:
    """The positions and names of the arguments to which an op may write. The schemas of collectives
    do not say it.
    """
    says_nothing = func.namespace == "c10d"
    return tuple(
        [
            (i, argument.name)
            for i, argument in enumerate(func._schema.arguments)
            if says_nothing or is_written(func, argument)
        ]
    )


@cache
def is_aliased(func: Any) -> bool:
    """Whether the op writes to an argument, or returns a view of one."""
    return any(
        argument.alias_info is not None or is_written(func, argument)
        for argument in func._schema.arguments
    )


def brought(wanted: Iterable[tuple[DTensor, str | None]]) -> list[DTensor]:
    """The tensors, redistributed: those that exchange anything together. None: as it lies."""
    tensors, moves = list[DTensor](), dict[int, tuple[Any, Any, Any]]()
    for i, (x, placements) in enumerate(wanted):
        tensors.append(x)
        spec = x._spec
        if placements is not None and placements != text(spec.placements):
            sizes = tuple(spec.shape), tuple(spec.mesh.shape)
            to = placed_as(spec, checked_placements(placements, *sizes, "the plan"))
            moves[i] = x._local_tensor, spec, to
    moved = all_redistributed([*moves.values()], at_once=True, answered=True)
    for (i, (_, _, to)), local in zip(moves.items(), moved):
        tensors[i] = DTensor(local, to, requires_grad=False)
    return tensors


def with_tensors(tree: Any, tensors: Iterable[DTensor]) -> Any:
    """Arguments or results with other DTensors, in their order."""
    remaining = iter(tensors)
    return tree_map(lambda x: next(remaining) if isinstance(x, DTensor) else x, tree)


def _entry(op: PlannedOp) -> _Entry:
    # What the op has written to, or a view, stays where it is, whatever the plan says.
    aliased = any(result.alias_info is not None for result in overload(op.op)._schema.returns)
    gives = () if aliased else tuple(op.gives)
    return _Entry(
        tuple(op.results),
        tuple(op.reads),
        tuple(op.keeps),
        gives,
        any(op.reads),
        any(gives),
    )


# -- in words --------------------------------------------------------------------------------------


def planned_op(key: Key, **others: Any) -> PlannedOp:
    """A call as a plan writes it."""
    func, arguments, named = key
    return PlannedOp(
        op=str(func),
        arguments=_written(arguments),
        named={name: _written(value) for name, value in named},  # type: ignore[attr-defined]
        **others,
    )


def operands_of(op: PlannedOp) -> list[int]:
    """The numbers of its operands, in the order of its arguments."""
    told = leaves(list(op.arguments), dict(op.named))
    return [int(x[1:]) for x in told if isinstance(x, str) and x.startswith("%")]


def _key(op: PlannedOp) -> Key:
    func = overload(op.op)
    if func is None:
        raise ValueError(
            f"the plan has an op {op.op} that this process does not have: import the library that "
            "registers it, or plan the step again with this release of PyTorch"
        )
    return (
        func,
        _read_again(op.arguments),
        tuple([(name, _read_again(value)) for name, value in op.named.items()]),
    )


def overload(name: str) -> Any:
    """The op of any library with this name; None if there is none."""
    library, _, rest = name.partition(".")
    packet, _, which = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, library, None), packet, None), which, None)


def _written(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_written, value))
    if isinstance(value, Float):
        return {"float": str(value)}
    if isinstance(value, (torch.dtype, torch.memory_format)):
        return {"torch": str(value).removeprefix("torch.")}
    return value


def _read_again(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_read_again, value))
    if isinstance(value, dict):
        return Float(value["float"]) if "float" in value else getattr(torch, value["torch"])
    return value


def placements_text(placements: Sequence[Placement] | None) -> str | None:
    """Placements as a plan writes them."""
    return None if placements is None else text(placements)
