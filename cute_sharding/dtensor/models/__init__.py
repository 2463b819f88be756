"""Whole models: many tensors from their meshes to others, in few exchanges.

What holds tensors is taken apart and changed here: modules, optimizers, dicts and lists. What is
sent follows from the plan alone, which all ranks make alike.

- :mod:`.nests`: the tensors of a state, by name, and where each stands
- :mod:`.targets`: what placements say of each name
- :mod:`.straight`: long messages of one tensor, straight from memory to memory
- :mod:`.moving`: buckets, packed, sent and unpacked
- :mod:`.changes`, :mod:`.since`: what has changed of a message, and of a bucket
- :mod:`.memory`: what is let go is given back
- :mod:`.running`: plans that run
- :mod:`.plan`: ``plan_reshard``
- :mod:`.reshard`: ``reshard``
"""
