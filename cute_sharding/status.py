"""What is on in this process and why, on which torch, and whether it works here: ``python -m
cute_sharding status``.
"""

from __future__ import annotations

import os
import platform
from typing import Any

import cute_sharding
from cute_sharding import _autoload

FLAGS = (
    _autoload.EVERYTHING_FLAG,
    _autoload.FLAG,
    _autoload.REDISTRIBUTION_FLAG,
    _autoload.IMPLICIT_FLAG,
    _autoload.OPS_FLAG,
    _autoload.MOVEMENT_FLAG,
)


def status() -> dict[str, Any]:
    """As plain data: versions, flags, what they have come to, the parts of torch that are replaced
    now, and what two checks have found.
    """
    from cute_sharding.dtensor.reports import check

    return {
        "version": cute_sharding.__version__,
        "python": platform.python_version(),
        "flags": {flag: os.environ.get(flag) for flag in FLAGS},
        **check.state(),
        "why": _autoload.report,
        "checks": check.checks(),
    }


def is_well(found: dict[str, Any]) -> bool:
    """Whether the checks are right, and what the flags ask for is on."""
    asked = any(
        (value or "").strip().lower() not in _autoload._OFF
        for flag, value in found["flags"].items()
        if flag != _autoload.OPS_FLAG
    )
    return all(check["ours"].startswith("right") for check in found["checks"]) and (
        found["on"] is not None or not asked
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
    ]
    on = found["on"]
    if on is None:
        lines.append(f"off: {found['why']}")
    else:
        parts = [name for name in ("views", "redistribution") if on[name]]
        implicit = on["implicit_redistribution"]
        ops = ", ops by their signatures" if on["views"] and on["ops"] else ""
        may_move = f", views may redistribute ({implicit})" if implicit else ""
        moved = ", movement ops" if on["movement"] else ""
        lines.append(f"on: {' and '.join(parts)}{ops}{moved}{may_move}; {found['why']}")
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
