"""Decides, for each op, which placements it needs and which its results get.

What a call of an op does is one value, :class:`~cute_sharding.dtensor.run.op_plan.OpPlan`.

- :mod:`.decide`: the list of functions of which the first with a plan decides: the one file to
  read first; operands on several meshes, described on one
- :mod:`.question`: facts about an op that the decision depends on, torch's rule on operands without
  strided shards, and which redistributions torch itself does rightly
- :mod:`.movement`: slices, splits, rolls, pads and windows of sharded dims
- :mod:`.views`: views, by placements carried through a DimMap
- :mod:`.signatures`: the placements that an op's signature allows
- :mod:`.local`: what runs on local tensors beside a kernel: its arguments, averages over devices
  with different numbers of elements, rows that an index picks, results
- :mod:`.values`: ops whose results are values, or have sizes that depend on them; losses
- :mod:`.redistributions`: which redistributions run by plan; ops that write to an operand

Bugs of torch on placements that its own rules accept are in :mod:`..fixes`.
"""

from cute_sharding.dtensor.decide.decide import propagation
from cute_sharding.dtensor.decide.movement import slices_together
from cute_sharding.dtensor.decide.question import gated_handler, writing_handler
from cute_sharding.dtensor.decide.redistributions import redistribute, redistribution_of_arguments
from cute_sharding.dtensor.decide.values import loss_handler

__all__ = [
    "gated_handler",
    "loss_handler",
    "propagation",
    "redistribute",
    "redistribution_of_arguments",
    "slices_together",
    "writing_handler",
]
