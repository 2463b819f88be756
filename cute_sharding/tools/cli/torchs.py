"""The result of torch's own rule, for ``explain --torch``. This module imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cute_sharding.sharding import Sharding
from cute_sharding.tools.cli.plan import of_torch


def by_torch(
    name: str, before: Sharding, arguments: Sequence[Any], times: int | None = None
) -> dict[str, Any]:
    """The result of torch's rule for the aten overload ``name``, as data: the placements to which
    the rule redistributes the input, the elements that this redistribution receives, and the
    placements of the output; or the error of the rule.
    """
    from cute_sharding.tools.stock import stock_rule

    given = [list(value) if isinstance(value, tuple) else value for value in arguments]
    return stock_rule(name, before.shape, before.mesh, of_torch(before), given, times=times)


def show_by_torch(found: dict[str, Any], placements: Sequence[str]) -> str:
    """The result of torch's rule in one line; ``placements`` are those of the input."""
    if found["error"] is not None:
        return f"by torch's own rule: raises {found['error']}"
    outputs = " and ".join(dict.fromkeys(f"[{', '.join(output)}]" for output in found["outputs"]))
    if found["input"] == list(placements):
        return f"by torch's own rule: nothing is redistributed, the output is {outputs}"
    return (
        f"by torch's own rule: the input is redistributed to [{', '.join(found['input'])}], a "
        "device receives "
        f"{found['received_elements']} elements, the output is {outputs}"
    )
