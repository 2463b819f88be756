"""Copies that movement ops have made: what is written to one goes back by the same map, run
backward; what it is a slice of was written to, and it is moved again.

The map of a slice takes each row of the result to one row of the operand. Read from the result to
the operand it is a movement too, of which the operand's other rows are no part: these are left as
they are. Windows alone have rows in common, and two devices may have written other numbers there.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from cute_sharding.dtensor.extras.copies import Copies, note_copies
from cute_sharding.dtensor.run.ops import Runner
from cute_sharding.dtensor.run.placements import text
from cute_sharding.relations.forms import Fold, Window


class MovedCopies(Copies):
    """What a movement op gave that are views on a plain tensor, and here copies: rows of them came
    from other devices.

    Attributes:
        runner: of the op.
    """

    # ``has`` is None: to compare what copies have costs as much as to move it again.

    def __init__(self, runner: Runner, *noted: Any) -> None:
        super().__init__(*noted)
        self.runner = runner

    def moved_again(self, number: int) -> torch.Tensor:
        return self.runner.again(number, self.source)

    def take_back(self, number: int, moved: torch.Tensor) -> None:
        self.runner.back(number, moved, self.source)

    def check(self, writer: str, tensor: Any) -> None:
        """
        Raises:
            RuntimeError: as for any copy; or it is windows, which may have rows in common, or what
                it is of was expanded.
        """
        super().check(writer, tensor)
        windows = any(
            isinstance(rows.form, (Window, Fold))
            for part in self.runner.movement.exchange.move.links
            for pair in part.pairs
            for rows in pair
        )
        meta = self.spec.tensor_meta
        expanded = meta is not None and any(
            n > 1 and not step for n, step in zip(meta.shape, meta.stride)
        )
        if windows or expanded:
            raise RuntimeError(
                f"{writer} writes in place to the result of {self.runner.name} of a "
                f"DTensor of shape {tuple(self.spec.shape)} with placements "
                f"{text(self.spec.placements)}: windows of a sharded dim, or part of an expanded "
                "tensor. These may have one element in several places, so the write is not "
                "defined. Write to .clone() of it."
            )


def note_movement(runner: Runner, source: torch.Tensor, results: list[torch.Tensor]) -> None:
    """Take note that the movement has made the local tensors ``results`` of ``source``."""
    note_copies(source, runner.specs[0], results, partial(MovedCopies, runner))
