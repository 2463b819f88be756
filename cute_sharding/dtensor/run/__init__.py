"""Runs redistributions, movements, and lists of them, on local tensors.

All data moves in this room, except by torch's own steps, and by the scatter that distributes state
(:mod:`..extras.state`). Every function that decides what is sent, and in which group, returns the
same on all ranks: it must not depend on anything that one rank alone knows.

- :mod:`.placements`: placements as cuts of the algebra, and back; the order in which they shard;
  log lines
- :mod:`.groups`: ranks of a mesh; the process groups at hand
- :mod:`.packing`: what each rank sends and receives; sending it, in a group or point to point; how
  local tensors lie
- :mod:`.bundles`: the exchange of a bundle: of several tensors, in rounds, or between meshes
- :mod:`.runner`: plans of many tensors, bundle by bundle; :mod:`.this_process`: what such plans
  have in common
- :mod:`.executor`: the steps of a plan on one mesh; :mod:`.across_meshes`: from one mesh to another
- :mod:`.together`: steps of several tensors' plans, run at once
- :mod:`.moving`: a movement, also of windows, folds and diagonals of rows
- :mod:`.folds`: ops along a sharded dim that exchange states
- :mod:`.halos`: ops on windows; :mod:`.numbered`: rows by their numbers
- :mod:`.op_plan`: what a call of an op does, as one value; ops that skip torch's fast path; results
  without dims, which are never left pending
- :mod:`.ops`: runs an op of movements and views in place of torch's local op; slices and views that
  are copies, reads of stale ones, and writes, which reach the tensor
- :mod:`.written`: ops that write to tensors which are redistributed first
- :mod:`.in_graphs`: the op of a graph that runs an exchange
- :mod:`.redistribute`: a redistribution from end to end; steps that a graph shows, for symbolic
  sizes
- :mod:`.lists`: redistributions of several tensors, together where possible

``redistribute.redistribute_local_tensor`` finds the plan (``exchange/planner.py``) of a
redistribution, a tuple of steps, and ``executor.run`` runs them one after the other. A step that
reduces is run by ``executor._reduce``. A step that only moves is run by ``executor._exchange``, as
the first of these that is possible:

1. the backend's all-gather of a tensor dim (``executor.whole_dim``); if blocks differ by a row,
   each is padded to the longest;
2. an all-gather of each device's whole local tensor, unpacked afterwards (``AllToAll.gathers``); on
   gloo, whose all-gather makes one more copy, only if nothing has to be unpacked;
3. an all-to-all of the elements that each device needs.
"""
