"""What is switched on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

# Where strict views may redistribute their input to: nowhere, where the fewest elements are
# received, or as torch's rules for other views do.
Implicit: TypeAlias = Literal[False, "cheapest", "replicate"]
IMPLICIT = (False, True, "cheapest", "replicate")


@dataclass(frozen=True)
class Settings:
    """Attributes as the arguments of :func:`cute_sharding.enable`."""

    views: bool = True
    implicit_redistribution: Implicit = False
    redistribution: bool = False
    ops: bool = True
    movement: bool = False

    @classmethod
    def of(
        cls,
        views: bool,
        implicit_redistribution: bool | str,
        redistribution: bool,
        ops: bool = True,
        movement: bool = False,
    ) -> Settings:
        """Raises:
        ValueError: ``implicit_redistribution`` is none of its values; or ``movement`` without
            views and ops.
        """
        if movement and not (views and ops):
            raise ValueError(
                "movement=True with views=False or ops=False: what movement ops make may be a "
                "_StridedShard, which torch's own rules of other ops take for something else; "
                "leave views and ops on"
            )
        if implicit_redistribution not in IMPLICIT:
            raise ValueError(
                f"implicit_redistribution={implicit_redistribution!r} is none of "
                f"{', '.join(map(repr, IMPLICIT))}; True is 'cheapest'"
            )
        implicit = "cheapest" if implicit_redistribution in (True,) else implicit_redistribution
        chosen: Any = implicit or False
        return cls(bool(views), chosen, bool(redistribution), bool(ops), bool(movement))

    @property
    def key(self) -> str:
        """Short, and another for other settings."""
        implicit = self.implicit_redistribution or 0
        others = (self.redistribution, self.ops, self.movement)
        return f"{int(self.views)}{implicit}{''.join(str(int(on)) for on in others)}"
