"""The golden table: reading and writing it, computing it anew, and telling what has changed."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import re
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from golden.cases import MESHES, PLACEMENTS, names
from golden.measured import lines_of
from torch.testing._internal.distributed.fake_pg import FakeStore

TABLE = Path(__file__).parent / "table.txt"
RELEASE = "2.13.0"

HEADER = f"""\
# What ops do on DTensors, with PyTorch {RELEASE}. Written by `python -m tests.golden --write`.
#
# A case is an op of PyTorch's operator database ("op"), or a program of the tests, with the dtypes
# and shapes of its tensors, and the aten ops that it comes to. Below it, on each of {len(MESHES)}
# meshes, are {len(PLACEMENTS)} ways to place its tensors:
#
#   mesh way: placements of the tensors -> those of the results (collectives: bytes); gradients: ...
#
# R is Replicate, S0 is Shard(0), S(0,2) is _StridedShard(0, split_factor=2), P is a pending sum;
# on two mesh dims, one after the other. Bytes are those that the busiest rank receives from others,
# counted from the collectives that ran; of an all-reduce, those of a ring. No brackets: nothing was
# communicated. Gradients are asked for on the first mesh. An op that refuses is told by the first
# words of its error.
"""
SAME = "nothing has changed"

# Each line of the report's groups, at most so many of one group.
SHOWN = 100000


def of_another_release() -> str | None:
    """Why there is nothing to compare with; None if there is."""
    release = torch.__version__.partition("+")[0]
    if release == RELEASE:
        return None
    return f"the golden table is of PyTorch {RELEASE}, and this is {release}"


@cache
def read() -> dict[str, list[str]]:
    """The lines of each case, the first of which is its head."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in TABLE.read_text().splitlines() if TABLE.exists() else ():
        if line.startswith("#") or not line:
            continue
        if not line.startswith(" "):
            name = line.partition(": ")[0]
            found[name] = []
        found[name].append(line)
    return found


def write(found: dict[str, list[str]]) -> None:
    blocks = ["\n".join(found[name]) for name in names() if name in found]
    TABLE.write_text(HEADER + "\n" + "\n".join(blocks) + "\n")
    read.cache_clear()


def chosen(words: list[str]) -> list[str]:
    return [name for name in names() if not words or any(word in name for word in words)]


def start() -> None:
    """In a process of its own: eight ranks, of which this is one."""
    torch.set_num_threads(1)
    # It writes pages about each op that it refuses, which the table tells in a line.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    names()  # imports what takes long and stays
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


def measured(some: list[str], workers: int) -> dict[str, list[str]]:
    """Each case's lines, computed by so many processes."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=start) as pool:
        return dict(zip(some, pool.map(lines_of, some, chunksize=4)))


def differences(
    before: dict[str, list[str]], found: dict[str, list[str]], whole: bool = True
) -> str:
    """The lines that differ, grouped by what has changed in them; SAME if none does.

    With ``whole``, cases that are not found any more are told, too.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for name in [name for name in before if name not in found] if whole else ():
        groups["cases that are gone"].append(f"  {name}")
    for name, lines in found.items():
        if name not in before:
            groups["cases that are new"].append(f"  {lines[0]}")
            continue
        was, now = keyed(before[name]), keyed(lines)
        for key in [*was, *(key for key in now if key not in was)]:
            old, new = was.get(key, ""), now.get(key, "")
            if old != new:
                groups[kind_of_change(old, new)].append(f"  {name} {key}\n    - {old}\n    + {new}")
    if not groups:
        return SAME
    report = [f"{sum(map(len, groups.values()))} lines have changed:"]
    for kind in sorted(groups, key=lambda kind: -len(groups[kind])):
        some = groups[kind]
        report += ["", f"{kind}: {len(some)}", *some[:SHOWN]]
        if len(some) > SHOWN:
            report.append(f"  and {len(some) - SHOWN} more (--only WORD, or --write and git diff)")
    return "\n".join(report)


def keyed(lines: list[str]) -> dict[str, str]:
    """What comes of each mesh and way; under "tensors" the head."""
    pairs = (line.strip().partition(": ")[::2] for line in lines[1:])
    return {"tensors": lines[0].partition(": ")[2], **dict(pairs)}


def kind_of_change(old: str, new: str) -> str:
    """Fewer or more bytes, other placements, or an error that is another, new or gone."""
    if " -> " not in old or " -> " not in new:
        return "other tensors or samples"
    raised, raises = ERROR.search(old), ERROR.search(new)
    if raised or raises:
        return "other errors" if raised and raises else "new errors" if raises else "errors gone"
    was, now = total_bytes(old), total_bytes(new)
    if was != now:
        return "more bytes" if now > was else "fewer bytes"
    if without_costs(old) == without_costs(new):
        return "other collectives, as many bytes"
    return "other placements, as many bytes"


ERROR = re.compile(r"-> \w*(Error|Exception)\w*: |gradients: \w*(Error|Exception)\w*: ")
COST = re.compile(r" \([^()]*: (\d+)[^()]* B\)")


def total_bytes(line: str) -> int:
    return sum(map(int, COST.findall(line)))


def without_costs(line: str) -> str:
    return COST.sub("", line)
