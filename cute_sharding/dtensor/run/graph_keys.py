"""Keys that keep the graphs apart which torch.compile caches on disk."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import torch.distributed as dist

from cute_sharding.dtensor.bookkeeping.settings import Settings, in_force
from cute_sharding.dtensor.replaced import compiler, process_groups
from cute_sharding.dtensor.run.groups import prepared_key


def tag(settings: Settings | None) -> None:
    """Key graphs by version, settings and rank: a graph has the sizes that a rank sends and holds,
    and torch's keys do not tell ranks apart.
    """
    if settings is None:
        compiler.tag_compiled_graphs(None)
        return
    rank = process_groups.this_rank() if dist.is_initialized() else None
    compiler.tag_compiled_graphs(f"{_fingerprint()}:{settings.key}:{rank}:{prepared_key()}")


def tag_traced() -> None:
    """Call :func:`tag` when a graph is made; dynamo does so before it looks into a cache."""
    tag(in_force())


@cache
def _fingerprint() -> str:
    """A hash of this package's code: another version may decide otherwise, and compiled graphs
    outlive the process. It takes the version, and the sizes and times of the files: reading them
    all would double the time of a tag.
    """
    package = Path(__file__).parents[2]
    digest = hashlib.sha1((package / "__init__.py").read_bytes(), usedforsecurity=False)
    for source in sorted(package.rglob("*.py")):
        found = source.stat()
        digest.update(f"{source.name} {found.st_size} {found.st_mtime_ns} ".encode())
    return digest.hexdigest()[:16]
