"""Processes of one side of a comparison: PyTorch alone, in processes that never import the package,
or the package with its flags. Two sides run in turn, on the same machine and in the same run.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

FLAGS = "USE_CUTE_"
ALL: Mapping[str, str] = {"USE_CUTE_SHARDING": "1"}


class Side:
    """Some processes that run what they are asked to, all the same call, one call after the other.

    Args:
        flags: of the package, as environment variables; None: PyTorch alone.
        ranks: processes over gloo. With ``poses_as``, one process that is one rank of so many, with
            a backend that communicates nothing.

    What a call leaves for later calls, it leaves in its module. A call that raises in a process
    raises here, and the processes end.
    """

    def __init__(
        self, flags: Mapping[str, str] | None, ranks: int = 1, *, poses_as: tuple[int, int] | None
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        rendezvous = os.path.join(self._folder.name, "rendezvous")
        context = multiprocessing.get_context("spawn")
        self._ends, self._processes = [], []
        with _environment(flags):
            for rank in range(ranks):
                ours, theirs = context.Pipe()
                given = rank, ranks, rendezvous, poses_as, flags is None, theirs
                process = context.Process(target=_serve, args=given, daemon=True)
                process.start()
                theirs.close()
                self._ends.append(ours)
                self._processes.append(process)

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *error: object) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(timeout=5)
            process.kill()
        self._folder.cleanup()

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``function(*args)`` returns in each process."""
        for end in self._ends:
            end.send((function, args))
        results = []
        for rank, end in enumerate(self._ends):
            try:
                is_right, result = end.recv()
            except EOFError:
                raise RuntimeError(f"process {rank} ended; above is why") from None
            if not is_right:
                raise RuntimeError(f"process {rank}: {result}")
            results.append(result)
        return results


def torch_alone(ranks: int = 1, *, poses_as: tuple[int, int] | None = None) -> Side:
    return Side(None, ranks, poses_as=poses_as)


def with_flags(
    flags: Mapping[str, str] = ALL, ranks: int = 1, *, poses_as: tuple[int, int] | None = None
) -> Side:
    return Side(flags, ranks, poses_as=poses_as)


@contextmanager
def _environment(flags: Mapping[str, str] | None) -> Iterator[None]:
    """The environment that new processes inherit: these flags and no others. PyTorch alone does not
    even load the package's entry point.
    """
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith(FLAGS)]:
        del os.environ[name]
    os.environ.update({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"} if flags is None else flags)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _serve(
    rank: int,
    ranks: int,
    rendezvous: str,
    poses_as: tuple[int, int] | None,
    is_alone: bool,
    end: Connection,
) -> None:
    torch.set_num_threads(1)
    if poses_as is not None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        posed, world = poses_as
        dist.init_process_group("fake", rank=posed, world_size=world, store=FakeStore())
    else:
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks
        )
    while True:
        try:
            function, args = end.recv()
        except EOFError:
            break
        try:
            result = True, function(*args)
        except Exception as error:
            result = False, f"{type(error).__name__}: {error}"
        if is_alone and any(name.startswith("cute_sharding") for name in sys.modules):
            result = False, "PyTorch alone has imported cute_sharding"
        end.send(result)
    os._exit(0)  # gloo's threads may wait for processes that have ended
