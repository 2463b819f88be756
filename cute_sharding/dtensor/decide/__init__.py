"""What an op needs and gives: who answers, and with what.

An answer may have functions that move data when the op runs: reductions (:mod:`.scalars`,
:mod:`.shares`) and replicas (:mod:`.gate`, :mod:`.losses`).

- :mod:`.decide`: who answers for an op: the one file to read first
- :mod:`.meshes`: operands on several meshes, read on one
- :mod:`.movement`: slices, splits, rolls, pads and windows of sharded dims; :mod:`.any_sizes`: the
  same where sizes are symbols; :mod:`.splits`: several of them as one
- :mod:`.question`: what is decided about it, and the answers that are not torch's
- :mod:`.views`, :mod:`.view_placements`: what a view answers; placements carried through a DimMap
- :mod:`.view_words`: what is said of a view that is not free
- :mod:`.ordered_views`: views of what is not sharded left to right
- :mod:`.signatures`: the placements that a signature carries
- :mod:`.gate`: what torch would have had; and ops that go past the propagator
- :mod:`.picks`: rows that an index picks, of a dim that is cut
- :mod:`.shares`: averages in which each device counts by what it has
- :mod:`.scalars`: results without dims, of which nothing is left pending
- :mod:`.written`: ops that write
- :mod:`.local_arguments`: what kernels want of local arguments beside the values of tensors
- :mod:`.losses`: what loss_parallel is given
- :mod:`.redistributions`: which of them run by plan; :mod:`.stock`: where torch itself
  redistributes rightly
- :mod:`.places`: what ops receive where they are answered, beside torch's own rules

What torch gets wrong on placements that its own rules know stands in :mod:`..fixes`.
"""

from cute_sharding.dtensor.decide.decide import propagation
from cute_sharding.dtensor.decide.gate import gated_handler, writing_handler
from cute_sharding.dtensor.decide.losses import loss_handler
from cute_sharding.dtensor.decide.redistributions import redistribute, redistribution_of_arguments
from cute_sharding.dtensor.decide.splits import slices_together

__all__ = [
    "gated_handler",
    "loss_handler",
    "propagation",
    "redistribute",
    "redistribution_of_arguments",
    "slices_together",
    "writing_handler",
]
