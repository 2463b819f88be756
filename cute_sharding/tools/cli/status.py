"""What is on in this process and why, on which torch, and whether it works here: ``python -m
cute_sharding status``.
"""

from __future__ import annotations

import os
import platform
from typing import Any

import cute_sharding
from cute_sharding import _autoload
from cute_sharding._settings import FLAGS, TABLE, from_environment, unknown_flags


def status() -> dict[str, Any]:
    """As plain data: versions, flags, what they have come to, the parts of torch that are replaced
    now, and what two checks have found.
    """
    from cute_sharding.tools import checks

    return {
        "version": cute_sharding.__version__,
        "python": platform.python_version(),
        "flags": {flag: os.environ.get(flag) for flag in FLAGS},
        "unknown_flags": unknown_flags(os.environ),
        **checks.state(),
        "why": _autoload.report,
        "checks": checks.checks(),
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
