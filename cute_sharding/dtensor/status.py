"""What is on in this process and why, on which torch, and whether it works here: ``python -m cute_sharding status``."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import cute_sharding
from cute_sharding import _autoload
from cute_sharding.dtensor import adapter, compat, versions

FLAGS = (_autoload.EVERYTHING_FLAG, _autoload.FLAG, _autoload.REDISTRIBUTION_FLAG, _autoload.IMPLICIT_FLAG)


def status() -> dict[str, Any]:
    """As plain data: versions, flags, what they have come to, the parts of torch that are replaced now, and what two checks have found."""
    settings = adapter.settings()
    running = versions.release()
    return {
        "version": cute_sharding.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "checked": versions.CHECKED,
        "torch_was_checked": running is not None and versions.FIRST <= running <= versions.LAST,
        "flags": {flag: os.environ.get(flag) for flag in FLAGS},
        "why": _autoload.report,
        "on": None if settings is None else {"views": settings.views, "redistribution": settings.redistribution, "implicit_redistribution": settings.implicit_redistribution},
        "replaced": adapter.parts_replaced(),
        "checks": _checks(),
    }


def is_well(found: dict[str, Any]) -> bool:
    """Whether the checks are right, and what the flags ask for is on."""
    asked = any((value or "").strip().lower() not in _autoload._OFF for value in found["flags"].values())
    return all(check["ours"].startswith("right") for check in found["checks"]) and (found["on"] is not None or not asked)


def show(found: dict[str, Any]) -> str:
    lines = [
        f"cute_sharding {found['version']} on Python {found['python']}",
        f"torch {found['torch']}: {'one of' if found['torch_was_checked'] else 'NOT one of'} those that were checked ({found['checked']})",
        "",
        "flags",
        *(f"  {flag:34}{'unset' if value is None else value}" for flag, value in found["flags"].items()),
    ]
    on = found["on"]
    if on is None:
        lines.append(f"off: {found['why']}")
    else:
        parts = [name for name in ("views", "redistribution") if on[name]]
        implicit = on["implicit_redistribution"]
        lines.append(f"on: {' and '.join(parts)}{f', views may redistribute ({implicit})' if implicit else ''}; {found['why']}")
    lines += ["", f"replaced in torch now: {len(found['replaced'])}", *(f"  {name}" for name in found["replaced"])]
    lines += ["", "checks, all ranks in this process"]
    for check in found["checks"]:
        lines += [f"  {check['what']}", f"    cute_sharding: {check['ours']}", f"    torch alone:   {check['torch']}"]
    return "\n".join(lines)


def _checks() -> list[dict[str, str]]:
    """A view that torch refuses and a redistribution that takes it two collectives: what ranks hold afterwards, against slices of the whole tensor."""
    before = adapter.settings()
    try:
        with _ranks(4):
            view = _compared(_view)
            move = _compared(_move)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        return [{"what": "a view and a redistribution on 4 ranks", "ours": f"FAILED: {reason}", "torch": "not asked"}]
    finally:
        adapter.switch_to(before)
    return [
        {"what": "view of (7, 3) as [S(0)] on 4 ranks to (21,)", **view},
        {"what": "redistribution of (6, 5) from [S(0), S(1)] to [S(1), S(0)] on 2 x 2 ranks", **move},
    ]


@contextmanager
def _ranks(world: int) -> Iterator[None]:
    """All ranks in this process, each op on the tensors of all."""
    from torch.distributed._local_tensor import LocalTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    mine = not dist.is_initialized()
    if mine:
        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        with LocalTensorMode(world):
            yield
    finally:
        if mine:
            dist.destroy_process_group()


def _compared(check: Callable[[], str]) -> dict[str, str]:
    found = {}
    for name, switch in (("torch", adapter.disable), ("ours", lambda: adapter.enable(redistribution=True))):
        switch()
        try:
            found[name] = check()
        except RuntimeError as error:
            found[name] = f"raises {next(iter(str(error).splitlines()), '')}"
    return found


def _from_parts(parts: list[torch.Tensor], mesh: DeviceMesh, placements: list[Any], shape: tuple[int, ...]) -> DTensor:
    local = compat.LocalTensor(dict(enumerate(parts)))
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1))


def _holds(tensor: Any, parts: list[torch.Tensor]) -> bool:
    local = compat.waited(tensor.to_local())
    with compat.no_modes():
        return all(torch.equal(compat.local_of(local, rank), part) for rank, part in enumerate(parts))


def _view() -> str:
    with compat.no_modes():
        full = torch.arange(21.0).reshape(7, 3)
        parts = list(full.split(2))
    viewed = _from_parts(parts, DeviceMesh("cpu", torch.arange(4)), [Shard(0)], (7, 3)).view(21)
    return "right, and nothing is moved" if _holds(viewed, [part.flatten() for part in parts]) else "WRONG DATA"


def _move() -> str:
    with compat.no_modes():
        full = torch.arange(30.0).reshape(6, 5)
        before = [part for rows in full.split(3) for part in rows.split(3, 1)]
        after = [part for j in range(2) for part in full[:, 3 * j : 3 * j + 3].split(3)]
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2))
    calls = compat.CollectiveCounter()
    with calls:
        moved = _from_parts(before, mesh, [Shard(0), Shard(1)], (6, 5)).redistribute(placements=[Shard(1), Shard(0)])
    return f"right, in {calls.count} collective{'s' * (calls.count != 1)}" if _holds(moved, after) else "WRONG DATA"
