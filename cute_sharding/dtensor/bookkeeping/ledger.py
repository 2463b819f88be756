"""Which meshes hold tensors that torch's own rules would have laid out otherwise.

Torch redistributes the input of some views without a word, also of strict ones, where the view can
be free. There a tensor goes on sharded that in torch's hands would be replicated, and whatever is
computed from it. A later strict view of that may not be free, while torch's of a replica is; to
raise there would stop a program that runs without us, so the view then redistributes. What came of
which tensor nobody knows, so that is said of a mesh: it holds for all ranks alike that have run the
program up to there.

What torch would have done is asked only when it matters: a view is about to be refused, torch
refuses an op or one draws numbers, or too many questions are open. Until then each free view leaves
a question, once for each propagation (DTensor caches them).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from cute_sharding.dtensor.bookkeeping.locks import fork_safe_lock

MOST_OPEN = 256

Question = Callable[[], bool]


class _Page:
    """Of one default process group: a mesh of an earlier one may equal one of this."""

    def __init__(self) -> None:
        self.questions: defaultdict[Any, list[Question]] = defaultdict(list)  # by mesh
        self.diverged: set[Any] = set()


_pages: WeakKeyDictionary[Any, _Page] = WeakKeyDictionary()
_lock = fork_safe_lock()


def note(mesh: Any, question: Question) -> None:
    """An op (a view, one by its signature, a movement) has given a tensor on ``mesh`` placements of
    ours; ``question`` says whether torch would have given others, or have redistributed its input.
    """
    with _lock:
        page = _page()
        if mesh not in page.diverged:
            page.questions[mesh].append(question)
            if len(page.questions[mesh]) > MOST_OPEN:
                diverged(mesh)


def diverged(mesh: Any) -> bool:
    """Whether since :func:`forget` some op on ``mesh`` has given what torch would not have: a view
    was free that torch would have redistributed for, or an op has kept a cut.
    """
    with _lock:
        page = _page()
        if mesh not in page.diverged and any(
            question() for question in page.questions.pop(mesh, [])
        ):
            page.diverged.add(mesh)
        return mesh in page.diverged


def forget() -> None:
    with _lock:
        _pages.clear()


def _page() -> _Page:
    return _pages.setdefault(dist.group.WORLD or _Page, _Page())
