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
"""
