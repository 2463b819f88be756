"""Many tensors at once, from any meshes to any others: a model, an optimizer, a checkpoint. Imports
no torch.

One theory: results are made of operands, by a relation; what cannot be made apart is a *member* of
a plan; members are packed into buckets, which go in one exchange each.

- :mod:`.tensor`: how a tensor lies, with its dtype, its name and what is pending.
- :mod:`.shapes`: the tensors of a model, from a file.
- :mod:`.buckets`: which members go together, by a memory limit.
- :mod:`.plan`: a plan of members, and what it takes; that of tensors which move as they are.
- :mod:`.refit`: tensors of one program made of those of another.
- :mod:`.stored`, :mod:`.load`: tensors in the chunks of a checkpoint, who needs some of them, and
  who reads them: refits whose operands are what was read.
"""

from cute_sharding.models.plan import ReshardPlan, plan_models
from cute_sharding.models.tensor import PlacedTensor

__all__ = ["PlacedTensor", "ReshardPlan", "plan_models"]
