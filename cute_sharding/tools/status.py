"""What is on in this process and why, on which torch, what of torch is replaced, and whether the
package works here: ``python -m cute_sharding status``.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import asdict
from traceback import extract_tb
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import cute_sharding
from cute_sharding import _autoload
from cute_sharding._settings import FLAGS, TABLE, from_environment, unknown_flags
from cute_sharding._words import counted
from cute_sharding.dtensor.bookkeeping import versions
from cute_sharding.dtensor.replaced import communication, dispatch_modes, local_tensors, patches
from cute_sharding.dtensor.switch import adapter
from cute_sharding.tools.profile.recorder import Recorder


def status() -> dict[str, Any]:
    """As plain data: versions, flags, what they have come to, the parts of torch that are replaced
    now, and what two checks have found.
    """
    settings, running = adapter.settings(), versions.release()
    return {
        "version": cute_sharding.__version__,
        "python": platform.python_version(),
        "flags": {flag: os.environ.get(flag) for flag in FLAGS},
        "unknown_flags": unknown_flags(os.environ),
        "torch": torch.__version__,
        "checked": versions.CHECKED,
        "torch_was_checked": running is not None and versions.FIRST <= running <= versions.LAST,
        "on": None if settings is None else asdict(settings),
        "replaced": adapter.objects_replaced(),
        "replaceable": len(patches.TABLE),
        "why": _autoload.report,
        "checks": checks(),
    }


def is_well(found: dict[str, Any]) -> bool:
    """Whether the checks are right, and what the flags ask for is on."""
    try:
        asked = from_environment({name: text for name, text in found["flags"].items() if text})
    except ValueError:  # something, which cannot be told
        asked = {}
    return all(check["ours"].startswith("right") for check in found["checks"]) and (
        found["on"] is not None or asked is None
    )


def show(found: dict[str, Any]) -> str:
    """As text: what is on and whether it works, and then the lists."""
    on = found["on"]
    if on is None:
        said = f"off: {found['why']}"
    else:
        parts = [
            setting.shown.format(on[name])
            for name, setting in TABLE.items()
            if on[name] and (on["views"] or not setting.of_views)
        ]
        said = f"on: {', '.join(parts)}; {found['why']}"
    lines = [
        said,
        f"cute_sharding {found['version']} on Python {found['python']}",
        f"torch {found['torch']}: {'one of' if found['torch_was_checked'] else 'NOT one of'} those "
        f"that were checked ({found['checked']})",
        "",
        "checks, all ranks in this process",
    ]
    for check in found["checks"]:
        lines += [
            f"  {check['what']}",
            f"    cute_sharding: {check['ours']}",
            f"    torch alone:   {check['torch']}",
        ]
    lines += [
        "",
        "flags",
        *(
            f"  {flag:34}{'unset' if value is None else value}"
            for flag, value in found["flags"].items()
        ),
        *(
            f"  {name:34}{f'no such flag: did you mean {near}?' if near else 'has no effect'}"
            for name, near in found["unknown_flags"].items()
        ),
        "",
        f"objects of torch that are replaced now: {len(found['replaced'])} of "
        f"{found['replaceable']}",
        *(
            f"  {name}" + (f", {counted(n, 'entry', 'entries')}" if n else "")
            for name, n in found["replaced"].items()
        ),
    ]
    return "\n".join(lines)


def checks() -> list[dict[str, str]]:
    """A view that torch refuses and a redistribution that takes it two collectives: what ranks hold
    afterwards, against slices of the whole tensor.
    """
    before = adapter.settings()
    try:
        return [
            {"what": what, **_compared(check)}
            for what, check in (
                ("view of (7, 3) as [S(0)] on 4 ranks to (21,)", _view),
                (
                    "redistribution of (6, 5) from [S(0), S(1)] to [S(1), S(0)] on 2 x 2 ranks",
                    _move,
                ),
            )
        ]
    except Exception as error:
        place = extract_tb(error.__traceback__)[-1]
        reason = f"FAILED: {type(error).__name__}: {error} ({place.filename}:{place.lineno})"
        what = "a view and a redistribution on 4 ranks"
        return [{"what": what, "ours": reason, "torch": "not asked"}]
    finally:
        adapter.switch_to(before)


def _compared(check: Callable[[], tuple[Any, list[torch.Tensor]]]) -> dict[str, str]:
    """What comes of a check: the result and the parts that the ranks are to hold."""
    found = {}
    # In a mode of its own: torch keeps the coordinates of meshes by their address in memory, and a
    # second mesh may be put where the first one was.
    with dispatch_modes.all_ranks(4):
        for name in ("torch", "ours"):
            adapter.disable()
            if name == "ours":
                adapter.enable(redistribution=True)
            try:
                with Recorder() as recorder:
                    result, parts = check()
                local = communication.wait_for(result.to_local())
            except RuntimeError as error:
                found[name] = f"raises {next(iter(str(error).splitlines()), '')}"
                continue
            with dispatch_modes.no_modes():
                locals_ = [local_tensors.local_of(local, rank) for rank in range(4)]
                is_right = all(map(torch.equal, locals_, parts))
            sent = counted(len(recorder.seen), "collective")
            how = f"in {sent}" if recorder.seen else "and nothing is moved"
            found[name] = f"right, {how}" if is_right else "WRONG DATA"
    return found


def _from_parts(
    parts: list[torch.Tensor], mesh: list[Any], placements: list[Any], shape: tuple[int, ...]
) -> DTensor:
    local = local_tensors.LocalTensor(dict(enumerate(parts)))
    on = DeviceMesh("cpu", torch.tensor(mesh))
    size = torch.Size(shape)
    return DTensor.from_local(
        local, on, placements, run_check=False, shape=size, stride=(size[1], 1)
    )


def _view() -> tuple[Any, list[torch.Tensor]]:
    with dispatch_modes.no_modes():
        parts = list(torch.arange(21.0).reshape(7, 3).split(2))
    rows = _from_parts(parts, [0, 1, 2, 3], [Shard(0)], (7, 3))
    return rows.view(21), [part.flatten() for part in parts]


def _move() -> tuple[Any, list[torch.Tensor]]:
    with dispatch_modes.no_modes():
        full = torch.arange(30.0).reshape(6, 5)
        before = [part for rows in full.split(3) for part in rows.split(3, 1)]
        after = [part for j in range(2) for part in full[:, 3 * j : 3 * j + 3].split(3)]
    x = _from_parts(before, [[0, 1], [2, 3]], [Shard(0), Shard(1)], (6, 5))
    return x.redistribute(placements=[Shard(1), Shard(0)]), after
