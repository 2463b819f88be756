"""The results of dry runs, setting by setting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cute_sharding.tools.estimate.memory import Memory
from cute_sharding.tools.estimate.traffic import Traffic
from cute_sharding.tools.profile.report import Place

STOCK = "PyTorch"
# Seconds, or bytes, that differ by a smaller share count as equal.
ALIKE = 0.01
# The columns, with their flags.
SETTINGS: dict[str, dict[str, str]] = {
    STOCK: {},
    "views": {"USE_CUTE_VIEW_PROPAGATION": "1"},
    "redistribution": {"USE_CUTE_REDISTRIBUTION": "1"},
    "movement": {"USE_CUTE_MOVEMENT": "1"},
    "all": {"USE_CUTE_SHARDING": "1"},
}


@dataclass(frozen=True)
class Failure:
    """The failure of a step.

    Attributes:
        text: the error, in one line.
        place: the line of the program; None if the error has no line of the program.
    """

    text: str
    place: Place | None

    def __str__(self) -> str:
        return self.text if self.place is None else f"{self.place}: {self.text}"


class CommunicatingOp(NamedTuple):
    """An op that communicates.

    Attributes:
        place: the line of the program.
        backward: whether the op computes a gradient.
        op: the name of the op.
        text: the op, its tensors and the rule that decided, in a sentence.
    """

    place: Place
    backward: bool
    op: str
    text: str


@dataclass(frozen=True)
class DryRun:
    """A step with one setting.

    Attributes:
        setting: one of ``SETTINGS``.
        step: the communication of the step, up to a failure.
        setup: the communication before the step.
        memory: the memory of the rank.
        failure: the reason why the step does not run; None if it runs.
        causes: the ops of DTensors that communicate. The program asks for all other communication.
        counted: whether the figures follow from runs with fewer layers.
    """

    setting: str
    step: Traffic
    setup: Traffic
    memory: Memory
    failure: Failure | None = None
    causes: tuple[CommunicatingOp, ...] = ()
    counted: bool = False
