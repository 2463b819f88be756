"""Replaces attributes of torch, and puts them back: a :class:`Patch` says what is replaced and why,
and on which releases and where; an :class:`Installed` does it.

Any attribute, and any entry of a dict, that a row of :mod:`.patches` names may be changed here, and
nothing else of torch.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

import torch

from cute_sharding._imports import when_imported
from cute_sharding.dtensor.bookkeeping.stats import logger

__all__ = ["Given", "Installed", "Name", "Patch", "calling", "copy_of", "require"]

_ABSENT: Any = object()


@dataclass(frozen=True)
class Name:
    """A private name of torch that the package uses.

    Attributes:
        module: the module of torch, by its full name.
        attribute: the attribute of it, dotted.
        lacking: why a torch without this name cannot be used: enable then raises a RuntimeError and
            changes nothing. Empty if torch's own behaviour may stay.
    """

    module: str
    attribute: str
    lacking: str = field(default="", kw_only=True)

    @property
    def name(self) -> str:
        return f"{self.module}.{self.attribute}"

    def owner(self) -> Any:
        """The object that has the attribute; None if this torch has none. Imports the module. For a
        function's code it is torch's own function, even if a program has wrapped it; None if the
        program has put another function in its place.
        """
        *parts, last = self.attribute.split(".")
        try:
            module = found = importlib.import_module(self.module)
            for part in parts:
                found = getattr(found, part)
        except (ImportError, AttributeError):
            return None
        if last == "__code__":
            return _of_torch(found, module, parts[-1])
        return found

    def found(self) -> Any:
        """The attribute's present value, as it is stored (a staticmethod as one); None if there is
        none.
        """
        owner, name = self.owner(), self.attribute.rpartition(".")[2]
        if isinstance(owner, type):  # not what its metaclass has: every class can be called
            return next((vars(base)[name] for base in owner.__mro__ if name in vars(base)), None)
        kept = getattr(owner, "__dict__", {})
        return kept[name] if name in kept else getattr(owner, name, None)

    def is_lacking(self) -> bool:
        """Whether this torch lacks the attribute."""
        return self.found() is None


@dataclass(frozen=True)
class Patch(Name):
    """One place in torch that is replaced while the package is enabled. If a torch lacks it and
    ``lacking`` is empty, torch's own stays there, with one warning that names it.

    Attributes:
        attribute: what is replaced, dotted.
        file: the file of torch that this is about.
        why: what torch does there, and what has to be done instead.
        until: how to see that it is no longer needed.
        test: a test that fails without it, by its pytest name.
        entries: whether entries of it are replaced, as of a dict, and not the whole.
    """

    file: str
    why: str
    until: str
    test: str
    entries: bool = False


class Installed:
    """The patches that are installed now.

    Attributes:
        missing: the patches that were left out, because this torch lacks the name.
    """

    def __init__(self) -> None:
        self.missing: list[Patch] = []
        self._steps: list[tuple[Patch, Iterable[Any], Callable[[], None]]] = []
        self._before_undo: list[Callable[[], None]] = []

    def replace(self, patch: Patch, wrap: Callable[[Any], Any]) -> None:
        """Set the attribute to ``wrap(torch's)``; for a staticmethod, to a staticmethod of that.

        Raises:
            RuntimeError: this torch has no such name, and the package needs it.
        """
        stock = patch.found()
        if stock is None:
            self._lacks(patch)
            return
        owner, name = patch.owner(), patch.attribute.rpartition(".")[2]
        was_its_own = name in getattr(owner, "__dict__", {})

        def undo() -> None:
            # An attribute that an object has from its class must come from there again. And not
            # everything that is set is in the object's dict: a function's code is not.
            if was_its_own or name not in getattr(owner, "__dict__", {}):
                setattr(owner, name, stock)
            else:
                delattr(owner, name)

        static = isinstance(stock, staticmethod)
        made = staticmethod(wrap(stock.__func__)) if static else wrap(stock)
        setattr(owner, name, made)
        self._steps.append((patch, (), undo))

    def put(self, patch: Patch, entries: Mapping[Any, Any]) -> None:
        """Set these entries of the dict. A value that a program sets in their place later stays
        when ours are removed.
        """
        table = patch.found()
        if table is None:
            self._lacks(patch)
            return
        before = [(key, ours, table.get(key, _ABSENT)) for key, ours in entries.items()]
        table.update(entries)

        def undo() -> None:
            for key, ours, stock in before:
                if table.get(key, _ABSENT) is ours:
                    if stock is _ABSENT:
                        del table[key]
                    else:
                        table[key] = stock

        self._steps.append((patch, entries, undo))

    def note(self, patch: Patch, key: Any, undo: Callable[[], None]) -> None:
        """Record an entry that a function of torch made, and how to undo it."""
        self._steps.append((patch, [key], undo))

    def once_imported(self, patch: Patch, action: Callable[[], None]) -> None:
        """Call ``action()`` once the program has imported the row's module: now, if it has. If it
        fails, torch's own stays, and the log says so: an import must not fail because of this
        package.
        """

        waiting = [action]  # emptied by undo, which may come before another thread's import ends

        def or_said() -> None:
            try:
                if waiting:
                    action()
            except Exception as error:
                logger.warning(
                    "cute_sharding could not replace PyTorch's %s (%s: %s)",
                    patch.name,
                    type(error).__name__,
                    error,
                )

        self.before_undo(when_imported(patch.module, or_said))
        self.before_undo(waiting.clear)

    def before_undo(self, action: Callable[[], None]) -> None:
        """Call ``action()`` before everything is put back: to stop waiting for what would be
        replaced later.
        """
        self._before_undo.append(action)

    def undo(self, *patches: Patch) -> None:
        """Put torch's own back, the last first: for these patches, by default for all."""
        if not patches:
            while self._before_undo:
                self._before_undo.pop()()
        others = []
        while self._steps:
            step = self._steps.pop()
            if patches and step[0] not in patches:
                others.append(step)
            else:
                step[2]()
        self._steps = others[::-1]

    def objects(self) -> dict[str, int]:
        """What is replaced, each object once, by the names of the table of patches; with the number
        of its entries, which is 0 for an object without entries.
        """
        found: dict[str, set[Any]] = {}
        for patch, keys, _ in self._steps:
            found.setdefault(patch.name, set()).update(keys if patch.entries else ())
        return {name: len(keys) for name, keys in found.items()}

    def _lacks(self, patch: Patch) -> None:
        require([patch])
        if patch not in self.missing:
            self.missing.append(patch)
            logger.warning(
                "PyTorch %s has no %s, or the program has replaced this function. cute_sharding "
                "leaves the function as it is",
                torch.__version__,
                patch.name,
            )


def require(names: Iterable[Name]) -> None:
    """Check that this torch has the names that the package needs.

    Raises:
        RuntimeError: it lacks one.
    """
    for name in names:
        if name.lacking and name.is_lacking():
            raise RuntimeError(
                f"PyTorch {torch.__version__} has no {name.name}, or the program has replaced "
                f"this function. Without this function, {name.lacking}. Install a tested release "
                "of PyTorch, call enable() before the program replaces the function, or leave "
                "cute_sharding off"
            )


# What the code of a traced function calls, by the name of its row.
CALLED: dict[str, Callable[..., Any]] = {}


def calling(
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]], row: Patch, *, is_traced: bool = False
) -> Callable[[CodeType], CodeType]:
    """A function that replaces the code of the row's function by code that calls ``wrap(torch's)``
    with the same arguments: everyone who keeps the function, as C++ does, or has imported it by
    name, then calls that.

    The called function is a constant of the new code, so that no name is added to torch's module.
    Dynamo cannot trace such a constant: code that it traces (``is_traced``) imports :data:`CALLED`,
    which takes ten times as long.
    """
    function = row.owner()

    def made(code: CodeType) -> CodeType:
        first, last = code.co_argcount, code.co_argcount + code.co_kwonlyargcount
        by_place, by_name = code.co_varnames[:first], code.co_varnames[first:last]
        taken = [*by_place, *(["*", *by_name] if by_name else [])]
        passed = [*by_place, *(f"{name}={name}" for name in by_name)]
        ours = wrap(copy_of(function, code))
        called, imports = f"{_GIVEN!r}.function", ""
        if is_traced:
            called, imports = f"CALLED[{row.name!r}]", f"from {__name__} import CALLED; "
            CALLED[row.name] = ours
        head = f"def {code.co_name}({', '.join(taken)})"
        found: dict[str, Any] = {}
        source = f"{head}: {imports}return {called}({', '.join(passed)})"
        exec(compile(source, code.co_filename, "exec"), found)
        new: CodeType = found[code.co_name].__code__
        new = new.replace(co_firstlineno=code.co_firstlineno)
        given = Given(ours)
        return new.replace(
            co_consts=tuple([given if kept == _GIVEN else kept for kept in new.co_consts])
        )

    return made


def copy_of(function: Any, code: CodeType | None = None) -> Callable[..., Any]:
    """A copy of the function with its present code, or with ``code``, that stays the same when the
    function gets other code.
    """
    copy = FunctionType(
        code or function.__code__, function.__globals__, function.__name__, function.__defaults__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class Given:
    """A function as a constant of code: Python hashes code with its constants, and some functions
    cannot be hashed.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function


# Stands for the constant until it is put in: Python's compiler takes only numbers and strings.
_GIVEN = "what is given to code of cute_sharding"


def _of_torch(function: Any, module: Any, name: str) -> Any | None:
    """The function of that name in the module, unwrapped; None if it is not the module's own."""
    try:
        function = inspect.unwrap(function)
    except ValueError:  # the wrapper wraps itself
        return None
    is_torchs = (
        isinstance(function, FunctionType)
        and function.__globals__ is vars(module)
        and function.__code__.co_name == name
    )
    return function if is_torchs else None
