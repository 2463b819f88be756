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
from cute_sharding.dtensor.bookkeeping import versions
from cute_sharding.dtensor.replaced import communication, dispatch_modes, local_tensors
from cute_sharding.dtensor.replaced.observing import TorchDispatchMode
from cute_sharding.dtensor.switch import adapter


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
        "replaced": adapter.parts_replaced(),
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
    lines = [
        f"cute_sharding {found['version']} on Python {found['python']}",
        f"torch {found['torch']}: {'one of' if found['torch_was_checked'] else 'NOT one of'} those "
        f"that were checked ({found['checked']})",
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
    ]
    on = found["on"]
    if on is None:
        lines.append(f"off: {found['why']}")
    else:
        parts = [
            setting.shown.format(on[name])
            for name, setting in TABLE.items()
            if on[name] and (on["views"] or not setting.of_views)
        ]
        lines.append(f"on: {', '.join(parts)}; {found['why']}")
    lines += [
        "",
        f"replaced in torch now: {len(found['replaced'])}",
        *(f"  {name}" for name in found["replaced"]),
    ]
    lines += ["", "checks, all ranks in this process"]
    for check in found["checks"]:
        lines += [
            f"  {check['what']}",
            f"    cute_sharding: {check['ours']}",
            f"    torch alone:   {check['torch']}",
        ]
    return "\n".join(lines)


def checks() -> list[dict[str, str]]:
    """A view that torch refuses and a redistribution that takes it two collectives: what ranks hold
    afterwards, against slices of the whole tensor.
    """
    before = adapter.settings()
    try:
        # In a mode each: torch keeps the coordinates of meshes by their address in memory, and a
        # second mesh may be put where the first one was.
        with dispatch_modes.all_ranks(4):
            view = _compared(_view)
        with dispatch_modes.all_ranks(4):
            move = _compared(_move)
    except Exception as error:
        place = extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"
        return [
            {
                "what": "a view and a redistribution on 4 ranks",
                "ours": f"FAILED: {reason}",
                "torch": "not asked",
            }
        ]
    finally:
        adapter.switch_to(before)
    return [
        {"what": "view of (7, 3) as [S(0)] on 4 ranks to (21,)", **view},
        {
            "what": "redistribution of (6, 5) from [S(0), S(1)] to [S(1), S(0)] on 2 x 2 ranks",
            **move,
        },
    ]


def _compared(check: Callable[[], str]) -> dict[str, str]:
    found = {}
    for name, switch in (
        ("torch", adapter.disable),
        ("ours", lambda: adapter.enable(redistribution=True)),
    ):
        switch()
        try:
            found[name] = check()
        except RuntimeError as error:
            found[name] = f"raises {next(iter(str(error).splitlines()), '')}"
    return found


def _from_parts(
    parts: list[torch.Tensor], mesh: DeviceMesh, placements: list[Any], shape: tuple[int, ...]
) -> DTensor:
    local = local_tensors.LocalTensor(dict(enumerate(parts)))
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
    )


def _holds(tensor: Any, parts: list[torch.Tensor]) -> bool:
    local = communication.wait_for(tensor.to_local())
    with dispatch_modes.no_modes():
        return all(
            torch.equal(local_tensors.local_of(local, rank), part)
            for rank, part in enumerate(parts)
        )


def _view() -> str:
    with dispatch_modes.no_modes():
        full = torch.arange(21.0).reshape(7, 3)
        parts = list(full.split(2))
    viewed = _from_parts(parts, DeviceMesh("cpu", torch.arange(4)), [Shard(0)], (7, 3)).view(21)
    return (
        "right, and nothing is moved"
        if _holds(viewed, [part.flatten() for part in parts])
        else "WRONG DATA"
    )


def _move() -> str:
    with dispatch_modes.no_modes():
        full = torch.arange(30.0).reshape(6, 5)
        before = [part for rows in full.split(3) for part in rows.split(3, 1)]
        after = [part for j in range(2) for part in full[:, 3 * j : 3 * j + 3].split(3)]
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2))
    calls = CollectiveCounter()
    with calls:
        moved = _from_parts(before, mesh, [Shard(0), Shard(1)], (6, 5)).redistribute(
            placements=[Shard(1), Shard(0)]
        )
    return (
        f"right, in {calls.count} collective{'s' * (calls.count != 1)}"
        if _holds(moved, after)
        else "WRONG DATA"
    )


class CollectiveCounter(TorchDispatchMode):
    """Counts the collectives that run inside the ``with`` block. (torch's CommDebugMode needs
    numpy, which comes with no torch.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own ops come by here as well
        if communication.communicates(func):
            self.count += 1
        return func(*args, **(kwargs or {}))
