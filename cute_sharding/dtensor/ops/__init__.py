"""Ops beside views: what they are handed is known to be right.

torch decides by its own rules wherever those are known to be right. Of ops on plain placements
these are answered here: those by which ranks would draw differently, or that are told sizes; writes
to what is pending, and values that have nothing to do with it; item(); extremes of nothing; rules
that torch derives on one device; averages of blocks that differ; and the few of which torch's own
rule is wrong on shards (all in :mod:`.cases`). What views make is another matter: of
_StridedShard placements an op with a row in the table (cute_sharding/ops) carries what its
signature lets it carry; ops that torch is known to get right on any cut (:mod:`.carried`) are
torch's; all others get what torch would have had, the mesh dims of such placements replicated by
plan: the gate.

- :mod:`.cases`: who answers for an op: the one table to read first
- :mod:`.plain_shards`: which ops torch gets wrong on Shard placements alone
- :mod:`.carried`: which ones it gets right on any cut
- :mod:`.by_signature`: the placements that a signature carries
- :mod:`.shares`: averages in which each device counts by what it has
- :mod:`.written`: pointwise ops that write to one of their operands
- :mod:`.scalars`: results without dims, of which nothing is left pending
- :mod:`.local_arguments`: what kernels want of local arguments beside the values of tensors
- :mod:`.gate`: what torch would have had; and ops that go past the propagator
- :mod:`.losses`: what loss_parallel is given
- :mod:`.running`: which redistributions run by plan
- :mod:`.cuts`: placements in the terms of signatures
"""

from cute_sharding.dtensor.ops.carried import CARRIED
from cute_sharding.dtensor.ops.cases import propagation
from cute_sharding.dtensor.ops.gate import gated_handler, writing_handler
from cute_sharding.dtensor.ops.losses import loss_handler
from cute_sharding.dtensor.ops.running import redistribution, redistribution_of_arguments

__all__ = [
    "CARRIED",
    "gated_handler",
    "loss_handler",
    "propagation",
    "redistribution",
    "redistribution_of_arguments",
    "writing_handler",
]
