"""What runs: redistributions, movements, and lists of them, on local tensors.

Data moves here; elsewhere only torch's own steps move any, and the scatter with which state is
distributed (:mod:`..extras.state`). Whoever is asked answers alike on all ranks: what is sent, and
in which group, must not depend on what one rank alone knows.

- :mod:`.placements`: placements as cuts of the algebra, and back
- :mod:`.ranks`, :mod:`.groups`: ranks of a mesh; the process groups at hand
- :mod:`.reading`: how the _StridedShard placements of a tensor are to be read
- :mod:`.packing`, :mod:`.messages`: what each rank sends and receives; sending it, in a group or
  point to point
- :mod:`.executor`: the steps of a plan on one mesh; :mod:`.across_meshes`: from one mesh to another
- :mod:`.together`: steps of several tensors' plans, run at once
- :mod:`.moving`, :mod:`.windows`: a movement; rows that stand for several rows
- :mod:`.ops`: what stands in for the local form of an op: movements and views
- :mod:`.dynamic`: sizes that are symbols: steps that the compiler sees, or one op of a graph, which
  plans and runs anew in each call
- :mod:`.words`: what the log says
- :mod:`.redistribute`: the whole of it
- :mod:`.lists`: of several tensors, together where they can be

A redistribution goes through these: ``redistribute.redistribute_local_tensor`` finds the plan
(``exchange/planner.py``), a tuple of steps, and ``executor.run`` runs them one after the other. A
step that reduces is ``executor._reduce``. A step that only moves is ``executor._exchange``, which
takes the first of these that the step is:

1. an all-gather of a tensor dim, as the backend has it (``executor.whole_dim``); where blocks
   differ by a row, each filled up to the longest;
2. an all-gather of all that each device has, unpacked afterwards (``AllToAll.gathers``); on gloo,
   whose all-gather copies once more, only where nothing has to be unpacked;
3. an all-to-all of what each device needs.
"""
