"""Whole models: many tensors from their meshes to others, in few exchanges.

What holds tensors is taken apart and changed here: modules, optimizers, dicts and lists. What is
sent follows from the plan alone, which all ranks make alike.

- :mod:`.nests`: the tensors of a state, by name, and where each stands
- :mod:`.targets`: what placements say of each name
- :mod:`.since`: buckets of which only what has changed is sent
- :mod:`.reshard`: ``reshard``, ``plan_reshard``, and plans that run
"""
