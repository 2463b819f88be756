"""One rank's part in an exchange among thousands of peers: ``python -m benchmarks.peers``.

Sizes of messages, and the copies into buffers and out of them, from nothing (every cache is new).
The same of an exchange between two meshes, and of a whole plan between two.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from cute_sharding.exchange import AllToAll, Placed
from cute_sharding.exchange.meshes import plan_exchange
from cute_sharding.sharding import Replicate, Shard, Sharding

T = TypeVar("T")
WIDTH = 2


def part(n: int, source: tuple, target: tuple) -> Callable[[], object]:
    before = Placed.numbered((4 * n, WIDTH * n), (n,), source)
    exchange = AllToAll(before, before.cut_as(target))
    return lambda: exchange.transfer(5, exchange.group(5))


def timed(what: str, function: Callable[[], T]) -> T:
    begin = time.perf_counter()
    found = function()
    print(f"{what}: {1e3 * (time.perf_counter() - begin):.1f} ms")
    return found


def main() -> None:
    rows, columns, pieces = ((((0, 1),), ()), ((), ((0, 1),)), (((0, 4),), ()))
    for n in (8192, 131072):
        for name, after in (("S(1)", columns), ("R", ((), ())), ("_S(0, 4)", pieces)):
            timed(f"{n:,} ranks, S(0) -> {name}", part(n, rows, after))
    before = Placed.of(Sharding((8192, 8192), (64, 8), (Shard(0), Shard(1))))
    after = Placed.of(Sharding((8192, 8192), (128, 8), (Shard(1), Replicate())))
    plan = timed("a plan between (64, 8) and (128, 8)", lambda: plan_exchange(before, after))
    timed("one rank's part in it", lambda: plan.exchange.part(100))


if __name__ == "__main__":
    main()
