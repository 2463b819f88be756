"""What keeps the graphs that torch.compile caches on disk apart."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path

import torch.distributed as dist

from cute_sharding.dtensor.bookkeeping.settings import Settings, in_force
from cute_sharding.dtensor.replaced import compiler, process_groups
from cute_sharding.dtensor.run.groups import prepared_key


def tag(settings: Settings | None) -> None:
    """Keep graphs apart by version, settings and rank: what a rank sends and holds stands in its
    graph, and torch's keys do not tell ranks apart.
    """
    if settings is None:
        compiler.tag_compiled_graphs(None)
        return
    rank = process_groups.this_rank() if dist.is_initialized() else None
    compiler.tag_compiled_graphs(f"{_fingerprint()}:{settings.key}:{rank}:{prepared_key()}")


def tag_traced() -> None:
    """As :func:`tag`, where a graph is made: dynamo comes by there before a cache is asked."""
    tag(in_force())


@cache
def _fingerprint() -> str:
    """Of this package's code: another version may answer otherwise, and compiled graphs outlive the
    process. By its version, and the sizes and times of its files: to read them all takes as long as
    the rest of a tag.
    """
    package = Path(__file__).parents[2]
    digest = hashlib.sha1((package / "__init__.py").read_bytes(), usedforsecurity=False)
    for folder, folders, names in os.walk(package):
        folders.sort()
        for name in sorted(names):
            if name.endswith(".py"):
                found = os.stat(os.path.join(folder, name))
                digest.update(f"{name} {found.st_size} {found.st_mtime_ns} ".encode())
    return digest.hexdigest()[:16]
