"""Decides, for each op, which placements it needs and which its results get.

What a call of an op does is one value, :class:`~cute_sharding.dtensor.run.op_plan.OpPlan`.

- :mod:`.decide`: the list of functions of which the first with a plan decides: the one file to
  read first
- :mod:`.meshes`: operands on several meshes, described on one
- :mod:`.movement`: slices, splits, rolls, pads and windows of sharded dims; :mod:`.any_sizes`: the
  same with symbolic sizes; :mod:`.splits`: the parts of ``tensor_split`` in one exchange
- :mod:`.question`: facts about an op that the decision depends on, and the answers not by torch
- :mod:`.views`, :mod:`.view_placements`: answers for views; placements carried through a DimMap
- :mod:`.signatures`: the placements that an op's signature allows
- :mod:`.gate`: torch's rule on operands without strided shards; ops that skip the propagator
- :mod:`.picks`: rows of a sharded dim that an index picks
- :mod:`.shares`: averages over devices with different numbers of elements
- :mod:`.written`: ops that write to an operand
- :mod:`.values`: ops whose results have sizes that depend on values
- :mod:`.local_arguments`, :mod:`.local_results`: local arguments in the form that kernels expect;
  numbers that are reduced, and the order in which results lie
- :mod:`.losses`: the placements that loss_parallel takes
- :mod:`.redistributions`: which redistributions run by plan; :mod:`.stock`: which ones torch
  itself does rightly

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
