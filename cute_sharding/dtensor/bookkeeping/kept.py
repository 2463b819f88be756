"""The list of all that this package keeps from one op to the next, and how to empty it.

A decision never depends on what is kept: any cache may be emptied at any time, on one rank alone,
and only the time of the next op changes. (``tests/dtensor/promises/test_no_history.py`` empties all
caches between any two ops.) Beside caches, the package keeps what a program has asked for, what it
tells people, and what is switched on (:mod:`cute_sharding._settings`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import _lru_cache_wrapper
from types import ModuleType
from typing import Any, NamedTuple

from cute_sharding import _memory


class Kept(NamedTuple):
    """Something that a module keeps, other than a cache of a function's results.

    Attributes:
        where: the module, below cute_sharding.dtensor, and the name in it.
        what: what it is.
        is_cache: whether it may be emptied at any time.
    """

    where: str
    what: str
    is_cache: bool = False


TABLE = (
    Kept("switch.adapter._installed", "what of torch is replaced"),
    Kept("replaced.op_schemas._made", "what tells calls apart, by the rules that there are"),
    Kept("replaced.patch.CALLED", "what runs in place of functions that a compiler traces"),
    Kept("run.groups._groups", "process groups that the program has prepared"),
    Kept("run.in_graphs._meshes", "the meshes that compiled graphs name"),
    Kept("run.in_graphs._plan", "the plan of a step that tells compiled graphs apart"),
    Kept("programs.planned._graphs_of", "the plans for which graphs were compiled"),
    Kept("programs.planned._of_thread", "the plans by which each thread runs"),
    Kept("extras.wrappers._EMPTY", "empty tensors, of which DTensors are made", True),
    Kept("run.ops.LIVE", "views that are copies, and kept copies, while the program has them"),
    Kept("run.ops._PARTS", "the rows of views that are no copies, while they exist"),
    Kept("run.ops._STALE", "those of them that miss a write"),
    Kept("bookkeeping.stats._notes", "counts, for stats()"),
    Kept("bookkeeping.stats._counts", "counts, for stats()"),
    Kept("bookkeeping.stats._received", "what ops received, for stats()"),
    Kept("bookkeeping.stats._moves", "counts, for stats()"),
    Kept("bookkeeping.stats._moved", "counts, for stats()"),
    Kept("replaced.observing._everyone", "who is told of what runs, while a program asks"),
    Kept("bookkeeping.versions._warned", "whether the warning of a newer torch was given"),
    Kept("bookkeeping.stats._told", "what the log has told of", True),
    Kept("replaced.observing.OWN", "which codes of frames are the program's own", True),
    Kept("replaced.observing.OTHERS", "which are not", True),
    Kept("replaced.observing.KNOWN", "what each of them is", True),
    Kept("compiled.symbols._named", "of a program that is being traced: symbols of local sizes"),
    Kept("replaced.communication._stood_for", "the backend that a dry run's stands for"),
)


def caches() -> Iterator[Any]:
    """Every function of the package whose results are cached."""
    seen = set()
    for module in _modules():
        for value in list(vars(module).values()):
            if isinstance(value, _lru_cache_wrapper) and id(value) not in seen:
                seen.add(id(value))
                yield value


def empty() -> None:
    """Empty all caches of the package. (Those of torch's propagator are torch's:
    replaced/op_schemas.py.)
    """
    _memory.forget()
    for cache in caches():
        cache.cache_clear()
    for kept in TABLE:
        if kept.is_cache:
            module, _, name = kept.where.rpartition(".")
            loaded = sys.modules.get(f"cute_sharding.dtensor.{module}")
            if loaded is not None:
                getattr(loaded, name).clear()


def _modules() -> list[ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if name == "cute_sharding" or name.startswith("cute_sharding.")
    ]
