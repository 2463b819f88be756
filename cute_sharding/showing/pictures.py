"""Who sends what to whom, of the redistributions of a profile: pictures by
:mod:`cute_sharding.drawing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from cute_sharding.profiling import Line, Moved

# Of how many redistributions pictures are made: those that receive the most.
MOST = 8
# Larger meshes make no picture that can be read.
DEVICES = 64


def pictures(lines: Sequence[Line]) -> list[tuple[Moved, str]]:
    """(redistribution, its picture as the text of an SVG) of the lines that receive the most; none
    without matplotlib. Partial placements of other kinds than torch's own make none.
    """
    wanted = [moved for line in lines for moved in line.cause.moved]
    found = []
    for moved in list(dict.fromkeys(wanted))[:MOST]:
        drawn = None if prod(moved.mesh) > DEVICES else _drawn(moved)
        if drawn is not None:
            found.append((moved, drawn))
    return found


def _drawn(moved: Moved) -> str | None:
    from cute_sharding import dtensor
    from cute_sharding.drawing import draw

    before, after = (", ".join(side) for side in (moved.before, moved.after))
    try:
        plan = dtensor.plan_redistribution(moved.shape, moved.mesh, before, after)
        svg = draw(plan.named(moved.names)).svg()
    except (ImportError, ValueError, RuntimeError, NotImplementedError):
        return None
    return svg[svg.index("<svg") :]
