"""Which meshes hold tensors that torch's own rules would have laid out otherwise.

Torch redistributes the input of some views without a word, also of strict ones, where the view can
be free. There a tensor goes on sharded that in torch's hands would be replicated, and whatever is
computed from it. A later strict view of that may not be free, while torch's of a replica is; to
raise there would stop a program that runs without us, so the view then redistributes. What came of
which tensor nobody knows, so that is said of a mesh: it holds for all ranks alike that have run the
program up to there.

A view that torch refuses is another matter: no program that runs without us comes by there, so none
has to go on. But where ranks draw the numbers of its shards, each draws its own amount. So that is
said of the mesh as well.

And a view that torch does as well may say what it gives in another way, a shard as a
`_StridedShard` of factor one, on which torch's rules then come to other placements.

What torch would have done is asked only when it matters: a view is about to be refused, torch
refuses an op or one draws numbers, or too many questions are open. Until then each free view leaves
a question, once for each propagation (DTensor caches them).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from cute_sharding.dtensor.bookkeeping.locks import fork_safe_lock

MOST_OPEN = 256


class Torchs(Enum):
    """What torch would have made of an op that rules of ours have answered."""

    THE_SAME = 0
    ANOTHER = 1
    NOTHING = 2
    SAID_OTHERWISE = 3
    UNASKED = 4  # to ask would take a search of seconds


Question = Callable[[], Torchs | bool]  # whether it is another, of ops that torch answers


class _Page:
    """Of one default process group: a mesh of an earlier one may equal one of this."""

    def __init__(self) -> None:
        self.questions: defaultdict[Any, list[Question]] = defaultdict(list)  # by mesh
        self.quick: defaultdict[Any, list[Question]] = defaultdict(list)
        self.found: defaultdict[Torchs, set[Any]] = defaultdict(set)  # the meshes

    def settle(self, mesh: Any, *, quickly: bool = False) -> None:
        """Ask what is open of a mesh, or what is answered quickly; once it has diverged no more."""
        slow = [] if quickly else self.questions.pop(mesh, [])
        for question in [*self.quick.pop(mesh, []), *slow]:
            if mesh not in self.found[Torchs.ANOTHER]:
                found = question()
                if not isinstance(found, Torchs):
                    found = Torchs.ANOTHER if found else Torchs.THE_SAME
                self.found[found].add(mesh)


_pages: WeakKeyDictionary[Any, _Page] = WeakKeyDictionary()
_lock = fork_safe_lock()


def note(mesh: Any, question: Question, *, quick: bool = False) -> None:
    """An op (a view, one by its signature, a movement) has given a tensor on ``mesh`` placements of
    ours; ``question`` says whether torch would have given others, or have redistributed its input,
    or refused it. ``quick``: it takes no search, as that of a view.
    """
    with _lock:
        page = _page()
        if mesh not in page.found[Torchs.ANOTHER]:
            (page.quick if quick else page.questions)[mesh].append(question)
            if len(page.questions[mesh]) + len(page.quick[mesh]) > MOST_OPEN:
                diverged(mesh)


def know(mesh: Any, torchs: Torchs = Torchs.ANOTHER) -> None:
    """As :func:`note`, where nobody has to be asked."""
    with _lock:
        _page().found[torchs].add(mesh)


def diverged(mesh: Any) -> bool:
    """Whether since :func:`forget` some op on ``mesh`` has given what torch would not have: a view
    was free that torch would have redistributed for, or an op has kept a cut.
    """
    with _lock:
        page = _page()
        page.settle(mesh)
        return mesh in page.found[Torchs.ANOTHER]


def may_have_diverged(mesh: Any) -> bool:
    """Whether some op on ``mesh`` has given what torch would not have, or would have said in
    another way, of which its rules make something else; or that is not known.
    """
    with _lock:
        found = _page().found
        return diverged(mesh) or any(
            mesh in found[some] for some in (Torchs.SAID_OTHERWISE, Torchs.UNASKED)
        )


def views_diverged(mesh: Any) -> bool:
    """As :func:`diverged`, as far as that is known of views, and of others without a search."""
    with _lock:
        page = _page()
        page.settle(mesh, quickly=True)
        return mesh in page.found[Torchs.ANOTHER]


def says_otherwise(mesh: Any) -> bool:
    """Whether views have diverged, or have given what torch would have said in another way."""
    with _lock:
        return views_diverged(mesh) or mesh in _page().found[Torchs.SAID_OTHERWISE]


def knows_what_torch_refuses(mesh: Any) -> bool:
    """Whether since :func:`forget` some view on ``mesh`` was free that torch would have refused.
    (Nobody asks where some have diverged.)
    """
    with _lock:
        page = _page()
        page.settle(mesh)
        return mesh in page.found[Torchs.NOTHING]


def forget() -> None:
    with _lock:
        _pages.clear()


def _page() -> _Page:
    return _pages.setdefault(dist.group.WORLD or _Page, _Page())
