"""What it takes to replace something of torch, and to put it back: a :class:`Patch` says what and
why, an :class:`Installed` does it.

Any attribute, and any entry of a dict, that a row of :mod:`.patches` names may be touched here, and
nothing else of torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from cute_sharding.dtensor.bookkeeping.stats import logger

__all__ = ["Installed", "Patch", "require"]

_ABSENT: Any = object()


@dataclass(frozen=True)
class Patch:
    """One place in torch that is replaced while the package is enabled.

    Attributes:
        module: the module of torch, by its full name.
        attribute: what of it is replaced, dotted; where that is a dict, ``entries`` of it are.
        file: the file of torch that this is about.
        why: what torch does there, and what has to be done instead.
        until: how one sees that it is no longer needed.
        test: a test of what it does, as pytest names it (not each has been seen to fail without).
        lacking: why a torch without this name cannot do: enable then raises a RuntimeError, and
            everything is as it was. Empty where torch's own may stay in force: it is left out, with
            one warning that names it.
        entries: what is replaced is entries of a dict; empty, or what each is, "the handler of {}".
        versions: the releases that need it, of those that were checked.
    """

    module: str
    attribute: str
    file: str
    why: str
    until: str
    test: str
    lacking: str = ""
    entries: str = ""
    versions: str = "2.13 to 2.15"

    @property
    def name(self) -> str:
        return f"{self.module}.{self.attribute}"

    def owner(self) -> Any:
        """The object that has the attribute; None where this torch has none. Imports the module."""
        try:
            found = importlib.import_module(self.module)
            for part in self.attribute.split(".")[:-1]:
                found = getattr(found, part)
        except (ImportError, AttributeError):
            return None
        return found

    def found(self) -> Any:
        """What torch has there now, as it is kept (a staticmethod as one); None where it has
        nothing.
        """
        owner, name = self.owner(), self.attribute.rpartition(".")[2]
        kept = getattr(owner, "__dict__", {})
        return kept[name] if name in kept else getattr(owner, name, None)


class Installed:
    """What stands in for torch's at this time.

    Attributes:
        missing: the patches that were left out, as this torch lacks the name.
    """

    def __init__(self) -> None:
        self.missing: list[Patch] = []
        self._steps: list[tuple[Patch, Any, Callable[[], None]]] = []
        self._before_undo: list[Callable[[], None]] = []

    def replace(self, patch: Patch, wrap: Callable[[Any], Any]) -> None:
        """Have the attribute be ``wrap(torch's)``; of a staticmethod, a staticmethod of that.

        Raises:
            RuntimeError: this torch has no such name, and the package cannot do without.
        """
        stock = patch.found()
        if stock is None:
            self._lacks(patch)
            return
        owner, name = patch.owner(), patch.attribute.rpartition(".")[2]
        was_its_own = name in getattr(owner, "__dict__", {})

        def undo() -> None:
            # What an object has of its class is to be found there again. Not everything that is
            # set stands in the object's dict: a function's code does not.
            if was_its_own or name not in getattr(owner, "__dict__", {}):
                setattr(owner, name, stock)
            else:
                delattr(owner, name)

        static = isinstance(stock, staticmethod)
        made = staticmethod(wrap(stock.__func__)) if static else wrap(stock)
        setattr(owner, name, made)
        self._steps.append((patch, None, undo))

    def put(self, patch: Patch, key: Any, value: Any) -> None:
        """Have the entry of that key be ``value``."""
        self._enter(patch, key, value)

    def take(self, patch: Patch, key: Any) -> None:
        """Have no entry of that key."""
        self._enter(patch, key, _ABSENT)

    def _enter(self, patch: Patch, key: Any, value: Any) -> None:
        table = patch.found()
        if table is None:
            self._lacks(patch)
            return
        before = table.get(key, _ABSENT)
        if value is not before:
            self._steps.append((patch, key, lambda: _set(table, key, before)))
            _set(table, key, value)

    def before_undo(self, action: Callable[[], None]) -> None:
        """Call ``action()`` before all is put back: to give up waiting for what is to be replaced
        later.
        """
        self._before_undo.append(action)

    def undo(self, *patches: Patch) -> None:
        """Put torch's own back, the last first: of those patches; of all, where none is named."""
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

    def names(self) -> list[str]:
        """What is replaced, each name once."""
        return list(
            dict.fromkeys(
                patch.name if not patch.entries else patch.entries.format(key)
                for patch, key, _ in self._steps
            )
        )

    def _lacks(self, patch: Patch) -> None:
        require([patch])
        if patch not in self.missing:
            self.missing.append(patch)
            logger.warning(
                "torch %s has no %s: what cute_sharding mends there stays as torch has it (see "
                "docs/patches.md)",
                torch.__version__,
                patch.name,
            )


def require(patches: Iterable[Patch]) -> None:
    """Look whether this torch has what cannot be done without.

    Raises:
        RuntimeError: it lacks one.
    """
    for patch in patches:
        if patch.lacking and patch.found() is None:
            raise RuntimeError(
                f"torch {torch.__version__} has no {patch.name}: {patch.lacking}. Take a release "
                "that was checked, or leave cute_sharding off"
            )


def _set(table: dict[Any, Any], key: Any, value: Any) -> None:
    if value is _ABSENT:
        table.pop(key, None)
    else:
        table[key] = value
