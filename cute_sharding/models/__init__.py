"""Many tensors at once, from any meshes to any others: a model, an optimizer, a checkpoint. Imports
no torch.

- :mod:`.tensor`: how a tensor lies, with its dtype and what is pending.
- :mod:`.shapes`: the tensors of a model, from a file.
- :mod:`.way`: how one tensor, or all that lie alike, get from one spec to another.
- :mod:`.buckets`: which of them go together, by a memory limit.
- :mod:`.plan`: the whole of it, and what it takes.
- :mod:`.refit`: tensors of one program made of those of another.
- :mod:`.stored`, :mod:`.needs`, :mod:`.load`: tensors in the chunks of a checkpoint, who needs
  some of them, and who reads them.
"""

from cute_sharding.models.plan import ReshardPlan, plan_models
from cute_sharding.models.tensor import PlacedTensor

__all__ = ["PlacedTensor", "ReshardPlan", "plan_models"]
